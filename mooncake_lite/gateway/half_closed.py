"""Clients that have ended their sending half (TCP half-close), and may still read their answer.

Used by `connection`. When a client ends its sending half, its server sees the same as when the client leaves:
the end of the stream. Only a client that has left answers further bytes with a reset. So the server sends the
bytes with which its answer begins in any case, one at a time, and looks for that reset. Explained in
docs/reference/http.md.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11

BEGINNING = b"HTTP/1.1 "
"""Every response begins with these bytes, whatever its status."""

PAUSES_S = tuple(0.05 * 3**n for n in range(len(BEGINNING)))
"""Before each byte: 0.05 s, 0.15 s, ... The server sends the last of the 9 bytes after 8 minutes."""

RESET_S = 0.05
"""Time for a reset to arrive after a byte. One that takes longer is seen at the next byte."""


class AnswerAhead(h11.Connection):
    """h11's state machine of a server, of whose next bytes some can be sent ahead."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self._num_ahead = 0
        self._in_chunks = False

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """Return the bytes of an event, without those that were sent ahead. `send` joins them."""
        if isinstance(event, h11.Response):
            names = {name for name, _ in event.headers}
            self._in_chunks = b"content-length" not in names and self.their_http_version == b"1.1"
        parts = super().send_with_data_passthrough(event)
        if parts and self._num_ahead:
            output = b"".join(parts)
            assert output.startswith(BEGINNING)
            parts, self._num_ahead = [output[self._num_ahead :]], 0
        return parts

    def next_byte(self) -> bytes:
        """Take the next byte that can be sent ahead; b"" if it is not known yet.

        Before a response that is the next byte of BEGINNING. Within one it is a leading zero of the size of
        the next chunk.
        """
        if self.our_state is h11.SEND_RESPONSE and self._num_ahead < len(BEGINNING):
            self._num_ahead += 1
            return BEGINNING[self._num_ahead - 1 : self._num_ahead]
        return b"0" if self.our_state is h11.SEND_BODY and self._in_chunks else b""


async def abort_when_gone(transport: asyncio.Transport, answers: AnswerAhead) -> None:
    """Abort the connection of a client that has ended its sending half, as soon as it has left altogether."""
    connection: Any = transport.get_extra_info("socket")
    for pause_s in PAUSES_S:
        await asyncio.sleep(pause_s)
        byte = answers.next_byte()
        if byte:
            transport.write(byte)
            await asyncio.sleep(RESET_S)
        if not transport.is_closing() and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()
            return
