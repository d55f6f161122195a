"""Streams of a cluster, of which a process is killed meanwhile: their texts, and the times of their pieces.

Used by `bench faults`, `demo --faults` and tests. Knows HTTP and process ids. Explained in
docs/explain/failures.md.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import httpx
import psutil

from mooncake_lite.errors import ClusterError
from mooncake_lite.tools.client import AnswerFailed, events
from transport.threads import start_thread

PATIENCE_S = 120.0
"""Longest silence of a stream. A rank on a machine under load takes a fraction of it."""


CHILDREN = ("conductor", "gateway")
"""The programs that rank 0 starts, mooncake_lite.NAME."""


class Prompt(NamedTuple):
    """What a stream asks for: a text, or token ids. temperature 0: greedy; otherwise drawn with the seed."""

    prompt: str | list[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0

    def body(self, salt: str = "") -> dict[str, Any]:
        """Return the body of the request: an answer of exactly max_tokens. salt: reuse nothing of others."""
        how = {"temperature": self.temperature, "seed": self.seed, "ignore_eos": True, "stream": True}
        salted = {"cache_salt": salt} if salt else {}
        return {"prompt": self.prompt, "max_tokens": self.max_tokens, **how, **salted}


@dataclass(slots=True)
class Stream:
    """One answer.

    times   of the request, and of each piece, in seconds of time.monotonic()
    error   why it broke off; "" if it is whole
    """

    text: str = ""
    times: list[float] = field(default_factory=list)
    error: str = ""

    def longest_gap_s(self, after: float = 0.0, *, first: bool = True) -> float:
        """Return the longest time without a piece that ends after this moment.

        first   the time to the first piece counts as well
        """
        times = self.times[not first :]
        gaps = [later - earlier for earlier, later in pairwise(times) if later > after]
        return max(gaps, default=0.0)


def play(
    url: str,
    prompts: Sequence[Prompt],
    act: Callable[[], object] = lambda: None,
    at_s: float = 0.0,
    salt: str = "",
) -> tuple[list[Stream], float]:
    """Ask for all answers at once, and act at_s seconds later. Returns them, and the moment of the act."""
    streams = [Stream() for _ in prompts]
    readers = [
        start_thread("stream", _read, url, prompt.body(salt), stream)
        for prompt, stream in zip(prompts, streams)
    ]
    time.sleep(at_s)
    moment = time.monotonic()
    act()
    for reader in readers:
        reader.join()
    return streams, moment


def _read(url: str, body: dict[str, Any], stream: Stream) -> None:
    """Fill a stream. An answer that is refused or breaks off leaves the reason in it."""
    stream.times.append(time.monotonic())
    try:
        with (
            httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            if response.status_code != 200:
                response.read()
                raise AnswerFailed(response.text)
            for event in events(response.iter_lines()):
                for choice in event.get("choices", ()):
                    stream.times.append(time.monotonic())
                    stream.text += choice["text"]
    except (httpx.HTTPError, AnswerFailed) as error:
        stream.error = " ".join(str(error).split()) or type(error).__name__


def processes_of(pid: int) -> dict[str, psutil.Process]:
    """Return the processes of a cluster by name: "0" for rank 0 and so on, and CHILDREN. pid: of `serve`."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if child := next((name for name in CHILDREN if f"mooncake_lite.{name}" in command), ""):
                found[child] = process
            elif rank := process.environ().get("OMPI_COMM_WORLD_RANK", ""):
                found.setdefault(rank, process)
    return found


def process_of(pid: int, name: str) -> psutil.Process:
    """Return a process of a cluster by its name. Raises ClusterError."""
    try:
        return processes_of(pid)[name]
    except KeyError:
        raise ClusterError(f"the cluster has no process {name}") from None
