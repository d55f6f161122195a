"""Messages to bytes and back: one version byte, then MessagePack.

Used by `channel`, and by all parts that store messages. A message is a msgspec Struct. A Decoder is made for
the union of those that one side of a boundary may receive. Knows no socket. Nothing is ever pickled.
Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import struct
from threading import Lock
from typing import Any

import msgspec

from transport.errors import WireError

VERSION = 1
"""First byte of every message. Increase it when an old decoder would misread a new message."""

DEFAULT_MAX_BYTES = 8 * 2**20
"""Largest message by default: a prompt of a million tokens takes 5 MB."""

LENGTH = struct.Struct("!I")
"""Before each message of a stream: its bytes."""

_encoder = msgspec.msgpack.Encoder()
_PREFIX = bytes([VERSION])


def encode(message: msgspec.Struct, max_bytes: int = DEFAULT_MAX_BYTES) -> bytes:
    """Return the bytes of a message.

    Raises WireError when it has more than max_bytes, or a value that MessagePack cannot hold.
    """
    try:
        data = _PREFIX + _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{type(message).__name__} cannot be encoded: {error}") from None
    if len(data) > max_bytes:
        raise WireError(f"{type(message).__name__} has {len(data)} bytes, the limit is {max_bytes}")
    return data


def framed(message: msgspec.Struct, max_bytes: int = DEFAULT_MAX_BYTES) -> bytes:
    """Return the bytes of a message in a stream, with its length first. Raises WireError."""
    data = encode(message, max_bytes)
    return LENGTH.pack(len(data)) + data


_READS_TYPES = Lock()
"""msgspec 0.22 crashes the process when two threads read the fields of one Struct for the first time."""


class Decoder:
    """Decodes the messages of one boundary.

    union       a msgspec Struct type, or a union of tagged ones: what may arrive
    max_bytes   longer messages are refused before they are decoded
    """

    def __init__(self, union: Any, max_bytes: int = DEFAULT_MAX_BYTES):
        self.max_bytes = max_bytes
        with _READS_TYPES:
            self._decoder = msgspec.msgpack.Decoder(union)

    def size(self, data: bytes | bytearray | memoryview) -> int:
        """Return the bytes of the message whose length `data` begins with. Raises WireError."""
        (size,) = LENGTH.unpack_from(data)
        return self._checked(size)

    def _checked(self, size: int) -> int:
        if size > self.max_bytes:
            raise WireError(f"message has {size} bytes, the limit is {self.max_bytes}")
        return size

    def decode(self, data: bytes | memoryview) -> Any:
        """Return the message in `data`. Raises WireError, and nothing else, for all other bytes."""
        size = self._checked(len(data))
        if size < 2:
            raise WireError(f"message has {size} bytes, too few for one")
        if data[0] != VERSION:
            raise WireError(f"message is of version {data[0]}, this side speaks {VERSION}")
        try:
            return self._decoder.decode(memoryview(data)[1:])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(f"message cannot be decoded: {error}") from None
