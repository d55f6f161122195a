"""Which ranges of a modelled pool are in use, for what, by which rank; and bytes that come late.

The books of `custody.py`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

from mooncake_lite.control import events as ev
from mooncake_lite.simulator.clock import Clock
from mooncake_lite.simulator.faults import LATE_WRITE_S
from mooncake_lite.simulator.memory import Memory, Use
from store.objects import BlockRef

OVERWRITTEN = 0.1
"""Part of the writes under way of which bytes land after their rank has joined a new conductor."""

UseKey = tuple[str | int, ...]
"""What a use is for: "work" or "swap", rank, request id and attempt; "save", rank and key; "put" and object;
"load", "copy" or "check", and the number of the order."""


class Uses:
    """The ranges in use.

    _by            rank that uses them
    _late          rank -> places that bytes of its failed transfers may still reach
    _gone          ranks that are lost; _unreachable: uses of those that may still write
    _doubts        blocks may have other bytes than the conductor thinks: an earlier conductor has died, or
                   blocks are damaged
    _known         ranks that have joined it
    """

    def __init__(self, memory: Memory, clock: Clock, dice: Random) -> None:
        self._memory, self._clock, self._dice = memory, clock, dice
        self._uses: dict[UseKey, list[Use]] = {}
        self._by: dict[UseKey, int] = {}
        self._late: dict[int, list[Use]] = {}
        self._gone: set[int] = set()
        self._unreachable: set[UseKey] = set()
        self._doubts, self._known = False, set[int]()

    def doubt(self) -> None:
        """Expect blocks to have other bytes than the conductor thinks."""
        self._doubts = True

    @property
    def in_use(self) -> dict[UseKey, list[Use]]:
        """Return what reachable ranks use; at the end of a run that is nothing."""
        return {key: uses for key, uses in self._uses.items() if key not in self._unreachable}

    def _begin(self, key: UseKey, reads: list[BlockRef], writes: list[BlockRef], rank: int) -> None:
        self._by[key] = rank
        purpose = " ".join(map(str, key))
        assert key not in self._uses, f"{purpose} is ordered twice"
        uses = self._memory.begin_read(reads, purpose) + self._memory.begin_write(writes, purpose)
        if uses:
            self._uses[key] = uses

    def _end(self, key: UseKey, *, late: bool = False) -> None:
        for use in self._uses.pop(key, ()):
            self._end_use(use, self._by[key], late=late and use.kind == "write")

    def _end_reads(self, key: UseKey) -> None:
        """End the reads of an order whose lease has run out."""
        if key in self._uses:
            self._memory.end(use for use in self._uses[key] if use.kind == "read")
            self._uses[key] = [use for use in self._uses[key] if use.kind != "read"]

    def _end_writes(self, key: UseKey, places: Sequence[BlockRef], rank: int) -> None:
        """End the writes of an order to places that have all their bytes. The rest may have failed."""
        for uses in (self._uses.get(key, []), self._late.get(rank, [])):
            written = [use for use in uses if use.kind != "read" and use.ref in places]
            self._memory.end(written)
            uses[:] = [use for use in uses if use not in written]

    def _end_use(self, use: Use, rank: int, *, late: bool) -> None:
        if not late:
            self._memory.end([use])
            return
        if rank not in self._known:  # only an earlier conductor would have kept the place
            self._overwrite([use])
            return
        waiting = self._memory.end_late(use)
        self._late.setdefault(rank, []).append(waiting)
        self._clock.after(self._dice.random() * LATE_WRITE_S, lambda: self._land(waiting, rank))

    def _land(self, use: Use, rank: int) -> None:
        """Let the last bytes of a failed transfer land, unless its rank has died."""
        if use in self._late.get(rank, ()):
            self._late[rank].remove(use)
            self._memory.tear(use.ref)
            self._memory.end([use])

    def forget_late(self) -> None:
        """Keep no place any more for late bytes: a new conductor knows of none. They land on others."""
        self.doubt()
        for key in self._unreachable & self._uses.keys():
            self._overwrite(self._uses.pop(key))
        for uses in self._late.values():
            self._overwrite(uses)
        self._late.clear()
        self._known.clear()

    def _overwrite(self, uses: Sequence[Use]) -> None:
        """Let bytes land in places that are no longer kept."""
        self._memory.end(uses)
        for use in uses:
            seconds = self._dice.random() * LATE_WRITE_S
            self._clock.after(seconds, partial(self._memory.tear, use.ref))

    def _leave(self, rank: int, late: float) -> None:
        """End all uses of a rank. late: part of its writes of which the last bytes come later."""
        for key in [key for key in self._uses if self._by[key] == rank]:
            uses = self._uses.pop(key)
            writes = [use for use in uses if use.kind == "write" and self._dice.random() < late]
            self._memory.end(use for use in uses if use not in writes)
            self._overwrite(writes)

    def _lost(self, event: ev.RankLost) -> None:
        """End the uses of a rank that is dead. An unreachable one may write at any time."""
        self._gone.add(event.rank)
        if self._doubts and not event.ended and event.rank not in self._known:
            self._leave(event.rank, 1.0)
        for key in [key for key in self._uses if self._by[key] == event.rank]:
            if event.ended:
                self._end(key)
            else:
                self._end_reads(key)
                self._unreachable.add(key)
        if event.ended:
            self._memory.end(self._late.pop(event.rank, ()))
