"""Random lives of a pool against a model that is obviously right; the directory's check() after each step."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from store.directory import Directory
from store.errors import CopyExists, ObjectInUse, PoolFull, UnknownObject
from store.objects import BlockRemoved, ObjectState, PoolObject, Wanted
from tests.conftest import examples
from tests.store.samples import SMALL, digest_of

BLOCK = SMALL.nbytes
SUMS = [1] * SMALL.layers
TIER_RANK, PLAIN_RANK = RANKS = 1, 2
SEGMENT = 3 * BLOCK
COLD_S = 6.0
QUARANTINE_S = 8.0
owners = st.sampled_from(["a", "b", "c"])
keys = st.integers(0, 7)
ranks = st.sampled_from([None, *RANKS])


class Lives(RuleBasedStateMachine):
    """Two segments of three blocks; rank 1 has a tier, and takes what rank 2 holds where that `lends`.

    objects    id -> object, all that must exist; states is the model's own record of their state
    order      object ids of visible ones, least recently used first; used: when
    family     object id -> number of its put, the same for its copies
    copied     those of order whose key is visible on both ranks, longest unused first
    expected   copies whose checksums were known when they were begun
    leases     owner -> (ids, until)
    late       object id -> (until when it is quarantined, writer)
    """

    lends = False

    def __init__(self):
        super().__init__()
        self.directory = Directory(
            SMALL, max_unsaved_share=0.7, copy_cold_s=COLD_S, quarantine_s=QUARANTINE_S
        )
        self.directory.add_segment(TIER_RANK, SEGMENT, 0, tier=True)
        self.directory.add_segment(PLAIN_RANK, SEGMENT, 1, saver=TIER_RANK if self.lends else None)
        self.now = 0.0
        self.objects: dict[int, PoolObject] = {}
        self.states: dict[int, ObjectState] = {}
        self.keys: dict[int, int | None] = {}
        self.order: list[int] = []
        self.used: dict[int, float] = {}
        self.family: dict[int, int] = {}
        self.copied: list[int] = []
        self.expected: set[int] = set()
        self.hard: set[int] = set()
        self.soft: dict[int, float] = {}
        self.leases: dict[str, tuple[set[int], float]] = {}
        self.late: dict[int, tuple[float, int | None]] = {}
        self.unsaved: set[int] = set()
        self.in_flight: set[int] = set()  # keys handed to the tier's writer
        self.tier: set[int] = set()

    # ------------------------------------------------------------------------------- the model

    def visible(self, key: int | None = None) -> list[int]:
        """Visible ids (of a key), in the order of their put_start."""
        return sorted(i for i in self.order if key in (None, self.keys[i]))

    def there(self) -> set[int]:
        """Keys in DRAM."""
        return {self.keys[i] for i in self.order}

    def of(self, state: ObjectState, owner: str | None = None) -> list[int]:
        found = (i for i, s in self.states.items() if s is state)
        return sorted(i for i in found if owner is None or self.objects[i].owner == owner)

    def siblings(self, object_id: int) -> list[int]:
        """It and its copies, visible or being written, in the order of their put_start."""
        return sorted(i for i, number in self.family.items() if number == self.family[object_id])

    def nearest(self, key: int, rank: int | None) -> int:
        return min(self.visible(key), key=lambda i: (self.objects[i].rank != rank, i))

    def leased(self) -> set[int]:
        return {i for ids, until in self.leases.values() if until > self.now for i in ids}

    def expire(self) -> None:
        self.leases = {o: lease for o, lease in self.leases.items() if lease[1] > self.now}

    def evictable(self, rank: int) -> list[int]:
        """First the one to go first: cold copies, the least recently used, soft-pinned ones."""
        held = self.leased() | self.unsaved | self.hard
        here = [i for i in self.order if self.objects[i].rank == rank and i not in held]
        soft = [i for i in here if self.soft.get(i, 0.0) > self.now]
        cold = [i for i in self.copied if i in here and i not in soft]
        cold = [i for i in cold if self.now - self.used[i] >= COLD_S]
        return cold + [i for i in here if i not in cold + soft] + soft

    def free_bytes(self, rank: int) -> int:
        return SEGMENT - sum(obj.nbytes for obj in self.objects.values() if obj.rank == rank)

    def reachable_bytes(self, rank: int) -> int:
        return self.free_bytes(rank) + sum(self.objects[i].nbytes for i in self.evictable(rank))

    def touch(self, object_id: int) -> None:
        self.order.remove(object_id)
        self.order.append(object_id)
        self.used[object_id] = self.now
        if object_id in self.copied:
            self.copied.remove(object_id)
            self.copied.append(object_id)

    def leave(self, object_id: int) -> None:
        """It is no copy of the others any more."""
        others = [i for i in self.siblings(object_id) if i != object_id and i in self.order]
        self.family[object_id] = -object_id
        gone = {object_id, *(others if len(others) == 1 else [])}
        self.copied = [i for i in self.copied if i not in gone]

    def forget(self, ids: list[int]) -> None:
        for i in ids:
            self.leave(i)
            for record in (self.objects, self.states, self.keys, self.family):
                del record[i]
            for record in (self.used, self.soft, self.late):
                record.pop(i, None)
            self.hard.discard(i)
            for leased, _ in self.leases.values():
                leased.discard(i)
        self.order = [i for i in self.order if i in self.objects]

    def note_evictions(self, rank: int | None) -> None:
        """Who went must have been, at its turn, the first to go in its segment."""
        for event in self.directory.drain_events():
            if isinstance(event, BlockRemoved) and event.tier == "dram":
                assert rank in (None, event.rank)
                (gone,) = (i for i in self.visible(event.key) if self.objects[i].rank == event.rank)
                assert self.evictable(event.rank)[0] == gone
                self.forget([gone])

    # ------------------------------------------------------------------------------- the rules

    @rule(
        owner=owners,
        key=st.none() | keys,
        quarters=st.integers(1, 4),
        rank=ranks,
        contiguous=st.booleans(),
        pins=st.sampled_from([(0.0, False)] * 4 + [(4.0, False), (1e9, False), (0.0, True)]),
    )
    def allocate(self, owner, key, quarters, rank, contiguous, pins) -> None:
        nbytes = BLOCK if key is not None else BLOCK * quarters // 4
        soft_until = self.now + pins[0] if pins[0] else 0.0
        wanted = Wanted(nbytes, key, digest_of(key or 0), 0.0, 0, soft_until, pins[1])
        self.start(owner, wanted, rank, contiguous)

    def start(self, owner: str, wanted: Wanted, rank: int | None, contiguous: bool = True) -> None:
        def put() -> PoolObject:
            (obj,) = self.directory.allocate_many(
                owner, [wanted], now=self.now, rank=rank, contiguous=contiguous
            )
            return obj

        obj = self.started(put, wanted.nbytes, [rank] if rank else list(RANKS), contiguous)
        if obj is not None:
            self.record(obj, wanted)

    def started(self, put, nbytes: int, allowed: list[int], contiguous: bool) -> PoolObject | None:
        """A put_start; when there was no room, none can have been left."""
        self.directory.drain_events()
        try:
            obj = put()
        except PoolFull:
            self.note_evictions(allowed[0] if len(allowed) == 1 else None)
            for rank in allowed:
                assert self.reachable_bytes(rank) < nbytes or (contiguous and not self.evictable(rank))
            return None
        self.note_evictions(allowed[0] if len(allowed) == 1 else None)
        assert obj.object_id > max(self.objects, default=0)
        assert obj.rank in allowed
        assert not (contiguous and obj.scattered)
        return obj

    def record(self, obj: PoolObject, wanted: Wanted, family: int = 0) -> None:
        number = obj.object_id
        self.objects[number], self.states[number] = obj, ObjectState.WRITING
        self.keys[number], self.family[number] = wanted.key, family or number
        self.soft[number] = wanted.soft_until
        if wanted.hard_pin:
            self.hard.add(number)

    @precondition(lambda self: self.of(ObjectState.WRITING))
    @rule(data=st.data(), bad=st.sampled_from([False, False, False, True]))
    def put_end(self, data, bad) -> None:
        self.end(data.draw(st.sampled_from(self.of(ObjectState.WRITING))), bad)

    @rule(wanted=st.lists(keys, min_size=1, max_size=6), saved=st.booleans())
    def publish(self, wanted, saved) -> None:
        """Several puts from start to end in one step: the pool fills, so that much is evicted."""
        for key in wanted:
            if key in self.there():
                continue
            before = set(self.objects)
            self.start("a", Wanted(BLOCK, key, digest_of(key)), None)
            for object_id in set(self.objects) - before:
                self.end(object_id)
            if saved and key in self.in_flight:  # a second "saved" must do no harm
                self.report(key, "saved")

    def end(self, object_id: int, bad: bool = False) -> None:
        obj, key = self.objects[object_id], self.keys[object_id]
        others = self.visible(key) if key is not None else []
        is_copy = bool(others) and others[0] in self.siblings(object_id)
        bad = bad and (is_copy or object_id in self.expected)
        becomes_visible = key is not None and (not others or is_copy) and not bad
        sums = [2] * SMALL.layers if bad else SUMS
        assert self.directory.put_end(object_id, sums, self.now) == becomes_visible
        if bad:
            self.forget([object_id])
            return
        if not becomes_visible:
            self.leave(object_id)
            self.states[object_id] = ObjectState.PRIVATE
            return
        self.states[object_id] = ObjectState.VISIBLE
        self.order.append(object_id)
        self.used[object_id] = self.now
        if is_copy:
            for i in self.siblings(object_id):
                if i in self.order and i not in self.copied:
                    self.copied.append(i)
                    self.used[i] = self.now
        saves = self.directory.take_saves()
        is_saved = self.lends or obj.rank == TIER_RANK
        new = is_saved and key not in self.tier | self.in_flight and not is_copy
        waiting = [i for i in self.unsaved if self.objects[i].rank == obj.rank]
        assert list(saves) == ([TIER_RANK] if new and len(waiting) < 2 else [])
        if saves:
            assert saves[TIER_RANK] == [obj]
            self.unsaved.add(object_id)
            self.in_flight.add(key)

    # ------------------------------------------------------------------------- copies and pins

    @precondition(lambda self: self.order or self.of(ObjectState.WRITING))
    @rule(data=st.data(), owner=owners, rank=ranks)
    def put_copy(self, data, owner, rank) -> None:
        known = [i for i in self.order + self.of(ObjectState.WRITING) if self.keys[i] is not None]
        if known:
            source = data.draw(st.sampled_from(known))
            self.copy(
                source,
                rank,
                lambda: self.directory.put_copy(source, now=self.now, owner=owner, rank=rank),
            )

    @precondition(lambda self: self.order)
    @rule(data=st.data(), owner=owners, rank=st.sampled_from(RANKS), seconds=st.integers(1, 5))
    def replicate(self, data, owner, rank, seconds) -> None:
        self.directory.expire(self.now)
        self.expire()
        key = data.draw(st.sampled_from(sorted(self.there())))
        source, until = self.nearest(key, rank), self.now + seconds

        def put() -> PoolObject:
            found, copy = self.directory.replicate(
                owner, key, digest_of(key), rank=rank, now=self.now, until=until
            )
            assert found.object_id == source
            return copy

        if self.copy(source, rank, put):
            self.add_lease(owner, {source}, until)

    @rule(
        wanted=st.lists(keys, min_size=1, max_size=3, unique=True), seconds=st.sampled_from([0.0, 3.0, 7.0])
    )
    def publish_copies(self, wanted, seconds) -> None:
        """Blocks on both segments, which then grow cold: what the single steps seldom come to."""
        for key in wanted:
            if key not in self.there():
                self.start("b", Wanted(BLOCK, key, digest_of(key)), TIER_RANK)
                self.end_all()
            if len(self.visible(key)) == 1:
                (source,) = self.visible(key)
                self.copy(source, None, lambda i=source: self.directory.put_copy(i, now=self.now))
                self.end_all()
            if key in self.in_flight:
                self.report(key, "saved")
        self.now += seconds

    def end_all(self) -> None:
        for object_id in self.of(ObjectState.WRITING):
            self.end(object_id)

    def copy(self, source: int, rank: int | None, put) -> bool:
        taken = {self.objects[i].rank for i in self.siblings(source)}
        if rank in taken:
            with pytest.raises(CopyExists):
                put()
            return False
        allowed = [r for r in RANKS if r not in taken and rank in (None, r)]
        obj = self.started(put, BLOCK, allowed, True)
        if obj is None:
            return False
        assert source in self.objects, "the source was evicted for its copy"
        key, soft = self.keys[source], self.soft.get(source, 0.0)
        wanted = Wanted(BLOCK, key, digest_of(key), 0.0, 0, soft, source in self.hard)
        self.record(obj, wanted, self.family[source])
        if self.states[source] is ObjectState.VISIBLE:
            self.expected.add(obj.object_id)
        return True

    @precondition(lambda self: self.order)
    @rule(data=st.data(), hard=st.none() | st.booleans(), soft=st.none() | st.sampled_from([-1.0, 4.0, 1e9]))
    def pin(self, data, hard, soft) -> None:
        key = data.draw(st.sampled_from(sorted(self.there())))
        until = None if soft is None else max(self.now + soft, 0.0)
        self.directory.pin(key, digest_of(key), hard=hard, soft_until=until)
        for i in self.siblings(self.visible(key)[0]):
            if hard is not None:
                (self.hard.add if hard else self.hard.discard)(i)
            if until is not None:
                self.soft[i] = until

    # ---------------------------------------------------------------------------------- removal

    @rule(key=keys, rank=ranks, force=st.booleans())
    def remove(self, key, rank, force) -> None:
        gone = [i for i in self.visible(key) if rank in (None, self.objects[i].rank)]
        busy = (set() if force else self.leased()) | self.unsaved
        if not gone or busy & set(gone):
            with pytest.raises(ObjectInUse if gone else UnknownObject):
                self.directory.remove(key, digest_of(key), self.now, rank=rank, force=force)
            return
        assert self.directory.remove(key, digest_of(key), self.now, rank=rank, force=force) == len(gone)
        self.removed(gone, whole=rank is None)

    def removed(self, gone: list[int], whole: bool) -> None:
        for i in self.siblings(gone[0]):
            if whole and i not in self.order:
                self.leave(i)
                self.keys[i] = None
        self.forget(gone)

    # -------------------------------------------------------------------------- ends and leases

    @precondition(lambda self: self.of(ObjectState.WRITING) + self.of(ObjectState.PRIVATE))
    @rule(data=st.data(), alive=st.booleans(), writer=ranks)
    def put_revoke(self, data, alive, writer) -> None:
        ids = self.of(ObjectState.WRITING) + self.of(ObjectState.PRIVATE)
        object_id = data.draw(st.sampled_from(ids))
        self.directory.put_revoke(object_id, now=self.now, writer_may_live=alive, writer=writer)
        self.revoked(object_id, alive, writer)

    def revoked(self, object_id, alive, writer) -> None:
        if alive and self.states[object_id] is ObjectState.WRITING:
            self.leave(object_id)
            self.states[object_id] = ObjectState.QUARANTINED
            self.late[object_id] = self.now + QUARANTINE_S, writer
        else:
            self.forget([object_id])

    @rule(owner=owners, alive=st.booleans(), writer=ranks)
    def revoke_owner(self, owner, alive, writer) -> None:
        self.directory.revoke_owner(owner, self.now, writer_may_live=alive, writer=writer)
        self.leases.pop(owner, None)
        for object_id in self.of(ObjectState.WRITING, owner) + self.of(ObjectState.PRIVATE, owner):
            self.revoked(object_id, alive, writer)

    @rule(owner=owners)
    def settle(self, owner) -> None:
        quarantined = self.of(ObjectState.QUARANTINED, owner)
        assert self.directory.settle(owner) == len(quarantined)
        self.forget(quarantined)

    @rule(rank=st.sampled_from(RANKS))
    def settle_writer(self, rank) -> None:
        quarantined = [i for i, (_, writer) in self.late.items() if writer == rank]
        assert self.directory.settle_writer(rank) == len(quarantined)
        self.forget(quarantined)

    @precondition(lambda self: self.objects)
    @rule(owner=owners, data=st.data(), seconds=st.integers(1, 5))
    def lease(self, owner, data, seconds) -> None:
        self.directory.expire(self.now)
        self.expire()
        ids = data.draw(st.sets(st.sampled_from(self.order or sorted(self.objects)), min_size=1, max_size=2))
        self.directory.lease(owner, ids, self.now, self.now + seconds)
        self.add_lease(owner, ids, self.now + seconds)

    def add_lease(self, owner: str, ids: set[int], until: float) -> None:
        held, before = self.leases.get(owner, (set(), 0.0))
        self.leases[owner] = (held | ids, max(before, until))

    @rule(owner=owners)
    def release(self, owner) -> None:
        self.directory.release(owner, self.now)
        self.leases.pop(owner, None)
        self.forget(self.of(ObjectState.PRIVATE, owner))

    @rule(
        data=st.data(),
        absent=st.lists(keys, max_size=2),
        wrong=st.sampled_from([None, None, None, 0, 1, 2]),
        rank=ranks,
    )
    def lookup(self, data, absent, wrong, rank) -> None:
        there = data.draw(st.permutations(sorted(self.there() | self.tier)))
        wanted = list(dict.fromkeys([*there[:4], *absent]))
        digests = [digest_of(key) + (i == wrong) for i, key in enumerate(wanted)]
        expected = []
        for i, key in enumerate(wanted):
            in_dram = key in self.there()
            if i == wrong or not (in_dram or key in self.tier):
                break
            expected.append((key, "dram", self.nearest(key, rank)) if in_dram else (key, "ssd", None))
        node = None if rank is None else rank - 1
        hits = self.directory.lookup(wanted, digests, self.now, node=node)
        assert [(hit.key, hit.tier, hit.object_id) for hit in hits] == expected
        for hit in reversed(hits):
            if hit.tier == "dram":
                self.touch(hit.object_id)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), outcome=st.sampled_from(["saved", "durable", "dropped", "bad_in_dram"]))
    def tier_reports(self, data, outcome) -> None:
        self.report(data.draw(st.sampled_from(sorted(self.in_flight))), outcome)

    def report(self, key: int, outcome: str) -> None:
        getattr(self.directory, outcome)(TIER_RANK, [key])
        bad = [i for i in self.unsaved if self.keys[i] == key and outcome == "bad_in_dram"]
        self.states.update(dict.fromkeys(bad, ObjectState.UNLISTED))
        self.order = [i for i in self.order if i not in bad]
        for i in bad:
            self.leave(i)
        self.unsaved = {i for i in self.unsaved if self.keys[i] != key}
        if outcome != "saved":
            self.in_flight.discard(key)
        if outcome == "durable":
            self.tier.add(key)

    def free_what_is_over(self) -> None:
        """A quarantine ends by itself, at the next `expire`."""
        if over := [i for i, (until, _) in self.late.items() if until <= self.now]:
            self.directory.expire(self.now)
            self.expire()
            self.forget(over)

    def free_unlisted(self) -> None:
        """Who had a lease on a block that was found bad reads it to the end; then it is gone."""
        if unlisted := self.of(ObjectState.UNLISTED):
            self.directory.expire(self.now)
            self.expire()
            held = {i for ids, _ in self.leases.values() for i in ids}
            self.forget([i for i in unlisted if i not in held])

    @rule(key=keys, bad=st.booleans())
    def tier_loses(self, key, bad) -> None:
        (self.directory.drop_tier_block if bad else self.directory.tier_evicted)(TIER_RANK, [key])
        self.tier.discard(key)

    @rule(seconds=st.sampled_from([1.0, 3.0, 10.0]))
    def time_passes(self, seconds) -> None:
        self.now += seconds

    @invariant()
    def the_directory_agrees_with_the_model(self) -> None:
        self.free_unlisted()
        self.free_what_is_over()
        self.directory.check()
        for object_id, state in self.states.items():
            obj = self.directory.object(object_id)
            assert obj.state is state
            assert obj.key == self.keys[object_id]
            assert obj.unsaved == (object_id in self.unsaved)
        stats = self.directory.stats()
        assert stats["objects"] == len(self.objects)
        assert stats["keys_dram"] == len(self.there())
        assert stats["copies_dram"] == len(self.copied)
        assert stats["keys_ssd"] == len(self.tier)
        assert stats["free_bytes"] == self.free_bytes(TIER_RANK) + self.free_bytes(PLAIN_RANK)
        times = [until for ids, until in self.leases.values() if ids]
        times += [until for until, _ in self.late.values()]
        deadline = self.directory.next_deadline()
        if deadline > self.now:
            assert self.directory.expire(self.now) == 0
        if ahead := [until for until in times if until > self.now]:
            assert deadline <= min(ahead)
        blocks = 2 * SEGMENT // BLOCK - len(self.hard & set(self.order))
        assert self.directory.will_fit([BLOCK] * blocks)
        assert not self.directory.will_fit([BLOCK] * (blocks + 1))
        for key in self.there():
            found = self.directory.locations(key, digest_of(key))
            assert [obj.object_id for obj in found] == self.visible(key)


class LendingLives(Lives):
    """Rank 1 saves the blocks of both."""

    lends = True


TestLives = Lives.TestCase
TestLendingLives = LendingLives.TestCase
TestLives.settings = TestLendingLives.settings = settings(max_examples=examples(75), stateful_step_count=50)
