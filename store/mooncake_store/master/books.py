"""The books behind the catalogue: entries, segments, space, eviction, and the steps that keep them exact.

Used through `catalogue` alone, which adds the verbs. Pure but for the table that clients read. The directory
(`store.directory`) allocates the space, as objects without a key. Eviction is decided here, because it
depends on leases that clients write into the table. Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from math import inf

from store.errors import PoolFull, StoreError, UnknownObject
from store.layout import BlockLayout
from store.mooncake_store.codes import NO_SPACE, OK
from store.mooncake_store.master.entries import Entry, Lender, QuarantinedSpace, Replica, Space
from store.mooncake_store.master.eviction import EvictionOrder
from store.mooncake_store.messages import Wish
from store.mooncake_store.shared_table import TableWriter, name_hash
from store.objects import Wanted
from transport.messaging.descriptors import Reserve

HIGH_WATER = 0.9
"""Share of the capacity above which eviction starts: Mooncake Store's."""

EVICT_SHARE = 0.05
"""Share of the capacity that one eviction frees at least: Mooncake Store's."""

COUNTERS = (
    *("puts", "puts_existing", "puts_ended", "puts_revoked", "puts_full", "claims", "claims_unknown"),
    *("finds", "found"),
    *("evictions", "evicted_bytes", "removed", "leased_refusals", "replicas_lost", "objects_lost"),
)


