"""The master's verbs: puts, lookups, removals and copies of named objects; segments and clients.

Called by the master for every request. Pure, like the books it keeps (`books`).
Explained in docs/explain/leases.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from store.errors import PoolFull, StoreError
from store.mooncake_store.codes import EXISTS, HAS_LEASE, NO_SPACE, NOT_FOUND, NOT_READY, OK
from store.mooncake_store.master.books import Books
from store.mooncake_store.master.entries import NEVER_NS, Entry, Lender, Replica
from store.mooncake_store.messages import Grant, Wish
from store.mooncake_store.shared_table import MAX_SEGMENT_BYTES, MAX_SEGMENTS

PUT_LIMIT_NS = 30 * 10**9
"""A put that has not ended by then is revoked; its space is freed once its writer is known to be gone."""

LATE_WRITES_NS = 120 * 10**9
"""Time in which bytes that a client had sent over TCP may still arrive after it was cut off.

`transport.bulk.sockets_server` gives a write 30 s, and its bytes the time that they take.
"""

SPARE_SHARE = 1 / 32
"""Largest share of the capacity that is given out in advance."""

MAX_SPARES = 16
"""Most puts that one client has space for in advance: `writer.MAX_SPARES`."""


class Catalogue(Books):
    """All objects of one master. This class has the verbs; books and invariant are those of `Books`."""

    # ------------------------------------------------------------------------------------- segments

    def mount(self, client: str, name: str, machine: str, nbytes: int) -> int:
        """Add memory that a client lends; return its number, which is never used again. Raises StoreError."""
        if any(lender.name == name for lender in self._lenders.values()):
            raise StoreError(f"a segment {name} is lent already")
        if not 0 < nbytes <= MAX_SEGMENT_BYTES:
            raise StoreError(f"a segment of {nbytes} B; at most {MAX_SEGMENT_BYTES} B can be lent")
        number = self._next_segment
        if number >= MAX_SEGMENTS:
            raise StoreError(f"this master has seen {MAX_SEGMENTS} segments; start a new one")
        self._space.add_segment(number, nbytes, 0)
        self._next_segment += 1
        self._lenders[number] = Lender(number, name, client, machine, nbytes)
        return number

    def unmount(self, number: int, now_ns: int) -> None:
        """Remove a segment with its replicas; objects with a replica elsewhere stay."""
        del self._lenders[number]
        for entry in [*self._entries.values(), *self._puts.values(), *self._spares.values()]:
            lost = [replica for replica in entry.replicas if replica.segment == number]
            if not lost:
                continue
            self.counters["replicas_lost"] += 1
            if len(lost) < len(entry.replicas):
                self._drop_replicas(entry, lost, now_ns)
            elif entry.word:
                self.counters["objects_lost"] += 1
                self._drop(entry, now_ns)
            else:
                self._revoke(entry, now_ns)  # it writes to memory that is no one's
        self._space.remove_segment(number)

    def segments(self) -> dict[int, Lender]:
        """Return all lent segments by number."""
        return self._lenders

    # ----------------------------------------------------------------------------------------- puts

    def put_start(
        self, client: str, machine: str, name: str, nbytes: int, wish: Wish, upsert: bool, now_ns: int
    ) -> Grant | int:
        """Allocate space for an object; or return a code: EXISTS, NO_SPACE.

        Several upserts of a name may be under way, each in space of its own; readers see the one that ends
        last.
        """
        old = self._entries.get(name)
        if not upsert and (old is not None or name in self._writing):
            self.counters["puts_existing"] += 1
            return EXISTS
        entry = self._new_entry(client, machine, name, nbytes, wish, now_ns, evict=True)
        old = self._entries.get(name)  # unless it has just been evicted
        fits = old is not None and nbytes <= old.nbytes and old.remote_until_ns <= now_ns and not old.tasks
        if entry is None and old is not None and fits:  # into the space of the object that it replaces
            self._drop(old, now_ns)
            entry = self._new_entry(client, machine, name, nbytes, wish, now_ns, evict=True)
        if entry is None:
            self.counters["puts_full"] += 1
            return NO_SPACE
        entry.upsert = upsert
        if wish.soft_pin_ms is not None:
            entry.soft_until_ns = now_ns + wish.soft_pin_ms * 10**6
        elif old is not None and wish.keep_pin:
            entry.soft_until_ns = old.soft_until_ns
        self._puts[entry.put] = entry
        self._writing[name] += 1
        self.counters["puts"] += 1
        return Grant(entry.put, entry.locations, entry.scattered)

    def spares(
        self, client: str, machine: str, nbytes: int, wish: Wish, count: int, now_ns: int
    ) -> list[Grant]:
        """Give a client space in advance, up to `count` times.

        It evicts nothing, and all of it together has at most SPARE_SHARE of the capacity. put_revoke or the
        end of the client frees it.
        """
        granted: list[Grant] = []
        most = SPARE_SHARE * self._space.totals()[0]
        wanted = min(count, MAX_SPARES) - self._spare_counts[client]
        while len(granted) < wanted and self._spare_bytes + nbytes * wish.replicas <= most:
            entry = self._new_entry(client, machine, "", nbytes, wish, now_ns, evict=False)
            if entry is None:
                break
            entry.spare_bytes = nbytes * len(entry.replicas)
            self._spare_bytes += entry.spare_bytes
            self._spare_counts[client] += 1
            self._spares[entry.put] = entry
            granted.append(Grant(entry.put, entry.locations))
        return granted

    def put_end(self, client: str, put: int, now_ns: int) -> int:
        """Publish a put whose bytes are in place. Returns OK, NO_SPACE, or NOT_FOUND if it was revoked."""
        entry = self._puts.get(put)
        if entry is None or entry.client != client:
            self._settle_put(client, put, now_ns)
            return NOT_FOUND
        self._end_writing(entry)
        return self._publish(entry, now_ns)

    def claim(self, client: str, put: int, name: str, now_ns: int) -> int:
        """Publish a put from the client's journal. name: of a put into space in advance, else "".

        Returns OK, NO_SPACE, or NOT_FOUND when the space is not the client's (any more).
        """
        self.counters["claims"] += 1
        spare = self._spares.get(put)
        if spare is None or spare.client != client or not name:
            code = self.put_end(client, put, now_ns)
            self.counters["claims_unknown"] += code != OK
            return code
        self._take_spare(spare)
        spare.name = name
        if spare.wish.soft_pin_ms is not None:
            spare.soft_until_ns = now_ns + spare.wish.soft_pin_ms * 10**6
        self.counters["puts"] += 1
        return self._publish(spare, now_ns)

    def put_revoke(self, client: str, put: int, now_ns: int) -> int:
        """Forget this put; its writer will not write any more."""
        entry = self._puts.get(put) or self._spares.get(put)
        if entry is None or entry.client != client:
            self._settle_put(client, put, now_ns)
            return NOT_FOUND
        self._revoke(entry, now_ns)
        return OK

    # --------------------------------------------------------------------------------------- copies

    def add_replicas(self, entry: Entry, numbers: Sequence[int], now_ns: int) -> list[Replica] | None:
        """Allocate copies of a visible object, one on each of these segments; None: not enough space."""
        added: list[Replica] = []
        for number in numbers:
            try:
                made = self._space.allocate(entry.owner, entry.nbytes, now=now_ns / 1e9, rank=number)
            except PoolFull:
                for replica in added:
                    self._space.put_revoke(replica.object_id, now=now_ns / 1e9)
                return None
            added.append(Replica(made.object_id, number, made.extents))
        return added

    def end_copy(
        self,
        entry: Entry,
        added: Sequence[Replica],
        source: int | None,
        done: bool,
        now_ns: int,
        *,
        client: str = "",
        until_ns: int = 0,
    ) -> bool:
        """End a copy: the added replicas hold the bytes (done), or do not. A move then drops its source.

        until_ns    not done: 0, or the time by which the client that copied has certainly stopped
        """
        alive = self._entries.get(entry.name) is entry
        usable = [replica for replica in added if replica.segment in self._lenders]
        if not (alive and done and len(usable) == len(added)):
            self._free_replicas(entry, usable, client, until_ns, now_ns)
            return False
        for replica in added:
            self._space.put_end(replica.object_id, (), now=0.0)
        entry.replicas.extend(added)
        lost = [replica for replica in entry.replicas if replica.segment == source]
        if lost and len(lost) < len(entry.replicas):
            self._drop_replicas(entry, lost, now_ns)
        else:
            self._rewrite(entry)
        return True

    def settle_copy(self, client: str, added: Sequence[Replica], now_ns: int) -> None:
        """Free the space of a copy that took too long, whose client has ended it at last."""
        objects = tuple(replica.object_id for replica in added)
        self._settle([one for one in self._held if (one.client, one.objects) == (client, objects)], now_ns)

    # -------------------------------------------------------------------------------------- lookups

    def find(self, name: str, now_ns: int, *, lease: bool) -> Entry | None:
        """Return the visible entry of a name. lease: grant one, for readers that cannot see the table."""
        entry = self._entries.get(name)
        self.counters["finds"] += 1
        if entry is None:
            return None
        self.counters["found"] += 1
        if lease:
            entry.remote_until_ns = now_ns + self.table.lease_ttl_ns
            self.table.extend_lease(entry.word, entry.remote_until_ns)
        return entry

    # ------------------------------------------------------------------------------------- removing

    def remove(self, name: str, now_ns: int, *, force: bool) -> int:
        """Remove an object: OK, NOT_FOUND, NOT_READY while it is written or copied, or HAS_LEASE."""
        entry = self._entries.get(name)
        if entry is None:
            return NOT_READY if name in self._writing else NOT_FOUND
        if entry.tasks and not force:
            return NOT_READY
        if not force and not self.table.lock_unleased([entry.word], now_ns)[0]:
            self.counters["leased_refusals"] += 1
            return HAS_LEASE
        self.counters["removed"] += 1
        self._drop(entry, now_ns)
        return OK

    def all_names(self) -> list[str]:
        """Return the names of visible objects."""
        return list(self._entries)

    def clear(self, client: str, name: str, segment: str, now_ns: int) -> bool:
        """Drop the replicas of the client's own object on one segment ("": all); False when it may not."""
        entry = self._entries.get(name)
        if entry is None or entry.client != client or entry.tasks:
            return False
        where = self.segment_named(segment) if segment else None
        lost = [one for one in entry.replicas if where is None or one.segment == where.number]
        if not lost or (segment and where is None) or not self.table.lock_unleased([entry.word], now_ns)[0]:
            return False
        if len(lost) == len(entry.replicas):
            self._drop(entry, now_ns)
        else:
            self._drop_replicas(entry, lost, now_ns)
        return True

    # -------------------------------------------------------------------------------- clients, time

    def drop_client(self, client: str, now_ns: int, until_ns: int = 0, machine: str = "") -> None:
        """Remove a client that is gone, with its segments and the puts that it has not ended.

        until_ns    0: it writes no more. Else its space is freed then, or after `settle_client`
        machine     on which its process has ended: no bytes of it are under way to segments there
        """
        unfinished = [*self._puts.values(), *self._spares.values()]
        for entry in [entry for entry in unfinished if entry.client == client]:
            is_far = any(self._lenders[one.segment].machine != machine for one in entry.replicas)
            self._revoke(entry, now_ns, until_ns if is_far else 0)
        for number in [one.number for one in self._lenders.values() if one.client == client]:
            self.unmount(number, now_ns)
        for held in [held for held in self._held if held.client == client]:
            held.until_ns = min(held.until_ns, until_ns)
        self._settle([held for held in self._held if held.until_ns <= now_ns], now_ns)

    def settle_client(self, client: str, now_ns: int) -> None:
        """Free the quarantined space of a dropped client that has certainly ended."""
        self._settle([held for held in self._held if held.client == client], now_ns)

    def tick(self, now_ns: int) -> None:
        """Revoke puts that take too long, and free quarantined space whose time is over."""
        for entry in list(self._puts.values()):
            if now_ns - entry.started_ns > PUT_LIMIT_NS:
                self._revoke(entry, now_ns, NEVER_NS)
        self._settle([held for held in self._held if held.until_ns <= now_ns], now_ns)
