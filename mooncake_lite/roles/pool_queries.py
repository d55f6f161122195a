"""What `mooncake-lite store` asks of a running cluster, answered by the conductor.

Used by the conductor role alone. Books are read here; bytes are compared by the store ranks that keep them, a
few blocks at a time, so that requests do not wait for it. Explained in docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mooncake_lite import messages as m
from mooncake_lite.messages import pool as p
from mooncake_lite.roles.members import Members
from mooncake_lite.roles.room import block_ref
from store.directory import Directory
from store.errors import ObjectInUse, UnknownObject
from store.objects import PoolObject

ROWS = 4096
"""In one answer: 200 kB."""

CHECKED_AT_ONCE = 16
"""Blocks that a store rank compares before it looks at its messages again: 48 MB, some 10 ms."""

REMOVED_AT_ONCE = 4096
"""Keys in one order to a store rank: 40 kB."""

LEASE_S = 30.0
MAX_OPEN = 4
"""Commands that are being carried out at once; one more is told to come later."""

Send = Callable[[str, m.Message], bool]


@dataclass(slots=True)
class _Check:
    """A verify or a get under way: what is being compared, and what is left."""

    peer: str
    left: Iterator[list[PoolObject]]
    path: str = ""
    done: int = 0
    batch: list[PoolObject] | None = None


@dataclass(slots=True)
class _Removal:
    """Keys that have left the books: which tiers have not answered yet, and for which nothing is durable."""

    peer: str
    blocks: int
    kept: int
    waiting: set[tuple[int, int]]
    unsure: set[int] = field(default_factory=set)


class PoolQueries:
    """Commands that need store ranks: checks by number, and removals in the order they came."""

    def __init__(self, directory: Directory, members: Members, send: Send) -> None:
        self._directory, self._members, self._send = directory, members, send
        self._checks: dict[int, _Check] = {}
        self._removals: list[_Removal] = []
        self._number = 0

    def on_query(self, peer: str, query: p.PoolQuery, now: float) -> None:
        """Answer at once, or begin."""
        if query.what == "ls":
            self._list(peer, query.after, now)
        elif query.what == "pin":
            self._pin(peer, query, now)
        elif query.what == "stat":
            self._send(peer, p.PoolFigures(self._directory.stats(), self.segments()))
        elif query.what == "compact":
            for rank in self._members.store_ranks():
                self._send(f"rank-{rank}", p.CompactTier())
            self._send(peer, p.PoolEnded())
        elif len(self._checks) + len(self._removals) >= MAX_OPEN:
            self._send(peer, p.PoolEnded(f"{MAX_OPEN} other commands are being carried out; try again"))
        elif query.what == "verify":
            objects = self._directory.visible_objects()
            self._begin(_Check(peer, _batches(objects)), now)
        elif query.what == "get":
            self._get(peer, query, now)
        else:
            self._remove(peer, query, now)

    def segments(self) -> list[p.SegmentFigures]:
        """What each rank gives to the pool, by rank."""
        role_of = self._members.role_of
        return [
            p.SegmentFigures(rank, role_of(rank), nbytes, free)
            for rank, nbytes, free in sorted(self._directory.segments())
        ]

    def _list(self, peer: str, after: int, now: float) -> None:
        objects = [obj for obj in self._directory.visible_objects() if obj.object_id > after]
        rows = [_row(obj, _state(obj, now)) for obj in objects[:ROWS]]
        self._send(peer, p.PoolRows(rows, more=len(objects) > ROWS))

    def _get(self, peer: str, query: p.PoolQuery, now: float) -> None:
        key = query.keys[0] if query.keys else -1
        found = [obj for obj in self._directory.visible_objects() if obj.key == key]
        if not found:
            self._send(peer, p.PoolEnded(_not_in_dram(key)))
            return
        path = str(Path(query.folder) / f"{key:016x}.block")
        self._begin(_Check(peer, _batches(found[:1]), path), now)

    def _pin(self, peer: str, query: p.PoolQuery, now: float) -> None:
        """Change the pins of blocks in DRAM, all or none; a pin lasts as long as its block stays there."""
        found = {obj.key: obj.digest for obj in self._directory.visible_objects() if obj.key is not None}
        for key in query.keys:
            if key not in found:
                self._send(peer, p.PoolEnded(_not_in_dram(key)))
                return
        soft_until = now + query.soft_s if query.soft_s > 0 else 0.0
        for key in query.keys:
            self._directory.pin(key, found[key], hard=query.hard, soft_until=soft_until)
        self._send(peer, p.PoolEnded(blocks=len(query.keys)))

    def _remove(self, peer: str, query: p.PoolQuery, now: float) -> None:
        """Out of the books at once; the command ends when every tier has answered."""
        keys, kept = sorted(set(query.keys)), 0
        if query.what == "rm-all":
            keys, kept = self._directory.removable(now, force=query.force)
        try:
            self._directory.remove_everywhere(keys, now, force=query.force)
        except UnknownObject as error:
            problem = f"no block {error.number:016x}; `mooncake-lite store ls` lists those in DRAM"
            self._send(peer, p.PoolEnded(problem))
            return
        except ObjectInUse as error:
            problem = str(error)
            if error.forceable and not query.force:
                problem += "; --force lets nobody else read it"
            self._send(peer, p.PoolEnded(problem))
            return
        removal = _Removal(peer, len(keys), kept, set())
        for rank in self._members.store_ranks():
            for start in range(0, len(keys), REMOVED_AT_ONCE):
                some = keys[start : start + REMOVED_AT_ONCE]
                if self._send(f"rank-{rank}", m.RemoveBlocks(some)):
                    removal.waiting.update((rank, key) for key in some)
                else:
                    removal.unsure.update(some)
        self._removals.append(removal)
        self._end_removals()

    def on_removed(self, removed: m.BlocksRemoved) -> None:
        """A tier has deleted some: end the commands that waited for these last."""
        for removal in self._removals:
            some = {(removed.rank, key) for key in removed.keys} & removal.waiting
            removal.waiting -= some
            if not removed.for_good:
                removal.unsure.update(key for _, key in some)
        self._end_removals()

    def _end_removals(self) -> None:
        ended = [removal for removal in self._removals if not removal.waiting]
        self._removals = [removal for removal in self._removals if removal.waiting]
        for removal in ended:
            problem = ""
            if removal.unsure:
                problem = (
                    f"{len(removal.unsure)} of {removal.blocks} blocks may come back at the next start: "
                    "the SSD takes no record of their removal"
                )
            self._send(removal.peer, p.PoolEnded(problem, removal.blocks, removal.kept))

    def _begin(self, check: _Check, now: float) -> None:
        self._number += 1
        self._checks[self._number] = check
        self._go_on(self._number, check, now)

    def _go_on(self, number: int, check: _Check, now: float) -> None:
        """Send the next blocks to the rank that keeps them; those that have gone meanwhile are skipped."""
        for batch in check.left:
            there = [obj for obj in batch if self._directory.is_visible(obj)]
            check.done += len(batch) - len(there)
            if not there:
                continue
            self._directory.lease(f"check/{number}", [obj.object_id for obj in there], now, now + LEASE_S)
            refs = [block_ref(obj) for obj in there]
            sums = [list(obj.checksums) for obj in there]
            check.batch = there
            keeper = self._members.keeper_of(there[0].rank)
            if self._send(f"rank-{keeper}", p.CheckBlocks(number, refs, sums, check.path)):
                return
            self._directory.release(f"check/{number}", now)
        del self._checks[number]
        self._send(check.peer, p.PoolEnded())

    def on_checked(self, checked: p.BlocksChecked, now: float) -> None:
        """A store rank has compared some: tell, and go on."""
        check = self._checks.get(checked.number)
        if check is None or check.batch is None:
            return
        self._directory.release(f"check/{checked.number}", now)
        batch, check.batch = check.batch, None
        check.done += len(batch)
        bad = [_row(obj, "bad") for obj, good in zip(batch, checked.good) if not good]
        if checked.problem:
            del self._checks[checked.number]
            self._send(check.peer, p.PoolEnded(checked.problem))
            return
        if not self._send(check.peer, p.PoolProgress(check.done, sum(obj.nbytes for obj in batch), bad)):
            del self._checks[checked.number]  # who asked has gone
            return
        self._go_on(checked.number, check, now)


def _batches(objects: list[PoolObject]) -> Iterator[list[PoolObject]]:
    """By rank, CHECKED_AT_ONCE at a time."""
    by_rank: dict[int, list[PoolObject]] = {}
    for obj in objects:
        by_rank.setdefault(obj.rank, []).append(obj)
    for some in by_rank.values():
        for start in range(0, len(some), CHECKED_AT_ONCE):
            yield some[start : start + CHECKED_AT_ONCE]


def _not_in_dram(key: int) -> str:
    return f"no block {key:016x} in DRAM; `mooncake-lite store ls` lists what there is"


def _state(obj: PoolObject, now: float) -> str:
    if obj.unsaved:
        return "unsaved"
    if obj.hard_pinned():
        return "pinned"
    return "leased" if obj.held() else "soft-pinned" if obj.soft_pinned(now) else ""


def _row(obj: PoolObject, state: str) -> p.PoolRow:
    return p.PoolRow(obj.object_id, obj.key or 0, "dram", obj.rank, obj.nbytes, state)
