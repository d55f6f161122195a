"""HTTP below the endpoints: clients that leave, event streams, errors.

Used by `endpoints`, `cross_origin` and `__main__`. Knows ASGI and uvicorn, but no request's meaning.
A client that leaves is noticed, streaming or not, because its connection is watched (`half_closed`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
import uvicorn
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.problems import Unavailable, error_headers, error_object

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection, or took nothing for so long that `connection` ended it."""


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves: ClientGone is raised then.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for future in (task, gone):
            future.cancel()
        # The cancelled work must have told the cluster before this continues.
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A response of server-sent events, sent as they come.

    events   bytes of whole events; closed when the client leaves
    on_end   called at the end; False when the client left before
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], headers: dict[str, str], on_end: Callable[[bool], None]
    ):
        named = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        super().__init__(_with_pauses(events), headers=named)
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI side of the response: returns when the last event is sent or the client has left."""
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGone:
            self._on_end(False)
        else:
            self._on_end(True)

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await self.stream_response(send)


async def _with_pauses(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield pieces with a pause after each, so that the event loop sees a lost connection."""
    async for piece in pieces:
        yield piece
        await asyncio.sleep(0)


def in_pieces(pieces: Sequence[bytes]) -> StreamingResponse:
    """A JSON response that may be long: the event loop does other things between two of its pieces."""

    async def each() -> AsyncGenerator[bytes, None]:
        for piece in pieces:
            yield piece
            await asyncio.sleep(0)  # a write that need not wait would let no other task run

    length = {"content-length": str(sum(map(len, pieces)))}
    return StreamingResponse(each(), headers=length, media_type="application/json")


def well_framed(app: ASGIApp) -> ASGIApp:
    """`app` without requests of which two readers may disagree where they end (RFC 9112, section 6.3).

    A proxy that takes the other header for the length would pass on a second request, hidden in the body of
    the first. The connection is closed after such a request. `app` gets the path alone of a target that is a
    whole URL.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        names = [name for name, _ in scope["headers"]]
        if b"transfer-encoding" in names:
            problem = ""
            if b"content-length" in names:
                problem = "Content-Length and Transfer-Encoding contradict each other; send one of them"
            elif scope["http_version"] == "1.0":
                problem = "HTTP/1.0 has no Transfer-Encoding; send Content-Length"
            if problem:
                await closing_answer(RequestError(problem))(scope, receive, send)
                return
        await app(_in_origin_form(scope), receive, send)

    return answer


def _in_origin_form(scope: Scope) -> Scope:
    """A scope whose path begins after the authority: `http://host/path` is `/path`."""
    url = re.match(rb"https?://[^/]*", scope["raw_path"], re.IGNORECASE)
    if url is None:
        return scope
    raw_path = scope["raw_path"][url.end() :] or b"/"
    return {**scope, "raw_path": raw_path, "path": unquote(raw_path.decode("ascii"))}


def error_answer(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """An error object, with the headers that belong to it and others."""
    named = {**error_headers(error), **(headers or {})}
    return Response(msgspec.json.encode(error_object(error)), error.status, named, "application/json")


def closing_answer(error: RequestError) -> Response:
    """An error object, after which the connection is closed."""
    return error_answer(error, {"Connection": "close"})


def bounded(app: ASGIApp, limit: int, connections: Collection[Any]) -> ASGIApp:
    """`app`, which answers only while at most `limit` connections are open, those that are idle included.

    uvicorn has such a limit, whose answer is plain text.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if len(connections) <= limit:
            await app(scope, receive, send)
            return
        await closing_answer(crowded(limit))(scope, receive, send)

    return answer


def crowded(limit: int) -> Unavailable:
    """Return the error for a connection beyond the limit."""
    return Unavailable(f"{limit} connections are open, which is the limit; come back later", 1.0)


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers: it raises a signal again after its end, and code behind
    serve() would not run."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """Do nothing; uvicorn would install handlers here."""
        yield
