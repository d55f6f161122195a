"""Commands about the pool that change it or need store ranks: get, verify, compact, rm, rm-all, pin.

Used by `machine.py`. Store ranks compare bytes a few blocks at a time, so that requests do not wait for a
command. Queries that only read the books (ls, stat) bypass the control plane.
See docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.books import Books
from mooncake_lite.control.grants import TRANSFER_S, Grant
from store.errors import ObjectInUse, UnknownObject
from store.objects import PoolObject

CHECKED_AT_ONCE = 16
"""Blocks that a store rank compares before it reads its messages again: 48 MB, some 10 ms."""

REMOVED_AT_ONCE = 4096
"""Keys per order to a store rank: a message of 40 kB, which does not delay others."""

MAX_OPEN = 4
"""Most commands under way; further ones are refused. Few people give commands, so any small number works."""


@dataclass(slots=True)
class _Check:
    """A verify or a get under way: the blocks under comparison, and the remaining batches."""

    command: int
    left: Iterator[list[PoolObject]]
    path: str = ""
    done: int = 0
    number: int = 0
    batch: list[PoolObject] = field(default_factory=list)


@dataclass(slots=True)
class _Removal:
    """A removal under way: keys that tiers have not answered, and keys that a restart may bring back."""

    command: int
    blocks: int
    kept: int
    waiting: set[tuple[int, int]] = field(default_factory=set)
    grants: list[int] = field(default_factory=list)
    unsure: set[int] = field(default_factory=set)


class Commands:
    """Open commands: checks by the number of their order, and removals in order of arrival."""

    def __init__(self, books: Books) -> None:
        self._directory, self._members = books.directory, books.members
        self._grants, self._emit = books.grants, books.emit
        self._checks: dict[int, _Check] = {}
        self._removals: list[_Removal] = []

    def on_command(self, command: ev.PoolCommand, now: float) -> None:
        """Answer a command at once, or begin to carry it out."""
        if command.what == "pin":
            self._pin(command, now)
        elif command.what == "compact":
            for rank in self._members.stores:
                self._emit(fx.CompactTier(rank))
            self._end(command.command)
        elif len(self._checks) + len(self._removals) >= MAX_OPEN:
            self._end(command.command, f"{MAX_OPEN} other commands are being carried out; try again")
        elif command.what == "verify":
            self._begin(_Check(command.command, _batches(self._directory.visible_objects())), now)
        elif command.what == "get":
            self._get(command, now)
        else:
            self._remove(command, now)

    def on_abandoned(self, abandoned: ev.CommandAbandoned, now: float) -> None:
        """Stop comparing blocks for this command. A removal that has begun is completed."""
        for number, check in list(self._checks.items()):
            if check.command == abandoned.command:
                self._drop_check(number, now)
                self._grants.close(number)

    def _end(self, command: int, problem: str = "", blocks: int = 0, kept: int = 0) -> None:
        self._emit(fx.AnswerCommand(command, True, problem, blocks=blocks, kept=kept))

    # ------------------------------------------------------------------------------ pins and removal

    def _pin(self, command: ev.PoolCommand, now: float) -> None:
        """Change the pins of blocks in DRAM, all or none. A pin lasts until its block leaves DRAM."""
        found = {key: obj for key in command.keys if (obj := self._directory.find(key)) is not None}
        for key in command.keys:
            if key not in found:
                self._end(command.command, _not_in_dram(key))
                return
        soft_until = now + command.soft_s if command.soft_s > 0 else 0.0
        for key, obj in found.items():
            self._directory.pin(key, obj.digest, hard=command.hard, soft_until=soft_until)
        self._end(command.command, blocks=len(command.keys))

    def _remove(self, command: ev.PoolCommand, now: float) -> None:
        """Remove keys from the books at once. The command ends when every tier has answered.

        Pages of compute ranks may hold the same KV under other units, so that ranks forget all prefixes.
        """
        keys, kept = sorted(set(command.keys)), 0
        if command.what == "rm-all":
            keys, kept = self._directory.removable(now, force=command.force)
        try:
            self._directory.remove_everywhere(keys, now, force=command.force)
        except UnknownObject as error:
            problem = f"no block {error.number:016x}; `mooncake-lite store ls` lists those in DRAM"
            self._end(command.command, problem)
            return
        except ObjectInUse as error:
            problem = str(error)
            if error.forceable and not command.force:
                problem += "; with --force, current readers finish and no new one begins"
            self._end(command.command, problem)
            return
        for rank in self._members.computes:
            self._emit(fx.ForgetPages(rank))
        removal = _Removal(command.command, len(keys), kept)
        self._removals.append(removal)
        for rank in self._members.stores:
            for start in range(0, len(keys), REMOVED_AT_ONCE):
                some = keys[start : start + REMOVED_AT_ONCE]
                removal.waiting.update((rank, key) for key in some)
                removal.grants.append(self._grants.open(rank, some, self._not_removed, now).number)
                self._emit(fx.RemoveBlocks(rank, some))
        self._end_removals()

    def on_removed(self, removed: ev.BlocksRemoved) -> None:
        """End the removals for which this answer of a tier was the last."""
        for removal in self._removals:
            some = {(removed.rank, key) for key in removed.keys} & removal.waiting
            removal.waiting -= some
            if not removed.for_good:
                removal.unsure.update(key for _, key in some)
        self._end_removals()

    def undelivered(self, order: fx.RemoveBlocks) -> None:
        """Note that a tier does not hear of a removal."""
        self.on_removed(ev.BlocksRemoved(order.rank, 0, order.keys, for_good=False))

    def _not_removed(self, grant: Grant, reason: str, may_still_write: bool, now: float) -> None:
        self.on_removed(ev.BlocksRemoved(grant.rank, 0, grant.about, for_good=False))

    def _end_removals(self) -> None:
        ended = [removal for removal in self._removals if not removal.waiting]
        self._removals = [removal for removal in self._removals if removal.waiting]
        for removal in ended:
            for number in removal.grants:
                self._grants.close(number)
            problem = ""
            if removal.unsure:
                problem = (
                    f"{len(removal.unsure)} of {removal.blocks} blocks may come back at the next start: "
                    "the SSD takes no record of their removal"
                )
            self._end(removal.command, problem, removal.blocks, removal.kept)

    # ------------------------------------------------------------------------------ checks

    def _get(self, command: ev.PoolCommand, now: float) -> None:
        key = command.keys[0] if command.keys else -1
        found = self._directory.find(key)
        if found is None:
            self._end(command.command, _not_in_dram(key))
            return
        self._begin(_Check(command.command, iter([[found]]), command.path), now)

    def _begin(self, check: _Check, now: float) -> None:
        """Have the next batch of blocks compared by the rank that keeps them. Skip blocks that are gone."""
        for batch in check.left:
            there = [obj for obj in batch if self._directory.is_visible(obj)]
            check.done += len(batch) - len(there)
            if not there:
                continue
            if not self._members.stores:
                self._end(check.command, "no store rank is left that could compare blocks")
                return
            keeper = self._members.keeper_of(there[0].rank)
            grant = self._grants.open(keeper, check, self._lost, now, blocks=len(there))
            check.number = number = grant.number
            check.batch = there
            self._checks[number] = check
            ids = [obj.object_id for obj in there]
            self._directory.lease(f"check/{number}", ids, now, now + TRANSFER_S)
            refs, sums = [obj.ref for obj in there], [list(obj.checksums) for obj in there]
            self._emit(fx.CheckBlocks(keeper, number, check.command, refs, sums, check.path))
            return
        self._end(check.command)

    def on_checked(self, checked: ev.BlocksChecked, now: float) -> None:
        """Report the compared blocks of a check, and begin the next batch."""
        if self._grants.end(checked.rank, checked.number) is None:
            return
        check = self._drop_check(checked.number, now)
        check.done += len(check.batch)
        if checked.problem:
            self._end(check.command, checked.problem)
            return
        nbytes = sum(obj.nbytes for obj in check.batch)
        bad = [
            fx.DamagedBlock(obj.object_id, obj.key or 0, obj.rank, obj.nbytes)
            for obj, good in zip(check.batch, checked.good)
            if not good
        ]
        self._emit(fx.AnswerCommand(check.command, False, "", check.done, nbytes, bad))
        self._begin(check, now)

    def _drop_check(self, number: int, now: float) -> _Check:
        self._directory.release(f"check/{number}", now)
        return self._checks.pop(number)

    def _lost(self, grant: Grant, reason: str, may_still_write: bool, now: float) -> None:
        self._end(self._drop_check(grant.number, now).command, reason)

    def check(self) -> None:
        """Assert that every check has blocks under comparison, and every removal waits for a tier."""
        assert all(check.number == number and check.batch for number, check in self._checks.items())
        assert all(removal.waiting for removal in self._removals)


def _batches(objects: list[PoolObject]) -> Iterator[list[PoolObject]]:
    """Yield the objects of each rank, at most CHECKED_AT_ONCE at a time."""
    by_rank: dict[int, list[PoolObject]] = {}
    for obj in objects:
        by_rank.setdefault(obj.rank, []).append(obj)
    for some in by_rank.values():
        for start in range(0, len(some), CHECKED_AT_ONCE):
            yield some[start : start + CHECKED_AT_ONCE]


def _not_in_dram(key: int) -> str:
    return f"no block {key:016x} in DRAM; `mooncake-lite store ls` lists the blocks"