class Books:
    """The books of one master. Times are nanoseconds of the master's monotonic clock.

    _entries    name -> what readers see; each has its slot in the table
    _puts       put -> entry being written
    _writing    name -> entries of it that are being written: one put at most, any number of upserts
    _spares     put -> space given in advance, without a name; _spare_bytes in all, _spare_counts by client
    _lenders    number -> segment
    _held       space in quarantine
    _order      of eviction
    _reserve    the descriptors of the next table: of its memory, and of Python's mapping

    Invariant: check().
    """

    def __init__(self, table: TableWriter):
        self.table = table
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._space = Space(BlockLayout(1, 1, 1, 1, 1), quarantine_s=inf)  # these books say when it ends
        self._entries: dict[str, Entry] = {}
        self._writing: Counter[str] = Counter()
        self._puts: dict[int, Entry] = {}
        self._spares: dict[int, Entry] = {}
        self._spare_bytes = 0
        self._spare_counts: Counter[str] = Counter()
        self._lenders: dict[int, Lender] = {}
        self._held: list[QuarantinedSpace] = []
        self._order = EvictionOrder(lambda entry, now_ns: self.table.lease_until_ns(entry.word, now_ns))
        self._reserve = Reserve(2)
        self._next_put = 1
        self._next_segment = 1

    def segment_named(self, name: str) -> Lender | None:
        """Return the segment of this name."""
        return next((lender for lender in self._lenders.values() if lender.name == name), None)

    # ----------------------------------------------------------------------------------------- room

    def _new_entry(
        self, client: str, machine: str, name: str, nbytes: int, wish: Wish, now_ns: int, *, evict: bool
    ) -> Entry | None:
        put, self._next_put = self._next_put, self._next_put + 1
        replicas = self._place(str(put), machine, nbytes, wish, now_ns, evict)
        return Entry(name, put, client, nbytes, replicas, wish, now_ns) if replicas else None

    def _place(
        self, owner: str, machine: str, nbytes: int, wish: Wish, now_ns: int, evict: bool
    ) -> list[Replica]:
        """Allocate replicas on as many segments as are wanted and there; return [] without space.

        Evicts for the first replica only, and not when no machine has memory for what is free. A replica is
        one range where one is free, else several. Space in advance (evict False) is one range.
        """
        placed: list[Replica] = []
        starved: set[int] = set()
        if nbytes > max((lender.nbytes for lender in self._lenders.values()), default=0):
            return placed  # nothing is evicted in vain
        while not placed:
            for contiguous in (True, False) if evict else (True,):
                for lender in self._candidates(machine, wish) if not placed else ():
                    replica = self._place_on(lender, owner, nbytes, now_ns, contiguous, starved)
                    if replica is not None:
                        placed.append(replica)
                    if len(placed) == wish.replicas:
                        break
            may_evict = evict and len(starved) < len(self._lenders)
            if not placed and not (may_evict and self.evict(nbytes, now_ns)):
                break
        return placed

    def _place_on(
        self, lender: Lender, owner: str, nbytes: int, now_ns: int, contiguous: bool, starved: set[int]
    ) -> Replica | None:
        """Allocate a replica on a segment; None without space. starved: gets its number, without memory."""
        wanted, number = [Wanted(nbytes)], lender.number
        try:
            (made,) = self._space.allocate_many(
                owner, wanted, now=now_ns / 1e9, rank=number, contiguous=contiguous
            )
        except PoolFull:
            return None
        end = max(offset + length for offset, length in made.extents)
        if end > max(lender.used_until, lender.grows_until):
            self._space.put_revoke(made.object_id, now=now_ns / 1e9)
            starved.add(number)
            return None
        lender.used_until = max(lender.used_until, end)
        return Replica(made.object_id, number, made.extents)

    def _candidates(self, machine: str, wish: Wish) -> list[Lender]:
        """Return the segments to try in order: preferred ones, the writer's machine, the most free space."""
        lenders = list(self._lenders.values())
        if len(lenders) > 1:
            order = {name: -at for at, name in enumerate(reversed(wish.preferred), 1)}
            free = self._space.free_bytes
            lenders.sort(key=lambda one: (order.get(one.name, 0), one.machine != machine, -free(one.number)))
        return lenders

    def _make_room_in_table(self) -> bool:
        """Replace a crowded table, if the system gives memory for another; False when no slot is left."""
        old = self.table
        if old.is_crowded:
            with contextlib.suppress(StoreError), self._reserve.lent():
                self.table, moved = old.regrown()
                for entry in self._entries.values():
                    entry.word = moved[entry.word]
                old.close()
        return not self.table.is_full

    # ------------------------------------------------------------------------------------- eviction

    def evict(self, nbytes: int, now_ns: int) -> int:
        """Free at least this much and EVICT_SHARE of the capacity, as far as objects may be evicted.

        Oldest lease first, soft-pinned last; leased, hard-pinned and unfinished objects stay. Returns the
        bytes freed.
        """
        wanted = max(nbytes, EVICT_SHARE * self._space.totals()[0])
        freed = 0
        order = self._order.coldest(now_ns)
        while freed < wanted:
            some: list[Entry] = []
            short = wanted - freed
            for entry in order:
                some.append(entry)
                short -= entry.nbytes * len(entry.replicas)
                if short <= 0:
                    break
            if not some:
                break
            unleased = self.table.lock_unleased([entry.word for entry in some], now_ns)
            for entry in (entry for entry, is_free in zip(some, unleased) if is_free):
                freed += entry.nbytes * len(entry.replicas)
                self.counters["evictions"] += 1
                self._drop(entry, now_ns)
        order.close()
        self.counters["evicted_bytes"] += freed
        return freed

    def keep_below_high_water(self, now_ns: int) -> int:
        """Evict when more than HIGH_WATER of the capacity is used; return the bytes freed."""
        capacity, free = self._space.totals()
        too_much = capacity - free - HIGH_WATER * capacity
        return self.evict(int(too_much), now_ns) if too_much > 0 else 0

    # ---------------------------------------------------------------------------------------- steps

    def _publish(self, entry: Entry, now_ns: int) -> int:
        """Show an entry that has been written to readers, in place of the old one of its name.

        Returns OK, or NO_SPACE when the table is full and cannot grow.
        """
        old = self._entries.get(entry.name)
        is_full = old is None and not self._make_room_in_table()
        if is_full or (old is not None and not entry.upsert):  # another put of this name was faster
            self.counters["puts_full" if is_full else "puts_existing"] += 1
            self._space.revoke_owner(entry.owner, now_ns / 1e9)
            return NO_SPACE if is_full else OK
        for replica in entry.replicas:
            self._space.put_end(replica.object_id, (), now=0.0)
        self.counters["puts_ended"] += 1
        if old is None:
            key, digest = name_hash(entry.name)
            entry.word = self.table.insert(key, digest, entry.nbytes, entry.locations, now_ns)
        else:
            entry.word, old.word = old.word, 0
            self._order.discard(old)
            self._free(old, now_ns)
            entry.remote_until_ns = old.remote_until_ns
            self._rewrite(entry)
        self._entries[entry.name] = entry
        self._order.add(entry, now_ns)
        return OK

    def close(self) -> None:
        """Give the table back."""
        self.table.close()
        self._reserve.close()

    def _drop(self, entry: Entry, now_ns: int) -> None:
        """Remove an object."""
        del self._entries[entry.name]
        self.table.remove(entry.word)
        self._order.discard(entry)
        entry.word = 0
        self._free(entry, now_ns)

    def _drop_replicas(self, entry: Entry, lost: Sequence[Replica], now_ns: int) -> None:
        """Drop some replicas, not all, of an object that is visible or being written; readers look again."""
        entry.replicas = [replica for replica in entry.replicas if replica not in lost]
        if entry.word:
            self._rewrite(entry)
        self._free_replicas(entry, lost, "", entry.remote_until_ns, now_ns)

    def _free_replicas(
        self, entry: Entry, lost: Sequence[Replica], client: str, until_ns: int, now_ns: int
    ) -> None:
        """Free the space of single replicas, at once or when no writer can touch it any more."""
        objects = tuple(replica.object_id for replica in lost)
        held = QuarantinedSpace(entry.owner, client, until_ns, objects)
        self._held.append(held)
        if until_ns <= now_ns:
            self._settle([held], now_ns)

    def _rewrite(self, entry: Entry) -> None:
        self.table.replace(entry.word, *name_hash(entry.name), entry.nbytes, entry.locations)

    def _free(self, entry: Entry, now_ns: int) -> None:
        """Free the space of an object, at once or when no remote client can be reading it."""
        if entry.remote_until_ns > now_ns:
            self._held.append(QuarantinedSpace(entry.owner, "", entry.remote_until_ns))
        else:
            self._space.release(entry.owner, now_ns / 1e9)

    def _revoke(self, entry: Entry, now_ns: int, until_ns: int = 0) -> None:
        """Revoke a put that will not be finished, or space in advance that is not wanted.

        until_ns   0, or the time by which its writer has certainly stopped
        """
        if entry.put in self._spares:
            self._take_spare(entry)
        else:
            self._end_writing(entry)
            self.counters["puts_revoked"] += 1
        self._space.revoke_owner(entry.owner, now_ns / 1e9, writer_may_live=until_ns > now_ns)
        if until_ns > now_ns:
            self._held.append(QuarantinedSpace(entry.owner, entry.client, until_ns))

    def _end_writing(self, entry: Entry) -> None:
        """Take an entry out of those that are being written: it is published, or revoked."""
        del self._puts[entry.put]
        self._writing[entry.name] -= 1
        if not self._writing[entry.name]:
            del self._writing[entry.name]

    def _take_spare(self, entry: Entry) -> None:
        """Take an entry out of the space in advance: it becomes an object, or is freed."""
        del self._spares[entry.put]
        self._spare_bytes -= entry.spare_bytes
        self._spare_counts[entry.client] -= 1
        if not self._spare_counts[entry.client]:
            del self._spare_counts[entry.client]

    def _settle_put(self, client: str, put: int, now_ns: int) -> None:
        """Free the space of a revoked put, whose writer has ended it at last."""
        held = [one for one in self._held if (one.owner, one.client, one.objects) == (str(put), client, ())]
        self._settle(held, now_ns)

    def _settle(self, over: Sequence[QuarantinedSpace], now_ns: int) -> None:
        for held in over:
            self._held.remove(held)
            for object_id in held.objects:
                with contextlib.suppress(UnknownObject):  # its segment is gone, or all of its object
                    self._space.put_revoke(object_id, now=now_ns / 1e9)
            if held.objects:
                continue
            self._space.settle(held.owner)
            self._space.release(held.owner, now_ns / 1e9)

    # ----------------------------------------------------------------------------------- inspection

    def stats(self) -> dict[str, int]:
        """Return counters and gauges: visible objects, writing, spares, segments, held, bytes, slots."""
        space = self._space.stats()
        return self.counters | {
            "objects": len(self._entries),
            "writing": len(self._puts),
            "spares": len(self._spares),
            "segments": len(self._lenders),
            "held": len(self._held),
            "capacity_bytes": space["capacity_bytes"],
            "free_bytes": space["free_bytes"],
            "table_slots": self.table.slots,
        }

    def check(self) -> None:
        """Assert the invariant (tests): every entry has its slot and its space, and nothing else has."""
        self._space.check()
        self.table.check()
        self._order.check(self._entries)
        owners = {held.owner for held in self._held}
        for name, entry in self._entries.items():
            assert entry.name == name
            assert entry.word, f"{name} has no slot"
        assert self._writing == Counter(entry.name for entry in self._puts.values())
        unfinished = [*self._puts.values(), *self._spares.values()]
        assert not any(entry.word for entry in unfinished)
        assert not any(entry.name for entry in self._spares.values())
        assert self._spare_bytes == sum(entry.spare_bytes for entry in self._spares.values())
        assert self._spare_counts == Counter(entry.client for entry in self._spares.values())
        for entry in [*self._entries.values(), *unfinished]:
            owners.add(entry.owner)
            assert entry.replicas, f"{entry.name} has no replica"
            segments = [replica.segment for replica in entry.replicas]
            assert len(set(segments)) == len(segments), f"{entry.name} has twins on one segment"
            for replica in entry.replicas:
                made = self._space.object(replica.object_id)
                assert (made.rank, made.extents) == (replica.segment, replica.extents)
                assert made.nbytes == entry.nbytes
        assert self._space.stats()["owners"] <= len(owners)
