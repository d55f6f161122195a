"""An open-loop client: sends each request at its time, however many answers are still open.

Used by `predictions` and `goodput`. It shares the cores with the cluster, so it parses nothing of a stream
but the last event. Knows HTTP/1.1 as far as the gateway speaks it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from mooncake_lite.errors import ClusterError

PATIENCE_S = 300.0
GIVEN_UP = 0
"""The status of a request whose client left before the end of the answer."""

TAIL_BYTES = 16384
"""Of a stream, as much as the last event may have. It carries the trace."""

READ_BYTES = 65536
LAST = b"data: [DONE]"


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
    trace     of an answer that was asked for with the trace header: see docs/reference/http.md
    """

    ask: Ask
    sent_s: float
    status: int = GIVEN_UP
    request_id: str = ""
    ttft_s: float = 0.0
    whole_s: float = 0.0
    trace: dict[str, Any] = field(default_factory=dict)

    @property
    def tpot_s(self) -> float:
        """Return the mean gap between tokens after the first one; 0 for an answer of one token."""
        gaps = self.ask.new_tokens - 1
        return (self.whole_s - self.ttft_s) / gaps if gaps else 0.0


async def one_at_a_time(port: int, asks: Sequence[Ask], told: Callable[[], None]) -> list[Reply]:
    """Send each request when the answer to the one before has ended. Raises ClusterError.

    told   called after each answer
    """
    replies = []
    for ask in asks:
        replies.append(await send(port, ask))
        told()
    return replies


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
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                reply.sent_s = time.perf_counter()
                writer.write(body)
                head = await reader.readuntil(b"\r\n\r\n")
                reply.ttft_s = time.perf_counter() - reply.sent_s
                status, reply.request_id = _head(head)
                tail = await _tail(reader)
            finally:
                writer.close()
    except TimeoutError:
        return reply
    except (OSError, asyncio.IncompleteReadError) as error:
        raise ClusterError(f"an answer of the cluster broke off: {error}") from None
    reply.status, reply.whole_s = status, time.perf_counter() - reply.sent_s
    if status == 200:
        reply.trace = _trace(tail)
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


async def _tail(reader: asyncio.StreamReader) -> bytes:
    """Read until the server closes the connection. Returns the last bytes."""
    tail = b""
    while data := await reader.read(READ_BYTES):
        tail = (tail + data)[-TAIL_BYTES:]
    return tail


def _trace(tail: bytes) -> dict[str, Any]:
    """Return the trace in the last event before the end mark. Raises ClusterError for a broken stream."""
    before, mark, _ = tail.rpartition(LAST)
    event = before[before.rfind(b"data: {") + len(b"data: ") :].partition(b"\n")[0]
    if not mark or event.startswith(b'{"error"'):
        raise ClusterError(f"an answer of the cluster broke off: {event[:200].decode(errors='replace')}")
    return dict(json.loads(event).get("mooncake_lite", {}))
