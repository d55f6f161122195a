"""The listening socket, which lets connections in while there is room for them and refuses others at once.

Used by `__main__`. Without it asyncio writes thousands of tracebacks a second when the process has no file
descriptor left. Knows no request. Explained in docs/reference/http.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from typing import Any

from mooncake_lite.config.origins import Origins
from mooncake_lite.gateway.cross_origin import headers_for
from mooncake_lite.gateway.plumbing import crowded, error_answer
from transport.messaging.descriptors import EXHAUSTED, raise_limit

OTHER_DESCRIPTORS = 96
"""Descriptors that connections leave: for the gateway itself some 30, UNASKED, LINGERING, and 34 to spare."""

UNASKED = 16
"""Connections beyond the limit that are let in. Their requests are refused by `plumbing.bounded`, with the
headers that a web page needs."""

AT_ONCE = 64
"""Connections that are refused in a row, so that a crowd does not keep the event loop from other work."""

LINGERING, LINGER_S = 16, 1.0
"""Refused connections that stay open, and how long. One that is closed at once may be reset before its client
has read the answer."""

PAUSE_S = 0.01
"""Pause of the whole process when it has no descriptor for a connection although some were left, so that it
does not spin."""

SAY_AGAIN_S = 60.0
"""Time between two lines about refused connections."""


class Door(socket.socket):
    """A listening socket for asyncio's server.

    limit   most connections: `most`, or fewer where the process may not have the descriptors
    """

    def __init__(self, listener: socket.socket, most: int, origins: Origins):
        super().__init__(listener.family, listener.type, listener.proto, listener.detach())
        self.limit = max(1, min(most, raise_limit() - OTHER_DESCRIPTORS))
        self._hint = "see ulimit -n" if self.limit < most else "that is the limit"
        self._refusal = _refusal(self.limit, origins)
        self._inside: set[socket.socket] = set()
        self._refused: list[socket.socket] = []
        self._said_s = -SAY_AGAIN_S

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept the next connection for which there is room. Raises BlockingIOError if none waits."""
        if len(self._inside) >= self.limit + UNASKED:
            self._inside = {each for each in self._inside if each.fileno() >= 0}
        for _ in range(AT_ONCE):
            try:
                sock, address = super().accept()
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                time.sleep(PAUSE_S)
                break
            if len(self._inside) < self.limit + UNASKED:
                self._inside.add(sock)
                return sock, address
            self._refuse(sock)
        raise BlockingIOError

    def _refuse(self, sock: socket.socket) -> None:
        """Answer a connection, and close it when its client has had time to read."""
        self._say()
        with contextlib.suppress(OSError):
            sock.setblocking(False)
            sock.send(self._refusal)
            sock.shutdown(socket.SHUT_WR)
        self._refused.append(sock)
        asyncio.get_running_loop().call_later(LINGER_S, sock.close)
        if len(self._refused) > LINGERING:
            self._refused.pop(0).close()

    def _say(self) -> None:
        if time.monotonic() - self._said_s > SAY_AGAIN_S:
            self._said_s = time.monotonic()
            line = f"gateway: {len(self._inside)} connections are open, and more are refused ({self._hint})"
            print(line, file=sys.stderr, flush=True)


def _refusal(limit: int, origins: Origins) -> bytes:
    """Return the HTTP response to a connection beyond the limit, whose request is not read."""
    answer = error_answer(crowded(limit), {"Connection": "close", **headers_for(origins, None)})
    headers = [b"%b: %b" % header for header in answer.raw_headers]
    return b"\r\n".join([b"HTTP/1.1 503 Service Unavailable", *headers, b"", bytes(answer.body)])
