"""What clients and the master say to each other. Names and numbers only; bytes never pass here.

Used by `link` and `master`. Every request carries the number of its call, and exactly one reply repeats
it. Typed and bounded (`transport.wire`). Explained in docs/explain/leases.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

PROTOCOL = 3
"""Raised when a client and a master of two versions would misunderstand each other."""

MAX_NAME_BYTES = 64 * 1024
"""Of an object's name in UTF-8."""

MAX_KEYS = 4096
"""Names of one message; a client sends several for more."""

MAX_BYTES = 16 * 2**20

NAMES_BYTES = MAX_BYTES // 2
"""Of the names in one message, so that there is room for what is said about each."""

MAX_SHORT, MAX_TARGETS = 1024, 64
"""Characters of the name of a segment; segments that one task copies to."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
Names = Annotated[list[Name], msgspec.Meta(max_length=MAX_KEYS)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Counts = Annotated[list[Count], msgspec.Meta(max_length=MAX_KEYS)]
Short = Annotated[str, msgspec.Meta(max_length=MAX_SHORT)]
Int32 = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""What the kernel takes for a process or a file descriptor."""


def portions(names: Sequence[str]) -> Iterator[slice]:
    """The slices of `names` that fit into one message each, in order."""
    first = size = 0
    for at, name in enumerate(names):
        nbytes = len(name) if name.isascii() else 4 * len(name)
        if at - first == MAX_KEYS or (size + nbytes > NAMES_BYTES and at > first):
            yield slice(first, at)
            first, size = at, 0
        size += nbytes
    if first < len(names):
        yield slice(first, len(names))


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of all. call: number of the request, at this client."""

    call: int


# ------------------------------------------------------------------ client -> master


class Hello(Message, frozen=True):
    """The first words of a stranger."""

    protocol: int


class Join(Message, frozen=True):
    """Let me in. token: read from the master's table, proof that we are of one user; b"" under CURVE."""

    token: bytes
    machine: Short
    pid: Int32
    hostname: Short
    segment: Segment | None


class Leave(Message, frozen=True):
    """I close. My segment goes with me."""


class Beat(Message, frozen=True):
    """I live. The answer is OK, and how far my segment has been used."""


class Drain(Message, frozen=True):
    """Answer OK when everything that the journals announce is in the table."""


class TableAsk(Message, frozen=True):
    """Where is the table now?"""


class SegmentAsk(Message, frozen=True):
    """Where is this segment?"""

    number: Count


class Wish(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A ReplicateConfig, checked by the client. soft_pin_ms: None without a pin."""

    replicas: Annotated[int, msgspec.Meta(ge=1)] = 1
    hard_pin: bool = False
    soft_pin_ms: Count | None = None
    keep_pin: bool = True
    preferred: list[Short] = []


class PutStart(Message, frozen=True):
    """Room for these objects. upsert: replace what there is."""

    names: Names
    sizes: Counts
    wish: Wish
    upsert: bool


class SparesAsk(Message, frozen=True):
    """Room for puts to come: so much of it, of this size and wish, I should have.

    back    room that I had in advance and do not need any more
    """

    nbytes: Count
    wish: Wish
    count: Count
    back: Counts


class PutEnd(Message, frozen=True):
    """These puts are done: publish them. done False: forget them."""

    puts: Counts
    done: bool


class Find(Message, frozen=True):
    """Where are these? lease: and keep them there for me."""

    names: Names
    lease: bool


class Remove(Message, frozen=True):
    """Remove these."""

    names: Names
    force: bool


class RemoveAll(Message, frozen=True):
    """Remove everything that has no lease; force: that too. Answered with [removed, left to do]: a portion,
    for others wait. more: go on with what was left."""

    force: bool
    more: bool


class NamesAsk(Message, frozen=True):
    """Names of visible objects behind this one, in order, as many as one message takes."""

    after: str


class Clear(Message, frozen=True):
    """Drop my replicas of these, on one segment or ("") on all."""

    names: Names
    segment: Short


class TaskStart(Message, frozen=True):
    """Copy (source "") or move an object to these segments; the bytes are moved by who asks."""

    name: Name
    source: Short
    targets: Annotated[list[Short], msgspec.Meta(max_length=MAX_TARGETS)]


class TaskEnd(Message, frozen=True):
    """The copies of this task are in place, or failed for this reason."""

    task: Count
    failed: Short


class TaskAsk(Message, frozen=True):
    """How is this task?"""

    task: Count


class StatsAsk(Message, frozen=True):
    """The books in numbers."""


# ------------------------------------------------------------------ master -> client


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Memory that a client lends. machine, pid, fd, inode: to map it; host, port, secret: to reach it."""

    name: Short
    nbytes: Count
    machine: Short
    pid: Int32
    fd: Int32
    inode: Count
    host: Short
    port: Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
    secret: Annotated[bytes, msgspec.Meta(max_length=64)]


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """Where the table or the journals are: memory of the master's process."""

    machine: Short
    pid: Int32
    fd: Int32
    inode: Count
    nbytes: Count


class Grant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Room for one object.

    locations   of the replicas in one range: segment << OFFSET_BITS | offset
    scattered   of the others: (location, bytes) of each range, in the order of the object's bytes
    """

    put: Count
    locations: list[int]
    scattered: list[list[tuple[int, int]]] = []


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where an object is; as in Grant."""

    nbytes: Count
    locations: list[int]
    scattered: list[list[tuple[int, int]]] = []


class Welcome(Message, frozen=True):
    """The master's first words. Join follows. line: name of a Unix socket where it can be asked faster."""

    protocol: int
    table: Memory
    lease_ttl_ns: Count
    line: Short


class Joined(Message, frozen=True):
    """You are in.

    segment    the number of yours, 0 without one
    journal    the number of yours in the memory of journals, where there is one (journals)
    """

    code: int
    hostname: Short
    segment: Count
    journal: Count = 0
    journals: Memory | None = None


class TableIs(Message, frozen=True):
    """Answer to TableAsk."""

    table: Memory


class SegmentIs(Message, frozen=True):
    """Answer to SegmentAsk; None: gone."""

    segment: Segment | None


class Grants(Message, frozen=True):
    """Answer to PutStart, one for each name: room, or a code; to SparesAsk: what there is for it."""

    grants: list[Grant | int]


class Places(Message, frozen=True):
    """Answer to Find, one for each name."""

    places: list[Place | None]


class Codes(Message, frozen=True):
    """One code or count for each thing asked."""

    codes: list[int]


class NamesAre(Message, frozen=True):
    """Answer to NamesAsk and Clear."""

    names: list[str]


class TaskIs(Message, frozen=True):
    """Answer to TaskStart and TaskAsk. code: 0, or why there is none. Times in ms since 1970."""

    code: int
    task: int = 0
    move: bool = False
    status: int = 0
    created_ms: int = 0
    updated_ms: int = 0
    reason: str = ""
    nbytes: int = 0
    targets: list[int] = []


class Stats(Message, frozen=True):
    """Answer to StatsAsk."""

    values: dict[str, int]


class Failed(Message, frozen=True):
    """In the place of any answer: why there is none."""

    code: int


Request = (
    Hello | Join | Leave | Beat | Drain | TableAsk | SegmentAsk | PutStart | SparesAsk | PutEnd | Find
    | Remove | RemoveAll | NamesAsk | Clear | TaskStart | TaskEnd | TaskAsk | StatsAsk
)  # fmt: skip
Reply = Welcome | Joined | TableIs | SegmentIs | Grants | Places | Codes | NamesAre | TaskIs | Stats | Failed
