"""The nouns of the directory: pool objects, their states, hits, wishes and events. Plain data.

Made by `store.directory`; read by the conductor. Explained in docs/lifecycle.md. The life of an object:

    put_start -> WRITING -> put_end -> VISIBLE   (keyed: in the index, evictable)
                    |          `-----> PRIVATE   (no key, its key was visible already, or it is not admitted:
                    |                             its owner's alone)
                    `--- revoke -----> QUARANTINED while a writer may still write, else gone
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from store.policies.contract import BlockFacts


class ObjectState(Enum):
    """What an object in DRAM is to others. Only VISIBLE ones are found by lookups.

    PRIVATE       of one request alone: a tail, which has no key, or a block that is not kept
    QUARANTINED   its owner is gone, and late bytes may still come: nobody gets the range yet
    """

    WRITING = "being written"
    VISIBLE = "visible"
    PRIVATE = "private"
    QUARANTINED = "quarantined"


class Hit(NamedTuple):
    """A block that the pool holds: bytes in DRAM, or in the tier of `rank` (object_id None, offset 0)."""

    key: int
    tier: str
    object_id: int | None
    rank: int
    offset: int
    nbytes: int


class Wanted(NamedTuple):
    """One object to allocate. key None: private to its owner, never in the index.

    cost_s, class_id, parent, position   for eviction policies, see `store.policies.contract.BlockFacts`:
                                         parent is the key of the block before it in its prefix
    """

    nbytes: int
    key: int | None = None
    digest: int = 0
    cost_s: float = 0.0
    class_id: int = 0
    parent: int | None = None
    position: int = 0


class BlockStored(NamedTuple):
    """A block can now be read from this tier ("dram", "ssd") of this rank."""

    key: int
    rank: int
    tier: str


class BlockRemoved(NamedTuple):
    """A block is no longer in this tier of this rank."""

    key: int
    rank: int
    tier: str


@dataclass(slots=True, eq=False)
class PoolObject:
    """One put: a range of one segment, and who may do what with it.

        object_id     unique in the life of the cluster
        owner         who put it (a request id); frees it unless it becomes visible
        offset        of its range in the segment of `rank`; nbytes long
        checksums     u64 per layer, set by put_end
        facts         what eviction policies may know of it
        lessees       owners that hold a lease on it, None or empty when there are none
        unsaved       waits to be written to its rank's tier: not evictable until then
        evictable     VISIBLE, no lease, not unsaved (kept by the directory)
        hit           what a lookup returns for it, made when it becomes visible

    Immutable once VISIBLE, except for who leases it, unsaved, evictable and last_use_s.
    """

    object_id: int
    owner: str
    rank: int
    offset: int
    nbytes: int
    key: int | None
    digest: int
    facts: BlockFacts
    state: ObjectState = ObjectState.WRITING
    checksums: array = field(default_factory=lambda: array("Q"))
    lessees: set[str] | None = None
    unsaved: bool = False
    evictable: bool = False
    last_use_s: float = 0.0
    hit: Hit | None = None
