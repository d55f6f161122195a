"""A cluster for a benchmark, and an open-loop client that sends each request at its time.

Used by all benchmarks with clusters. The client shares the cores with the cluster, so it notes when the
events of a stream come and parses only the last one. It knows HTTP/1.1 as far as the gateway speaks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from mooncake_lite.config.serve import DEFAULT_MODEL
from mooncake_lite.errors import ClusterError, ConfigError
from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.model.progress import resolve_visibly
from mooncake_lite.profiles.file import Profile, parse_profile, shipped_profile, write_profile
from mooncake_lite.tools.client import AnswerFailed, events

START_LIMIT_S = 180.0
PATIENCE_S = 300.0
GIVEN_UP = 0
"""The status of a request whose client left before the end of the answer."""

EVENT_BYTES = 1 << 20
"""Of one event, at most. The last one carries the trace."""

FOUR_RANKS = ("--prefill", "1", "--decode", "1", "--store", "1")


def model_folder(folder: Path | None) -> Path:
    """Return the folder of a model, of the default one where none is given. Raises ModelError."""
    return resolve_visibly(DEFAULT_MODEL) if folder is None else folder


def scaled_profile(folder: Path, factor: float) -> Profile:
    """Return the shipped profile of a model with longer or shorter times. Raises ConfigError without one."""
    raw = shipped_profile(folder)
    if raw is None:
        raise ConfigError(f"no profile of {folder.name} comes with this program; bench the default model")
    profile = parse_profile(raw, folder.name)
    compute = msgspec.structs.replace(profile.compute, time_scale=profile.compute.time_scale * factor)
    return profile.with_section("compute", compute)


@contextlib.contextmanager
def started(flags: Sequence[str], profile: Profile | None = None) -> Iterator[Cluster]:
    """Start a cluster that has answered once. Raises ClusterError.

    flags     of `serve`
    profile   of its ranks; without one they have that of their model
    """
    with tempfile.TemporaryDirectory(prefix="mooncake-lite-bench-") as place:
        file = Path(place) / "profile.json"
        if profile is not None:
            write_profile(file, profile)
            flags = [*flags, "--profile", str(file)]
        with Cluster([*flags], Path(place) / "log") as cluster:
            cluster.wait_ready(START_LIMIT_S)
            answers(cluster.port, [Ask(0.0, [1] * 32, 2)])
            yield cluster


class Ask(NamedTuple):
    """One request: when it is sent, in seconds after the begin; its prompt; the tokens of its answer.

    headers   besides those that every request has
    """

    at_s: float
    prompt: list[int]
    new_tokens: int
    headers: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True)
class Reply:
    """What came back.

    status    of HTTP, or GIVEN_UP
    sent_s    when the request was written, in seconds on this process's clock
    ttft_s    until the status came: with 200, that is the first token
    whole_s   until the end of the answer
    times     when each piece came, on the same clock: a token, or a few where a character needs several
    trace     of an answer that was asked for with the trace header: see docs/reference/http.md
    """

    ask: Ask
    sent_s: float
    status: int = GIVEN_UP
    request_id: str = ""
    ttft_s: float = 0.0
    whole_s: float = 0.0
    times: list[float] = field(default_factory=list)
    trace: dict[str, Any] = field(default_factory=dict)

    @property
    def tpot_s(self) -> float:
        """Return the mean gap between tokens after the first one; 0 for an answer of one token."""
        gaps = self.ask.new_tokens - 1
        return (self.whole_s - self.ttft_s) / gaps if gaps else 0.0


def answers(port: int, asks: Sequence[Ask], told: Callable[[], None] = lambda: None) -> list[Reply]:
    """Send each request at its time, and wait for all answers. Raises ClusterError, also for a refusal."""
    replies = asyncio.run(at_their_times(port, asks, told))
    for reply in replies:
        if reply.status != 200:
            raise ClusterError(f"the cluster answered a request with HTTP {reply.status}")
        if len(reply.times) < min(2, reply.ask.new_tokens):
            raise ClusterError(
                f"an answer of {reply.ask.new_tokens} tokens came in {len(reply.times)} pieces"
            )
    return replies


def stream_times(port: int, prompts: Sequence[list[int]], new: int) -> list[list[float]]:
    """Ask for all answers at once; return when their pieces came. Raises ClusterError."""
    return [reply.times for reply in answers(port, [Ask(0.0, prompt, new) for prompt in prompts])]


def tpot_s(times: Sequence[Sequence[float]], new: int) -> float:
    """Return the mean gap between a sequence's tokens while all sequences are decoded.

    times   when each piece of each answer came: see `Reply`
    new     tokens of each answer

    Only the time counts from the last sequence's first piece to the first end: before, prompts are computed
    as well, by the same process or by another one on the same cores. Where a sequence ends before another one
    begins, all the time of each counts.
    """
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    if begin >= end:
        return statistics.fmean((each[-1] - each[0]) / (new - 1) for each in times)
    pieces = [sum(begin < moment <= end for moment in each) * (new - 1) / (len(each) - 1) for each in times]
    return (end - begin) * len(times) / sum(pieces)


async def at_their_times(
    port: int, asks: Sequence[Ask], told: Callable[[], None], patience_s: float = PATIENCE_S
) -> list[Reply]:
    """Send each request at its time. Raises ClusterError when an answer breaks off.

    told         called after each answer
    patience_s   after which a client leaves
    """
    began = time.perf_counter()

    async def at_its_time(ask: Ask) -> Reply:
        await asyncio.sleep(max(0.0, began + ask.at_s - time.perf_counter()))
        reply = await send(port, ask, patience_s)
        told()
        return reply

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(at_its_time(ask)) for ask in asks]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def send(port: int, ask: Ask, patience_s: float = PATIENCE_S) -> Reply:
    """Send one request on a connection of its own, and read the answer. Raises ClusterError."""
    reply, body = Reply(ask, time.perf_counter()), _request(ask)
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=EVENT_BYTES)
            try:
                reply.sent_s = time.perf_counter()
                writer.write(body)
                head = await reader.readuntil(b"\r\n\r\n")
                reply.ttft_s = time.perf_counter() - reply.sent_s
                status, reply.request_id = _head(head)
                tail = await _tail(reader, reply.times)
            finally:
                writer.close()
        reply.status, reply.whole_s = status, time.perf_counter() - reply.sent_s
        if status == 200:
            for event in events(tail):
                reply.trace = event.get("mooncake_lite", {})
    except TimeoutError:
        pass
    except (OSError, asyncio.IncompleteReadError, AnswerFailed) as error:
        raise ClusterError(f"an answer of the cluster broke off: {error}") from None
    return reply


def _request(ask: Ask) -> bytes:
    """Return the bytes of a request: greedy, streamed, and with an answer of exactly `new_tokens`."""
    how = {"temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps({"prompt": ask.prompt, "max_tokens": ask.new_tokens, **how})
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in ask.headers.items()),
    ]
    return "\r\n".join([*lines, "", body]).encode()


def _head(head: bytes) -> tuple[int, str]:
    """Return the status and the id of the request."""
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split(" ")[1]), headers.get("x-request-id", "")


async def _tail(reader: asyncio.StreamReader, times: list[float]) -> list[str]:
    """Note when events come until the server closes the connection; return the last one and the end mark."""
    last = end = b""
    async for line in reader:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
            last = line
        elif line.startswith(b"data: "):
            end = line
    return [last.decode(), end.decode()]
