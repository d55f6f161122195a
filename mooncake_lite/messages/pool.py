"""Between the conductor and `mooncake-lite store` or a gateway.

Explained in docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

from typing import Literal

from mooncake_lite.messages.parts import Message, Plain


class PoolQuery(Message, frozen=True):
    """The command, or a gateway -> conductor.

    after   ls: go on behind the object of this id
    keys    get: the one block; rm and pin: those meant, all or none
    folder  get: where a store rank shall put the bytes, a folder of the same user
    force   rm and rm-all: also what is leased
    hard    pin: never evicted
    soft_s  pin: for so long evicted only when nothing else is left; 0.0 with not hard unpins
    number  chosen by the sender; PoolEnded repeats it
    """

    what: Literal["ls", "stat", "get", "verify", "compact", "rm", "rm-all", "pin"]
    after: int = -1
    keys: list[int] = []
    folder: str = ""
    force: bool = False
    hard: bool = False
    soft_s: float = 0.0
    number: int = 0


class PoolRow(Plain, frozen=True):
    """One block of `ls`. state: "" when it may be evicted, else "leased", "unsaved", "pinned", or
    "soft-pinned" for what goes last."""

    object_id: int
    key: int
    tier: str
    rank: int
    nbytes: int
    state: str


class PoolRows(Message, frozen=True):
    """A piece of `ls`, in the order of object ids; `more` will come when asked."""

    rows: list[PoolRow]
    more: bool


class SegmentFigures(Plain, frozen=True):
    """Figures of the segment that one rank lends: its bytes, free bytes, and visible blocks."""

    rank: int
    role: str
    capacity_bytes: int
    free_bytes: int
    blocks: int


class PoolFigures(Message, frozen=True):
    """`stat`: the directory's counters and gauges, and its segments by rank."""

    values: dict[str, int]
    segments: list[SegmentFigures]


class PoolProgress(Message, frozen=True):
    """`verify` and `get` so far: blocks done, and the bytes compared since the last answer.

    bad   blocks whose bytes are not those that were put
    """

    done: int
    nbytes: int
    bad: list[PoolRow]


class PoolEnded(Message, frozen=True):
    """The command has ended. problem: why it failed, "" when it has not. Also in place of any other
    answer, `Explained` included, that could not be sent.

    blocks   how many it has removed or pinned; kept: how many it has not, because they are in use
    number   of the PoolQuery
    """

    problem: str = ""
    blocks: int = 0
    kept: int = 0
    number: int = 0


POOL_ANSWERS = PoolRows | PoolFigures | PoolProgress | PoolEnded
