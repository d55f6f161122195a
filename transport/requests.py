"""The messages between the couriers of two nodes, and nothing else.

Sent by `courier` through `channel`; they name ranges of bytes and never carry them.
Explained in docs/explain/transport.md.

    read    A: post receives            write   A:
            A -> B  ReadRequest                 A -> B  WriteRequest
            B => A  bytes (MPI)                 B: post receives;  B -> A  Accept
            A -> B  Done                        A => B  bytes (MPI);  B -> A  Done
    B answers Refuse to what it will not do; A sends Cancel when it gives up, and B Cancelled when nothing of
    it can land any more.
    Done is awaited also by the sender of a read: MPI may still hold bytes that it has taken over,
    and they only leave while someone calls it.
    Help belongs to no exchange: A reads or writes B's window (`one_sided`), and nothing moves.
"""

from __future__ import annotations

import msgspec

MESSAGE_BYTES = 128 * 1024
"""Largest message: jobs.MAX_RANGES offsets and lengths of 9 bytes each, and room."""


class ReadRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Send me these ranges of a segment of yours, with the tag that belongs to `number`."""

    number: int
    segment: int
    offsets: list[int]
    lengths: list[int]


class WriteRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """I want to write these ranges of a segment of yours."""

    number: int
    segment: int
    offsets: list[int]
    lengths: list[int]


class Accept(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The receives of your write are posted."""

    number: int


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Every byte has arrived. `mine`: the number is one that the sender of this message chose."""

    number: int
    mine: bool


class Refuse(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """I will not do this, because of `reason`."""

    number: int
    reason: str


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """I have given up my request."""

    number: int


class Cancelled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nothing of the request that you have given up will be read or written here any more."""

    number: int


class Help(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Enter MPI for a moment: what I do with your window does not move by itself."""


Request = ReadRequest | WriteRequest
ANY_MESSAGE = ReadRequest | WriteRequest | Accept | Done | Refuse | Cancel | Cancelled | Help
