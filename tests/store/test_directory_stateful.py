"""Random lives of a pool against a model that is obviously right; the directory's check() after each step."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from store.directory import Directory
from store.errors import PoolFull
from store.objects import BlockRemoved, ObjectState, PoolObject
from tests.store.samples import SMALL, digest_of

BLOCK = SMALL.nbytes
TIER_RANK, PLAIN_RANK = 1, 2
owners = st.sampled_from(["a", "b", "c"])
keys = st.integers(0, 7)


class Lives(RuleBasedStateMachine):
    """Two segments of three blocks; rank 1 has a tier.

    objects    id -> object, all that must exist; states is the model's own record of their state
    order      object ids of visible ones, least recently used first
    """

    def __init__(self):
        super().__init__()
        self.directory = Directory(SMALL, max_unsaved_share=0.7)
        self.directory.add_segment(TIER_RANK, 3 * BLOCK, 0, tier=True)
        self.directory.add_segment(PLAIN_RANK, 3 * BLOCK, 1)
        self.now = 0.0
        self.objects: dict[int, PoolObject] = {}
        self.states: dict[int, ObjectState] = {}
        self.order: list[int] = []
        self.leases: dict[str, tuple[set[int], float]] = {}
        self.unsaved: set[int] = set()
        self.in_flight: set[int] = set()  # keys handed to the tier's writer
        self.tier: set[int] = set()

    # ------------------------------------------------------------------------------- the model

    def visible(self) -> dict[int, int]:
        """key -> id."""
        return {self.objects[i].key: i for i in self.order}

    def of(self, state: ObjectState, owner: str | None = None) -> list[int]:
        found = (i for i, s in self.states.items() if s is state)
        return sorted(i for i in found if owner is None or self.objects[i].owner == owner)

    def evictable(self) -> list[int]:
        held = {i for ids, until in self.leases.values() if until > self.now for i in ids}
        return [i for i in self.order if i not in held and i not in self.unsaved]

    def expire(self) -> None:
        self.leases = {o: lease for o, lease in self.leases.items() if lease[1] > self.now}

    def forget(self, ids: list[int]) -> None:
        for i in ids:
            del self.objects[i], self.states[i]
            for leased, _ in self.leases.values():
                leased.discard(i)
        self.order = [i for i in self.order if i in self.objects]

    def note_evictions(self, rank: int | None) -> None:
        """Who went must have been allowed to, and the coldest of its segment."""
        gone = {
            e.key for e in self.directory.drain_events() if isinstance(e, BlockRemoved) and e.tier == "dram"
        }
        ids = [i for i in self.order if self.objects[i].key in gone]
        assert len(ids) == len(gone)
        allowed = self.evictable()
        for segment in (TIER_RANK, PLAIN_RANK):
            here = [i for i in allowed if self.objects[i].rank == segment]
            lost = [i for i in ids if self.objects[i].rank == segment]
            assert here[: len(lost)] == lost
            assert not lost or rank in (None, segment)
        assert set(ids) <= set(allowed)
        self.forget(ids)

    # ------------------------------------------------------------------------------- the rules

    @rule(owner=owners, key=st.none() | keys, half=st.booleans(), rank=st.sampled_from([None, 1, 2]))
    def allocate(self, owner, key, half, rank) -> None:
        self.start(owner, BLOCK // 2 if half and key is None else BLOCK, key, rank)

    def start(self, owner: str, nbytes: int, key: int | None, rank: int | None) -> None:
        self.directory.drain_events()
        free, allowed = self.directory.stats()["free_bytes"], self.evictable()
        try:
            obj = self.directory.allocate(
                owner, nbytes, now=self.now, rank=rank, key=key, digest=digest_of(key or 0)
            )
        except PoolFull:
            self.note_evictions(rank)
            reachable = [i for i in self.evictable() if rank in (None, self.objects[i].rank)]
            assert not reachable or free + BLOCK * len(allowed) < nbytes
            return
        assert obj.object_id > max(self.objects, default=0)
        self.note_evictions(rank)
        self.objects[obj.object_id] = obj
        self.states[obj.object_id] = ObjectState.WRITING

    @precondition(lambda self: self.of(ObjectState.WRITING))
    @rule(data=st.data())
    def put_end(self, data) -> None:
        self.end(data.draw(st.sampled_from(self.of(ObjectState.WRITING))))

    @rule(wanted=st.lists(keys, min_size=1, max_size=6), saved=st.booleans())
    def publish(self, wanted, saved) -> None:
        """Several puts from start to end in one step: the pool fills, so that much is evicted."""
        for key in wanted:
            if key in self.visible():
                continue
            before = set(self.objects)
            self.start("a", BLOCK, key, None)
            for object_id in set(self.objects) - before:
                self.end(object_id)
            if saved and key in self.in_flight:  # a second "saved" must do no harm
                self.report(key, "saved")

    def end(self, object_id: int) -> None:
        obj = self.objects[object_id]
        becomes_visible = obj.key is not None and obj.key not in self.visible()
        assert self.directory.put_end(object_id, [1] * SMALL.layers, self.now) == becomes_visible
        self.states[object_id] = ObjectState.VISIBLE if becomes_visible else ObjectState.PRIVATE
        if not becomes_visible:
            return
        self.order.append(object_id)
        saves = self.directory.take_saves()
        new = obj.rank == TIER_RANK and obj.key not in self.tier | self.in_flight
        assert list(saves) == ([TIER_RANK] if new and len(self.unsaved) < 2 else [])
        if saves:
            assert saves[TIER_RANK] == [obj]
            self.unsaved.add(object_id)
            self.in_flight.add(obj.key)

    @precondition(lambda self: self.of(ObjectState.WRITING) + self.of(ObjectState.PRIVATE))
    @rule(data=st.data(), alive=st.booleans())
    def put_revoke(self, data, alive) -> None:
        ids = self.of(ObjectState.WRITING) + self.of(ObjectState.PRIVATE)
        self.revoked(data.draw(st.sampled_from(ids)), alive, self.directory.put_revoke)

    def revoked(self, object_id, alive, revoke=None) -> None:
        if revoke:
            revoke(object_id, writer_may_live=alive)
        if alive and self.states[object_id] is ObjectState.WRITING:
            self.states[object_id] = ObjectState.QUARANTINED
        else:
            self.forget([object_id])

    @rule(owner=owners, alive=st.booleans())
    def revoke_owner(self, owner, alive) -> None:
        self.directory.revoke_owner(owner, self.now, writer_may_live=alive)
        self.leases.pop(owner, None)
        for object_id in self.of(ObjectState.WRITING, owner) + self.of(ObjectState.PRIVATE, owner):
            self.revoked(object_id, alive)

    @rule(owner=owners)
    def settle(self, owner) -> None:
        quarantined = self.of(ObjectState.QUARANTINED, owner)
        assert self.directory.settle(owner) == len(quarantined)
        self.forget(quarantined)

    @precondition(lambda self: self.objects)
    @rule(owner=owners, data=st.data(), seconds=st.integers(1, 5))
    def lease(self, owner, data, seconds) -> None:
        self.directory.expire(self.now)
        self.expire()
        ids = data.draw(st.sets(st.sampled_from(self.order or sorted(self.objects)), min_size=1, max_size=2))
        self.directory.lease(owner, ids, self.now, self.now + seconds)
        held, until = self.leases.get(owner, (set(), 0.0))
        self.leases[owner] = (held | ids, max(until, self.now + seconds))

    @rule(owner=owners)
    def release(self, owner) -> None:
        self.directory.release(owner, self.now)
        self.leases.pop(owner, None)
        self.forget(self.of(ObjectState.PRIVATE, owner))

    @rule(
        data=st.data(), absent=st.lists(keys, max_size=2), wrong=st.sampled_from([None, None, None, 0, 1, 2])
    )
    def lookup(self, data, absent, wrong) -> None:
        there = data.draw(st.permutations(sorted(set(self.visible()) | self.tier)))
        wanted = list(dict.fromkeys([*there[:4], *absent]))
        digests = [digest_of(key) + (i == wrong) for i, key in enumerate(wanted)]
        expected = []
        for i, key in enumerate(wanted):
            tiers = [t for t, there in (("dram", self.visible()), ("ssd", self.tier)) if key in there]
            if i == wrong or not tiers:
                break
            expected.append((key, tiers[0]))
        hits = self.directory.lookup(wanted, digests, self.now)
        assert [(hit.key, hit.tier) for hit in hits] == expected
        for hit in reversed(hits):
            if hit.tier == "dram":
                assert hit.offset == self.objects[hit.object_id].offset
                self.order.remove(hit.object_id)
                self.order.append(hit.object_id)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), outcome=st.sampled_from(["saved", "durable", "dropped", "bad_in_dram"]))
    def tier_reports(self, data, outcome) -> None:
        self.report(data.draw(st.sampled_from(sorted(self.in_flight))), outcome)

    def report(self, key: int, outcome: str) -> None:
        getattr(self.directory, outcome)(TIER_RANK, [key])
        bad = [i for i in self.unsaved if self.objects[i].key == key and outcome == "bad_in_dram"]
        self.states.update(dict.fromkeys(bad, ObjectState.UNLISTED))
        self.order = [i for i in self.order if i not in bad]
        self.unsaved = {i for i in self.unsaved if self.objects[i].key != key}
        if outcome != "saved":
            self.in_flight.discard(key)
        if outcome == "durable":
            self.tier.add(key)

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
        self.directory.check()
        for object_id, state in self.states.items():
            obj = self.directory.object(object_id)
            assert obj.state is state
            assert obj.unsaved == (object_id in self.unsaved)
        stats = self.directory.stats()
        assert stats["objects"] == len(self.objects)
        assert stats["keys_dram"] == len(self.order)
        assert stats["keys_ssd"] == len(self.tier)
        used = sum(obj.nbytes for obj in self.objects.values())
        assert stats["free_bytes"] == 6 * BLOCK - used


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
