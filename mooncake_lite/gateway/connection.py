"""One HTTP connection: uvicorn's protocol over h11, with what uvicorn leaves out.

Used by `__main__`. Knows no request's meaning; what an ASGI application can do is in `plumbing`.
"""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from mooncake_lite.config.origins import Origins
from mooncake_lite.errors import RequestError
from mooncake_lite.gateway.cross_origin import headers_for
from mooncake_lite.gateway.half_closed import AnswerAhead, abort_when_gone
from mooncake_lite.gateway.problems import error_object

LINGER_S, LINGER_BYTES = 10.0, 256 << 20
"""After an answer to a request that has not come whole: how long, and how many bytes, are dropped. Many
clients read no answer before they have sent all. A connection that is closed while bytes come is reset, and
they never see the answer."""

HEAD_BYTES = 16 * 1024
"""Longest request line and headers together, as in Node. nginx takes 8 KiB for each header."""


class ShortHeads(AnswerAhead):
    """h11's state machine of a server, which takes requests whose line and headers fit into HEAD_BYTES.

    h11 has a limit for what it cannot parse yet. Headers that come whole, in one read from the socket, may be
    of any length. So whether h11 takes long headers depends on the timing of packets.
    """

    head_is_too_long = False

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event. Raises RemoteProtocolError as h11 does, and for a head that is too long."""
        if self.their_state is h11.IDLE:
            received = self.trailing_data[0]
            if len(received) > HEAD_BYTES and not re.search(rb"\n\r?\n", received[:HEAD_BYTES]):
                self.head_is_too_long = True
                raise h11.RemoteProtocolError("the headers are too long", error_status_hint=431)
        return super().next_event()


class _Lingering:
    """A transport that leaves to its connection how it closes."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport, self._connection = transport, connection
        self.close = connection.close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Tell whether nothing more is to be sent."""
        return self._connection.is_lingering or self._transport.is_closing()


class Connection(H11Protocol):
    """Limits the time of headers and of writing, answers anything but HTTP with an error object, serves
    half-closed clients, and lets clients read their answer that still send.

    uvicorn limits only the pause between two requests: a client that sends half a header, or takes nothing
    of its answer, would keep its connection forever. And it drops a request when its client ends the sending
    half of the connection, although that client may wait for the answer (`half_closed`).
    """

    header_limit_s = 10.0
    write_limit_s = 60.0
    origins = Origins()

    conn: ShortHeads
    _direct: asyncio.Transport
    is_lingering = False  # the answer is sent, and the rest of its request is dropped
    _num_dropped = 0
    _header_timer: asyncio.TimerHandle | None = None
    _half_closed: asyncio.Task[None] | None = None

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self.conn = ShortHeads()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for the first request.

        The kernel ends the connection when the client takes nothing for write_limit_s, also after its close.
        """
        self._direct = transport
        super().connection_made(_Lingering(transport, self))  # type: ignore[arg-type]
        limit_ms = round(self.write_limit_s * 1e3)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request, or drop those of a request that has its answer already."""
        if self.is_lingering or self._is_answered_early():
            self._num_dropped += len(data)
            if self._num_dropped > LINGER_BYTES:
                self._direct.close()
                return
        if not self.is_lingering:
            super().data_received(data)
        if self.is_lingering:
            return
        between = self.cycle is None or self.cycle.response_complete
        if not between:
            self._stop_timer()
            self._num_dropped = 0
        elif self._header_timer is None:
            self._start_timer()

    def _is_answered_early(self) -> bool:
        """Return whether the last request has its whole answer, and has not come whole."""
        answered = self.cycle is not None and self.cycle.response_complete
        return answered and self.conn.their_state is h11.SEND_BODY

    def close(self) -> None:
        """Close the connection, or first let the client end a request that is answered."""
        if self._is_answered_early() and not self.is_lingering and not self._direct.is_closing():
            self._linger()
        else:
            self._direct.close()

    def _linger(self) -> None:
        """Send no more, and drop what comes, within limits."""
        self.is_lingering = True
        self._direct.write_eof()
        self.flow.resume_reading()
        self._stop_timer()
        self._header_timer = self.loop.call_later(LINGER_S, self._direct.close)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, or too long a head, unless an answer has begun. Close the
        connection.
        """
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        problem = RequestError("this is not valid HTTP/1.1")
        if self.conn.head_is_too_long:
            problem = RequestError(f"the headers are too long; {HEAD_BYTES} bytes are the limit", status=431)
        body = msgspec.json.encode(error_object(problem))
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **headers_for(self.origins, self._origin()),
        }
        for event in (
            h11.Response(
                status_code=problem.status,
                headers=list(headers.items()),
                reason=STATUS_PHRASES[problem.status],
            ),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self._linger()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Note that the client sends no more. Returns False, and asyncio closes, if it gets no answer."""
        if self._owes_an_answer() and self._half_closed is None:
            self._half_closed = self.loop.create_task(abort_when_gone(self.transport, self.conn))
        return self._owes_an_answer()

    def on_response_complete(self) -> None:
        """Continue with the next request, if the client has sent one or may send one."""
        super().on_response_complete()
        if self._half_closed is not None and not self._owes_an_answer():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request in progress that its client has left."""
        self._stop_timer()
        if self._half_closed is not None:
            self._half_closed.cancel()
        super().connection_lost(exc)

    def _owes_an_answer(self) -> bool:
        """Return whether a request has come whole and has no whole answer yet."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _origin(self) -> str | None:
        """Return the origin of the request that is being read; None if its headers were not understood."""
        if self.conn.our_state is h11.IDLE:
            return None
        return next((value.decode("latin-1") for name, value in self.headers if name == b"origin"), None)

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.header_limit_s, self._direct.close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def connection_type(header_limit_s: float, write_limit_s: float, allowed: Origins) -> type[Connection]:
    """Return the class of a server's connections, which uvicorn makes without arguments of ours.

    header_limit_s   from the first byte of a request's headers to their end
    write_limit_s    longest time in which a client reads nothing of its answer
    """

    class OneServers(Connection):
        pass

    OneServers.header_limit_s, OneServers.write_limit_s = header_limit_s, write_limit_s
    OneServers.origins = allowed
    return OneServers
