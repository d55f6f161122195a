"""The messages between the couriers of two nodes, and nothing else.

Sent by `courier` through `channel`; they name ranges of bytes and never carry them.
Explained in docs/explain/transport.md.

    read    A: post receives            write   A: A -> B  ReadRequest                 A -> B  WriteRequest B
            => A  bytes (MPI)                 B: post receives;  B -> A  Accept A -> B  Done
            A => B  bytes (MPI);  B -> A  Done
    B answers Refuse to a request that it rejects. A sends Cancel when it gives up, and B answers Cancelled
    when none of its bytes can land any more.
    B, the sender of a read, waits for Done too: MPI may still hold bytes, and they only leave while B calls
    it.
    Help belongs to no exchange: A reads or writes B's window (`one_sided`), and nothing moves."""

from __future__ import annotations

import msgspec

MESSAGE_BYTES = 128 * 1024
"""Largest message: jobs.MAX_RANGES offsets and lengths of 9 bytes each, and the other fields."""


class ReadRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for ranges of a segment of the receiver, with the tag that belongs to `number`."""

    number: int
    segment: int
    offsets: list[int]
    lengths: list[int]


class WriteRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask to write ranges of a segment of the receiver."""

    number: int
    segment: int
    offsets: list[int]
    lengths: list[int]


class Accept(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Accept a WriteRequest: its receives are posted."""

    number: int


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that every byte has arrived. `mine`: the sender of this message chose the number."""

    number: int
    mine: bool


class Refuse(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reject a request, because of `reason`."""

    number: int
    reason: str


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Give up a request of the sender."""

    number: int


class Cancelled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer Cancel: nothing of the request will be read or written here any more."""

    number: int


class Help(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask the receiver to enter MPI for a moment: bytes of its window do not move by themselves."""


Request = ReadRequest | WriteRequest
ANY_MESSAGE = ReadRequest | WriteRequest | Accept | Done | Refuse | Cancel | Cancelled | Help
