"""Messages between clients and the master. They carry names and numbers, never the bytes of objects.

Used by `link` and `master`. Every request carries the number of its call, and exactly one reply repeats
it. Typed and bounded (`transport.wire`). Explained in docs/explain/leases.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

PROTOCOL = 5
"""Version of the protocol. Raise it when a client and a master of two versions would misread each other."""

MAX_NAME_BYTES = 64 * 1024
"""Longest name of an object, in UTF-8. Any value works that leaves space for several names per message."""

MAX_KEYS = 4096
"""Names of one message; a client sends several for more."""

MAX_BYTES = 16 * 2**20
"""Longest message. Any value of this order works: a longer list of names takes several messages."""

NAMES_BYTES = MAX_BYTES // 2
"""Bytes of all names in one message. The other half is for the figures about each name."""

MAX_SHORT, MAX_TARGETS = 1024, 64
"""Longest name of a segment in characters; most segments that one task copies to."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
Names = Annotated[list[Name], msgspec.Meta(max_length=MAX_KEYS)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Counts = Annotated[list[Count], msgspec.Meta(max_length=MAX_KEYS)]
Size = Annotated[int, msgspec.Meta(ge=1)]
Short = Annotated[str, msgspec.Meta(max_length=MAX_SHORT)]
Int32 = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""A number that can name a process or a file descriptor."""


def portions(names: Sequence[str]) -> Iterator[slice]:
    """Yield slices of `names` that fit into one message each, in order."""
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
    """Base of all messages. call: number of the request at this client."""

    call: int


# ------------------------------------------------------------------ client -> master


class Hello(Message, frozen=True):
    """Greet the master, before Join."""

    protocol: int


class Join(Message, frozen=True):
    """Join the store.

    token   read from the master's table, which proves that both processes are of one user; b"" under CURVE
    """

    token: bytes
    machine: Short
    pid: Int32
    hostname: Short
    segment: Segment | None


class Leave(Message, frozen=True):
    """Leave the store, with the client's segment."""


class Beat(Message, frozen=True):
    """Show that the client is alive. The answer is OK.

    growth    bytes by which the used part of its segment may grow until the next beat; None: as before
    """

    growth: Count | None = None


class Drain(Message, frozen=True):
    """Ask for OK once all puts that the journals announce are in the table."""


class TableAsk(Message, frozen=True):
    """Ask for the place of the table."""


class SegmentAsk(Message, frozen=True):
    """Ask for the place of a segment."""

    number: Count


class Wish(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A ReplicateConfig, checked by the client. soft_pin_ms: None without a pin."""

    replicas: Annotated[int, msgspec.Meta(ge=1)] = 1
    hard_pin: bool = False
    soft_pin_ms: Count | None = None
    keep_pin: bool = True
    preferred: list[Short] = []


class PutStart(Message, frozen=True):
    """Ask for space for these objects. upsert: replace existing ones."""

    names: Names
    sizes: Annotated[list[Size], msgspec.Meta(max_length=MAX_KEYS)]
    wish: Wish
    upsert: bool


class SparesAsk(Message, frozen=True):
    """Ask for space in advance: for so many puts of this size and wish.

    back    space in advance that the client returns
    """

    nbytes: Size
    wish: Wish
    count: Count
    back: Counts


class PutEnd(Message, frozen=True):
    """Publish these puts, whose bytes are in place. done False: forget them."""

    puts: Counts
    done: bool


class Find(Message, frozen=True):
    """Ask for the places of these objects. lease: and lease them."""

    names: Names
    lease: bool


class Remove(Message, frozen=True):
    """Remove these objects."""

    names: Names
    force: bool


class RemoveAll(Message, frozen=True):
    """Remove every object without a lease; force: also those with one.

    The answer is [removed, left to do]: one portion, because other clients wait. more: continue with the
    rest.
    """

    force: bool
    more: bool


class NamesAsk(Message, frozen=True):
    """Ask for the names of visible objects, as many as one message takes.

    listing    the client's number for this list, which is made once; more: continue with it
    """

    listing: Count
    more: bool


class Clear(Message, frozen=True):
    """Drop the client's own replicas of these objects, on one segment or ("") on all."""

    names: Names
    segment: Short


class TaskStart(Message, frozen=True):
    """Begin to copy (source "") or move an object to these segments. The client moves the bytes."""

    name: Name
    source: Short
    targets: Annotated[list[Short], msgspec.Meta(max_length=MAX_TARGETS)]


class TaskEnd(Message, frozen=True):
    """End a task: its copies are in place, or failed for this reason."""

    task: Count
    failed: Short


class TaskAsk(Message, frozen=True):
    """Ask for the state of a task."""

    task: Count


class StatsAsk(Message, frozen=True):
    """Ask for the figures of the books."""


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
    """The place of the table or of the journals: memory of the master's process."""

    machine: Short
    pid: Int32
    fd: Int32
    inode: Count
    nbytes: Count


class Grant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Space for one object.

    locations   of the replicas in one range: segment << OFFSET_BITS | offset
    scattered   of the others: (location, bytes) of each range, in the order of the object's bytes
    """

    put: Count
    locations: list[int]
    scattered: list[list[tuple[int, int]]] = []


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of an object; as in Grant."""

    nbytes: Count
    locations: list[int]
    scattered: list[list[tuple[int, int]]] = []


class Welcome(Message, frozen=True):
    """Answer to Hello. Join follows. line: name of the master's Unix socket, which answers faster."""

    protocol: int
    table: Memory
    lease_ttl_ns: Count
    line: Short


class Joined(Message, frozen=True):
    """Answer to Join.

    segment    number of the client's segment, 0 without one
    journal    number of its journal in the memory of journals, where there is one (journals)
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
    """Answer to PutStart: space or a code for each name. Answer to SparesAsk: the space that was found."""

    grants: list[Grant | int]


class Places(Message, frozen=True):
    """Answer to Find, one for each name."""

    places: list[Place | None]


class Codes(Message, frozen=True):
    """One code or count for each thing asked."""

    codes: list[int]


class NamesAre(Message, frozen=True):
    """Answer to NamesAsk and Clear. more: the list has more names."""

    names: list[str]
    more: bool = False


class TaskIs(Message, frozen=True):
    """Answer to TaskStart and TaskAsk. code: 0, or why there is no task. Times in ms since 1970."""

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
    """Replace any answer that cannot be given, with the reason."""

    code: int


Request = (
    Hello | Join | Leave | Beat | Drain | TableAsk | SegmentAsk | PutStart | SparesAsk | PutEnd | Find
    | Remove | RemoveAll | NamesAsk | Clear | TaskStart | TaskEnd | TaskAsk | StatsAsk
)  # fmt: skip
Reply = Welcome | Joined | TableIs | SegmentIs | Grants | Places | Codes | NamesAre | TaskIs | Stats | Failed
