"""Leases of objects that owners read, and the objects that owners write and have not published.

Used by `store.books.ledger` alone. Pure: time is an argument. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from store.books.segment import Segment
from store.objects import PUBLISHED, PoolObject
from store.ranking import Ranking


@dataclass(slots=True)
class Owner:
    """The leases of one owner, which all end at `until`, and its unpublished objects, by object id."""

    leased: dict[int, PoolObject] = field(default_factory=dict)
    until: float = 0.0
    objects: dict[int, PoolObject] = field(default_factory=dict)


class Leases:
    """The leases of one pool.

        owners     owner -> what it has; absent when that is nothing
        _ends      owners with leases, by the time at which these end

    Invariant: an object's lessees are the owners that have it leased.
    """

    def __init__(self, segments: Mapping[int, Segment]):
        self.owners: dict[str, Owner] = {}
        self._segments = segments
        self._ends = Ranking[str]()

    # -------------------------------------------------------------------------------- owners

    def own(self, owner: str, objects: Sequence[PoolObject]) -> None:
        """Note objects that an owner has put and not published."""
        record = self.owners.get(owner)
        if record is None:
            record = self.owners[owner] = Owner()
        record.objects.update((obj.object_id, obj) for obj in objects)

    def disown(self, obj: PoolObject) -> None:
        """Take an object from its owner: it is published, or freed."""
        record = self.owners[obj.owner]
        del record.objects[obj.object_id]
        if not record.objects and not record.leased:
            del self.owners[obj.owner]

    def objects_of(self, owner: str) -> list[PoolObject]:
        """Return the objects that the owner has not published."""
        record = self.owners.get(owner)
        return list(record.objects.values()) if record else []

    def unpublished(self) -> Iterator[PoolObject]:
        """Yield the objects that owners have not published."""
        return (obj for record in self.owners.values() for obj in record.objects.values())

    # -------------------------------------------------------------------------------- leases

    def lease(self, owner: str, objects: Sequence[PoolObject], until: float) -> None:
        """Lease at least one object to an owner, and prolong the leases that it has."""
        record = self.owners.get(owner)
        if record is None:
            record = self.owners[owner] = Owner()
        if until > record.until or not record.leased:
            record.until = until
            self._ends.rank(owner, until)
        leased, only = record.leased, (owner,)
        for obj in objects:
            leased[obj.object_id] = obj
            if not obj.lessees:
                obj.lessees = only
                if obj.evictable:
                    self._segments[obj.rank].note_evictable(obj)
            elif owner not in obj.lessees:
                obj.lessees += only

    def end(self, owner: str) -> list[PoolObject]:
        """End the leases of an owner; return the objects that no other owner leases."""
        record = self.owners.get(owner)
        if record is None or not record.leased:
            return []
        leased, record.leased, record.until = record.leased, {}, 0.0
        self._ends.remove(owner)
        if not record.objects:
            del self.owners[owner]
        free = []
        for obj in leased.values():
            if len(obj.lessees) > 1:
                obj.lessees = tuple(other for other in obj.lessees if other != owner)
            else:
                obj.lessees = ()
                self._segments[obj.rank].note_evictable(obj)
                free.append(obj)
        return free

    def forget(self, obj: PoolObject) -> None:
        """Forget all leases on an object that is freed."""
        for owner in obj.lessees:
            record = self.owners[owner]
            del record.leased[obj.object_id]
            if not record.leased:
                record.until = 0.0
                self._ends.remove(owner)
                if not record.objects:
                    del self.owners[owner]
        obj.lessees = ()

    def ended(self, now: float) -> list[str]:
        """Return the owners whose leases are over. They keep them until `end`."""
        found: list[str] = []
        if not self._ends or self._ends.key(self._ends.first()) > now:
            return found
        for owner in self._ends.ascending():
            if self._ends.key(owner) > now:
                break
            found.append(owner)
        return found

    def next_deadline(self) -> float:
        """Return when the first lease ends; inf: never."""
        return self._ends.key(self._ends.first()) if self._ends else inf

    # ---------------------------------------------------------------------------- inspection

    def check(self, objects: Mapping[int, PoolObject]) -> None:
        """Assert the invariant, for all objects that there are (tests)."""
        self._ends.check()
        unpublished = {i for i, obj in objects.items() if obj.state not in PUBLISHED}
        assert unpublished == {obj.object_id for obj in self.unpublished()}
        for name, record in self.owners.items():
            assert record.leased or record.objects, f"owner {name} has nothing"
            assert all(obj.owner == name for obj in record.objects.values())
            assert all(objects[i] is obj for i, obj in (record.leased | record.objects).items())
        until = {name: record.until for name, record in self.owners.items() if record.leased}
        assert until == {name: self._ends.key(name) for name in self._ends}
        leases = sorted((name, i) for name, record in self.owners.items() for i in record.leased)
        assert leases == sorted((name, i) for i, obj in objects.items() for name in obj.lessees)
