"""Messages between BytesClient and BytesServer, and their frames; the transferred bytes follow raw.

Used by `sockets` alone. A frame is a length (4 bytes, big-endian) and a message of `wire`.
Explained in docs/explain/transport.md.

    connect   server -> client  nonce             both 32 bytes
              client -> server  nonce, proof      HMAC-SHA256(secret, "client" both nonces)
              server -> client  proof             HMAC-SHA256(secret, "server" both nonces); 0 if it had none
    read      client -> server  Read              server -> client  Coming, bytes   | Refused
    write     client -> server  Write, bytes      server -> client  Done            | Refused
    write of more than EAGER_BYTES
              client -> server  Write             server -> client  Go              | Refused
              client -> server  bytes             server -> client  Done
"""

from __future__ import annotations

import msgspec

MAX_RANGES = 4096
"""Most ranges of one request, as in `jobs`; the client makes several requests of more."""

REQUEST_BYTES = 128 * 1024
"""Largest request: MAX_RANGES offsets and lengths of 9 bytes each, and the other fields."""

REPLY_BYTES = 1024
"""Largest reply: a reason, cut to REASON_CHARS."""

REASON_CHARS = 200

EAGER_BYTES = 4 * 2**20
"""Bytes that follow a Write without Go: waiting for Go costs a round trip, a tenth of the time of so many."""

NONCE_BYTES = 32
PROOF_BYTES = 32


class Read(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for these ranges of a segment."""

    segment: int
    offsets: list[int]
    lengths: list[int]


class Write(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask to put the bytes that follow into these ranges of a segment."""

    segment: int
    offsets: list[int]
    lengths: list[int]


class Coming(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer a Read: its bytes follow."""


class Go(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer a Write: its bytes may come."""


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer a Write: its bytes are in place."""


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reject a request, because of `reason`. The connection stays open."""

    reason: str


Request = Read | Write
Reply = Coming | Go | Done | Refused
