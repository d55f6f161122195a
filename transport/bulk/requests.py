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


class Numbered(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of the messages about one exchange. number: chosen by the courier that asked for it."""

    number: int


class Ranges(Numbered, frozen=True):
    """Base of the requests for ranges of a segment of the receiver."""

    segment: int
    offsets: list[int]
    lengths: list[int]


class ReadRequest(Ranges, frozen=True):
    """Ask for ranges, with the tag that belongs to `number`."""


class WriteRequest(Ranges, frozen=True):
    """Ask to write ranges."""


class Accept(Numbered, frozen=True):
    """Accept a WriteRequest: its receives are posted."""


class Done(Numbered, frozen=True):
    """Report that every byte has arrived. `mine`: the sender of this message chose the number."""

    mine: bool


class Refuse(Numbered, frozen=True):
    """Reject a request, because of `reason`."""

    reason: str


class Cancel(Numbered, frozen=True):
    """Give up a request of the sender."""


class Cancelled(Numbered, frozen=True):
    """Answer Cancel: nothing of the request will be read or written here any more."""


class Help(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask the receiver to enter MPI for a moment: bytes of its window do not move by themselves."""


Request = ReadRequest | WriteRequest
ANY_MESSAGE = ReadRequest | WriteRequest | Accept | Done | Refuse | Cancel | Cancelled | Help
