"""The directory's promises, one sentence each. Times are seconds of a clock that only the test moves."""

from __future__ import annotations

import random

import pytest

from store.directory import Directory
from store.errors import LayoutError, PoolFull, StoreError, UnknownObject, WrongState
from store.objects import BlockRemoved, BlockStored, ObjectState, PoolObject, Wanted
from tests.store.samples import SMALL, digest_of

pytestmark = pytest.mark.quick
BLOCK = SMALL.nbytes
SUMS = [1] * SMALL.layers


def pool(blocks: int = 4, *, tier: bool = False) -> Directory:
    """One segment of `blocks` blocks on rank 3, node 0."""
    directory = Directory(SMALL)
    directory.add_segment(3, blocks * BLOCK, 0, tier=tier)
    return directory


def put(directory: Directory, key: int, now: float = 0.0, owner: str = "put") -> PoolObject:
    """Allocate and publish one block."""
    obj = directory.allocate(owner, BLOCK, now=now, key=key, digest=digest_of(key))
    directory.put_end(obj.object_id, SUMS, now)
    return obj


def keys_found(directory: Directory, keys: list[int], now: float = 0.0) -> list[int]:
    directory.check()
    return [hit.key for hit in directory.lookup(keys, [digest_of(key) for key in keys], now)]


def test_a_block_is_found_only_after_put_end() -> None:
    directory = pool()
    obj = directory.allocate("r", BLOCK, now=0, key=1, digest=digest_of(1))
    assert keys_found(directory, [1]) == []
    assert directory.put_end(obj.object_id, SUMS, 0)
    (hit,) = directory.lookup([1], [digest_of(1)], 0)
    assert hit is obj
    assert (hit.tier, hit.rank, hit.extents) == ("dram", 3, ((0, BLOCK),))
    assert list(obj.checksums) == SUMS


def test_only_the_leading_run_counts() -> None:
    directory = pool()
    for key in (1, 2, 4):
        put(directory, key)
    assert keys_found(directory, [1, 2, 3, 4]) == [1, 2]
    assert keys_found(directory, [9, 1]) == []


def test_another_digest_is_a_miss_and_is_counted() -> None:
    directory = pool()
    put(directory, 1)
    directory.add_tier_blocks(3, [2], [digest_of(2)])
    assert directory.lookup([1], [0], 0) == []
    assert directory.lookup([2], [0], 0) == []
    assert directory.counters["digest_mismatches"] == 2


def test_a_look_without_touching_changes_neither_counters_nor_the_order() -> None:
    directory = pool(2)
    put(directory, 1, 0)
    put(directory, 2, 1)
    before = directory.stats()
    assert len(directory.lookup([1, 2], [digest_of(1), 0], 2, touch=False)) == 1
    assert directory.stats() == before
    put(directory, 3, 3)
    assert keys_found(directory, [1]) == []
    assert keys_found(directory, [2]) == [2]


def test_the_least_recently_used_block_makes_room() -> None:
    directory = pool(3)
    for key in (1, 2, 3):
        put(directory, key, now=key)
    assert keys_found(directory, [1], now=5) == [1]
    put(directory, 4, now=6)
    assert [keys_found(directory, [key]) for key in (1, 2, 3, 4)] == [[1], [], [3], [4]]
    assert directory.counters["evictions"] == 1
    assert BlockRemoved(2, 3, "dram") in directory.drain_events()


def test_a_prefix_outlives_what_hangs_on_it() -> None:
    directory = pool(3)
    wanted = [Wanted(BLOCK, key, digest_of(key)) for key in (1, 2, 3)]
    made = directory.allocate_many("r", wanted, now=0)
    directory.put_end_many([obj.object_id for obj in made], [SUMS] * 3, 0)
    put(directory, 4, now=1)
    assert keys_found(directory, [1, 2, 3], now=2) == [1, 2]
    put(directory, 5, now=3)  # 4 was not used since; it goes before 1 and 2, which were just looked up
    assert keys_found(directory, [1, 2], now=4) == [1, 2]
    put(directory, 6, now=5)
    put(directory, 7, now=6)
    assert keys_found(directory, [1, 2], now=7) == [1]


def test_a_leased_block_is_evicted_only_after_its_last_reader_leaves() -> None:
    directory = pool(1)
    obj = put(directory, 1)
    directory.lease("a", [obj.object_id], 0, until=100)
    directory.lease("b", [obj.object_id], 0, until=100)
    directory.release("a", 1)
    with pytest.raises(PoolFull) as caught:
        put(directory, 2, now=2)
    assert caught.value.leased_bytes == BLOCK
    assert "leased or pinned 2048" in str(caught.value)
    directory.release("b", 3)
    put(directory, 2, now=4)
    assert keys_found(directory, [1]) == []


def test_a_lease_ends_at_its_time_and_can_be_prolonged_but_not_shortened() -> None:
    directory = pool(1)
    obj = put(directory, 1)
    directory.lease("a", [obj.object_id], 0, until=10)
    directory.lease("a", [obj.object_id], 1, until=20)
    directory.lease("a", [obj.object_id], 2, until=5)
    with pytest.raises(PoolFull):
        put(directory, 2, now=19.9)
    put(directory, 3, now=20)
    assert keys_found(directory, [3]) == [3]
    assert directory.counters["leases_expired"] == 1
    directory.release("a", 21)  # late, and harmless


def test_a_lease_taken_while_writing_protects_from_the_moment_of_publication() -> None:
    directory = pool(1)
    obj = directory.allocate("r", BLOCK, now=0, key=1, digest=digest_of(1))
    directory.lease("r", [obj.object_id], 0, until=100)
    directory.put_end(obj.object_id, SUMS, 1)
    with pytest.raises(PoolFull):
        put(directory, 2, now=2)


def test_leasing_what_has_gone_is_a_named_error_and_leases_nothing() -> None:
    directory = pool(2)
    obj = put(directory, 1)
    with pytest.raises(UnknownObject, match="object 99 is not known"):
        directory.lease("a", [obj.object_id, 99], 0, until=10)
    directory.check()
    assert directory.stats()["owners"] == 0


def test_of_two_puts_of_one_key_the_first_is_published_and_the_second_is_its_owners_alone() -> None:
    directory = pool(2)
    first = directory.allocate("a", BLOCK, now=0, key=1, digest=digest_of(1))
    second = directory.allocate("b", BLOCK, now=0, key=1, digest=digest_of(1))
    assert first.object_id != second.object_id
    assert directory.put_end(second.object_id, SUMS, 0)
    assert not directory.put_end(first.object_id, SUMS, 0)
    assert directory.object(first.object_id).state is ObjectState.PRIVATE
    assert directory.counters["puts_duplicate"] == 1
    directory.release("a", 1)
    directory.check()
    assert directory.stats()["free_bytes"] == BLOCK
    assert keys_found(directory, [1]) == [1]


def test_a_private_object_is_in_no_index_and_goes_with_its_owner() -> None:
    directory = pool()
    tail = directory.allocate("r", 300, now=0)
    assert not directory.put_end(tail.object_id, [], 0)
    assert directory.drain_events() == []
    assert directory.stats()["private_bytes"] == 512
    directory.release("r", 1)
    assert directory.stats()["free_bytes"] == 4 * BLOCK
    with pytest.raises(UnknownObject):
        directory.object(tail.object_id)


def test_allocating_many_is_all_or_nothing_and_evicts_nothing_when_the_sizes_rule_it_out() -> None:
    directory = pool(4)
    for key in (1, 2, 3):
        put(directory, key)
    directory.allocate("w", BLOCK, now=0)
    before = directory.stats()
    with pytest.raises(PoolFull) as caught:
        directory.allocate_many("r", [Wanted(BLOCK)] * 4, now=1)
    assert (caught.value.needed_bytes, caught.value.evictable_bytes) == (4 * BLOCK, 3 * BLOCK)
    assert directory.stats() == before | {"pool_full": 1}
    assert len(directory.allocate_many("r", [Wanted(BLOCK)] * 3, now=1)) == 3
    directory.check()


def test_a_pool_too_fragmented_for_the_last_of_many_gives_the_others_back() -> None:
    directory = pool(3)
    pieces = directory.allocate_many("p", [Wanted(BLOCK // 2)] * 6, now=0)
    for piece in pieces[::2]:
        directory.put_revoke(piece.object_id, now=0)
    free = directory.stats()["free_bytes"]
    with pytest.raises(PoolFull):
        directory.allocate_many("r", [Wanted(BLOCK // 2), Wanted(BLOCK)], now=1)
    directory.check()
    assert directory.stats()["free_bytes"] == free
    assert directory.stats()["owners"] == 1


def test_a_revoked_owners_memory_is_quarantined_while_a_writer_may_live() -> None:
    directory = pool(2)
    obj = directory.allocate("r", BLOCK, now=0, key=1, digest=digest_of(1))
    tail = directory.allocate("r", BLOCK, now=0)
    directory.put_end(tail.object_id, [], 0)
    directory.revoke_owner("r", 1, writer_may_live=True)
    assert directory.stats()["quarantined_bytes"] == BLOCK
    assert directory.stats()["free_bytes"] == BLOCK
    other = directory.allocate("x", BLOCK, now=2)
    assert other.offset != obj.offset
    with pytest.raises(PoolFull):
        directory.allocate("y", BLOCK, now=3)
    with pytest.raises(WrongState, match="quarantined"):
        directory.put_end(obj.object_id, SUMS, 3)
    assert directory.settle("r") == 1
    assert directory.allocate("y", BLOCK, now=4).offset == obj.offset
    directory.check()


def test_revoking_an_owner_ends_its_leases_and_spares_what_it_published() -> None:
    directory = pool(2)
    obj = put(directory, 1, owner="r")
    directory.lease("r", [obj.object_id], 0, until=100)
    directory.revoke_owner("r", 1)
    assert keys_found(directory, [1]) == [1]
    assert directory.stats()["evictable_bytes"] == BLOCK
    directory.revoke_owner("nobody", 1)


def test_a_visible_object_can_neither_be_ended_twice_nor_revoked() -> None:
    directory = pool()
    obj = put(directory, 1)
    with pytest.raises(WrongState, match="visible"):
        directory.put_end(obj.object_id, SUMS, 1)
    with pytest.raises(WrongState, match="visible"):
        directory.put_revoke(obj.object_id, now=0)


def test_sizes_that_make_no_sense_are_refused() -> None:
    directory = pool()
    with pytest.raises(LayoutError, match="a block has 2048"):
        directory.allocate("r", BLOCK - 1, now=0, key=1)
    with pytest.raises(LayoutError, match="0 B"):
        directory.allocate("r", 0, now=0)
    obj = directory.allocate("r", BLOCK, now=0, key=1)
    with pytest.raises(LayoutError, match="1 checksums"):
        directory.put_end(obj.object_id, [1], 0)
    with pytest.raises(UnknownObject, match="rank 9"):
        directory.allocate("r", BLOCK, now=0, rank=9)
    with pytest.raises(StoreError, match="already"):
        directory.add_segment(3, BLOCK, 0)
    with pytest.raises(PoolFull):
        directory.allocate("r", 5 * BLOCK, now=0)
    with pytest.raises(PoolFull):
        Directory(SMALL).allocate("r", BLOCK, now=0)


def test_the_preferred_node_is_filled_first_and_a_named_rank_alone() -> None:
    directory = Directory(SMALL)
    directory.add_segment(1, 2 * BLOCK, node=0)
    directory.add_segment(2, 2 * BLOCK, node=1)
    assert [directory.allocate("r", BLOCK, now=0, node=1).rank for _ in range(3)] == [2, 2, 1]
    assert directory.allocate("r", BLOCK, now=0, rank=1).rank == 1
    with pytest.raises(PoolFull):
        directory.allocate("r", BLOCK, now=0, rank=1)


def test_without_preference_objects_spread_and_the_coldest_block_of_all_goes_first() -> None:
    directory = Directory(SMALL)
    directory.add_segment(1, 2 * BLOCK, node=0)
    directory.add_segment(2, 2 * BLOCK, node=0)
    ranks = [put(directory, key, now=key).rank for key in range(4)]
    assert sorted(ranks) == [1, 1, 2, 2]
    keys_found(directory, [0], now=10)
    put(directory, 9, now=11)
    assert keys_found(directory, [1]) == []
    assert keys_found(directory, [0]) == [0]


def test_objects_of_one_put_lie_together_as_far_as_they_fit() -> None:
    directory = Directory(SMALL)
    for rank, blocks in ((1, 2), (2, 3), (3, 3)):
        directory.add_segment(rank, blocks * BLOCK, node=0)
    made = directory.allocate_many("r", [Wanted(BLOCK)] * 8, now=0)
    assert [obj.rank for obj in made] == [2, 2, 2, 3, 3, 3, 1, 1]


def test_a_block_is_not_evicted_before_its_tier_has_it() -> None:
    directory = pool(2, tier=True)
    obj = put(directory, 1)
    assert directory.take_saves() == {3: [obj]}
    assert directory.take_saves() == {}
    directory.allocate("w", BLOCK, now=0)
    with pytest.raises(PoolFull) as caught:
        put(directory, 2)
    assert caught.value.unsaved_bytes == BLOCK
    directory.saved(3, [1])
    put(directory, 2)
    assert keys_found(directory, [1]) == []  # written but not durable: nowhere to be found for a moment
    directory.durable(3, [1])
    (hit,) = directory.lookup([1], [digest_of(1)], 0)
    assert hit == (1, "ssd", None, 3, 0, BLOCK)


def test_what_its_tier_dropped_may_go_and_is_counted() -> None:
    directory = pool(2, tier=True)  # of a pool of one block nothing may be unsaved
    put(directory, 1)
    directory.take_saves()
    directory.allocate("w", BLOCK, now=0)
    with pytest.raises(PoolFull):
        put(directory, 2)
    directory.dropped(3, [1])
    put(directory, 2)
    assert keys_found(directory, [1]) == []
    assert directory.counters["saves_dropped"] == 1
    directory.durable(3, [1])  # too late: it was given up
    assert keys_found(directory, [1]) == []


def test_a_block_found_bad_in_dram_is_a_miss_and_is_freed_at_once_when_nobody_reads_it() -> None:
    directory = pool(2, tier=True)
    put(directory, 1)
    directory.take_saves()
    directory.drain_events()
    directory.bad_in_dram(3, [1, 77])
    directory.check()
    assert keys_found(directory, [1]) == []
    assert directory.stats()["objects"] == 0
    assert directory.stats()["saving"] == 0
    assert directory.counters["dram_bad_blocks"] == 1
    assert directory.drain_events() == [BlockRemoved(1, 3, "dram")]
    put(directory, 1)
    assert keys_found(directory, [1]) == [1]


def test_a_bad_block_that_is_being_read_keeps_its_range_until_its_last_reader_leaves() -> None:
    directory = pool(2, tier=True)
    obj = put(directory, 1)
    directory.take_saves()
    directory.allocate("writer", BLOCK, now=0)
    directory.lease("r1", [obj.object_id], 0, 100)
    directory.lease("r2", [obj.object_id], 0, 5)
    directory.bad_in_dram(3, [1])
    directory.check()
    assert obj.state is ObjectState.UNLISTED
    assert keys_found(directory, [1]) == []
    with pytest.raises(PoolFull) as caught:
        put(directory, 2)
    assert caught.value.leased_bytes == BLOCK
    directory.release("r1", 1)
    assert directory.stats()["objects"] == 2
    assert directory.expire(5) == 1
    directory.check()
    assert directory.stats()["objects"] == 1
    put(directory, 2)


def test_a_bad_block_goes_with_its_rank_and_its_reader_is_named() -> None:
    directory = pool(2, tier=True)
    obj = put(directory, 1)
    directory.take_saves()
    directory.lease("reader", [obj.object_id], 0, 100)
    directory.bad_in_dram(3, [1])
    assert directory.remove_segment(3) == ["reader"]
    directory.check()


def test_no_more_than_half_a_segment_waits_for_its_tier() -> None:
    directory = pool(4, tier=True)
    for key in range(4):
        put(directory, key)
    assert [obj.key for obj in directory.take_saves()[3]] == [0, 1]
    assert directory.counters["saves_skipped"] == 2
    assert directory.stats()["evictable_bytes"] == 2 * BLOCK


def test_a_block_promoted_from_its_tier_is_not_saved_again() -> None:
    directory = pool(2)
    directory.add_tier_blocks(3, [1], [digest_of(1)])
    assert directory.lookup([1], [digest_of(1)], 0)[0].tier == "ssd"
    put(directory, 1)
    assert directory.take_saves() == {}
    assert directory.lookup([1], [digest_of(1)], 0)[0].tier == "dram"
    assert (directory.counters["hits_ssd"], directory.counters["hits_dram"]) == (1, 1)
    put(directory, 2)
    assert [obj.key for obj in directory.take_saves()[3]] == [2]


def test_a_bad_or_evicted_tier_block_is_a_miss_and_each_is_counted() -> None:
    directory = pool()
    directory.add_tier_blocks(3, [1, 2], [digest_of(1), digest_of(2)])
    directory.drop_tier_block(3, [1, 77])
    directory.tier_evicted(3, [2, 77])
    assert keys_found(directory, [1]) == keys_found(directory, [2]) == []
    assert (directory.counters["tier_bad_blocks"], directory.counters["tier_evictions"]) == (1, 1)
    assert directory.stats()["keys_ssd"] == 0


def test_a_key_in_two_tiers_survives_the_loss_of_one() -> None:
    directory = pool()
    directory.add_segment(4, BLOCK, 0)
    for rank in (3, 4):
        directory.add_tier_blocks(rank, [1], [digest_of(1)])
    directory.tier_evicted(3, [1])
    assert directory.lookup([1], [digest_of(1)], 0)[0].rank == 4


def test_a_lost_rank_takes_its_blocks_and_names_the_owners_that_are_hurt() -> None:
    directory = Directory(SMALL)
    directory.add_segment(1, 4 * BLOCK, 0, tier=True)
    directory.add_segment(2, 4 * BLOCK, 0)
    obj = directory.allocate("put", BLOCK, now=0, rank=1, key=1, digest=digest_of(1))
    directory.put_end(obj.object_id, SUMS, 0)
    directory.lease("reader", [obj.object_id], 0, until=9)
    directory.allocate("writer", BLOCK, now=0, rank=1)
    directory.allocate("other", BLOCK, now=0, rank=2)
    directory.add_tier_blocks(1, [5], [digest_of(5)])
    directory.drain_events()
    assert directory.remove_segment(1) == ["reader", "writer"]
    assert set(directory.drain_events()) == {BlockRemoved(1, 1, "dram"), BlockRemoved(5, 1, "ssd")}
    assert keys_found(directory, [1]) == keys_found(directory, [5]) == []
    assert directory.take_saves() == {}
    assert directory.allocate("writer", BLOCK, now=1).rank == 2


def test_an_index_fed_by_the_events_equals_the_directory() -> None:
    directory, random_ = pool(4, tier=True), random.Random(5)
    index: set[tuple[int, int, str]] = set()
    for now in range(300):
        key = random_.randrange(8)
        if not keys_found(directory, [key], now):
            put(directory, key, now)
        saves = [obj.key for objects in directory.take_saves().values() for obj in objects]
        directory.durable(3, saves[: random_.randrange(2)])
        directory.dropped(3, saves[1:])
        directory.tier_evicted(3, [random_.randrange(8)])
        for event in directory.drain_events():
            place = event.key, event.rank, event.tier
            if isinstance(event, BlockStored):
                assert place not in index
                index.add(place)
            else:
                index.remove(place)
        for key in range(8):
            hits = directory.lookup([key], [digest_of(key)], now, touch=False)
            tiers = {tier for stored, _, tier in index if stored == key}
            assert (hits[0].tier if hits else None) == (
                "dram" if "dram" in tiers else next(iter(tiers), None)
            )


def lending() -> Directory:
    """Rank 3 has a tier and two blocks, rank 1 on another node lends four."""
    directory = Directory(SMALL)
    directory.add_segment(1, 4 * BLOCK, 1, saver=3)
    directory.add_segment(3, 2 * BLOCK, 0, tier=True)
    return directory


def test_what_lies_in_lent_dram_is_saved_by_another_rank_and_not_evicted_before() -> None:
    directory = lending()
    lent, own = put_on(directory, 1, key=1), put_on(directory, 3, key=2)
    assert directory.take_saves() == {3: [lent, own]}
    assert (lent.unsaved, own.unsaved) == (True, True)
    directory.saved(3, [1])
    directory.check()
    assert (lent.evictable, own.evictable) == (True, False)
    directory.durable(3, [1, 2])
    directory.remove_segment(1)
    directory.check()
    assert directory.lookup([1], [digest_of(1)], 0)[0][1:4] == ("ssd", None, 3)


def test_a_lent_block_that_went_bad_before_it_was_saved_is_a_miss() -> None:
    directory = lending()
    put_on(directory, 1, key=1)
    directory.take_saves()
    directory.bad_in_dram(3, [1])
    assert keys_found(directory, [1]) == []


def test_a_block_that_any_tier_has_is_not_saved_a_second_time() -> None:
    directory = lending()
    directory.add_segment(4, 2 * BLOCK, 0, tier=True)
    directory.add_tier_blocks(4, [1], [digest_of(1)])
    put_on(directory, 1, key=1)
    assert directory.take_saves() == {}


def test_when_the_rank_that_saves_is_lost_lent_blocks_stay_in_dram_and_may_be_evicted() -> None:
    directory = lending()
    lent = put_on(directory, 1, key=1)
    put_on(directory, 3, key=2)
    directory.remove_segment(3)
    assert directory.take_saves() == {}
    assert keys_found(directory, [1]) == [1]
    assert lent.evictable
    put_on(directory, 1, key=3)
    assert directory.take_saves() == {}


def test_a_lent_block_lost_before_anybody_was_told_to_save_it_is_saved_when_it_is_put_again() -> None:
    directory = lending()
    put_on(directory, 1, key=1)
    directory.remove_segment(1)
    assert directory.stats()["saving"] == 0
    again = put_on(directory, 3, key=1)
    assert directory.take_saves() == {3: [again]}
    directory.check()


def test_one_segment_may_be_preferred_to_all_others_and_others_serve_when_it_is_full() -> None:
    directory = lending()
    wanted = [Wanted(BLOCK)] * 3
    places = directory.allocate_many("r", wanted, now=0, node=1, first=3)
    assert [place.rank for place in places] == [3, 3, 1]


def put_on(directory: Directory, rank: int, key: int) -> PoolObject:
    obj = directory.allocate("put", BLOCK, now=0, rank=rank, key=key, digest=digest_of(key))
    directory.put_end(obj.object_id, SUMS, 0)
    return obj


def test_after_the_last_segment_of_a_node_is_gone_its_readers_get_space_elsewhere() -> None:
    directory = Directory(SMALL)
    directory.add_segment(1, SMALL.nbytes, 0)
    directory.add_segment(2, SMALL.nbytes, 1)
    directory.add_segment(3, SMALL.nbytes, 1)
    directory.remove_segment(1)
    assert not directory.has_segment(1)
    place = directory.allocate("a", SMALL.nbytes, now=0.0, node=0)
    assert place.rank in (2, 3)
    assert directory.has(place.object_id)
    directory.remove_segment(place.rank)
    assert not directory.has(place.object_id)
    directory.check()


def test_another_tier_saves_what_a_segment_gets_after_its_saver_is_lost() -> None:
    directory = Directory(SMALL)
    directory.add_segment(1, 4 * SMALL.nbytes, 0, saver=8)
    for tier in (8, 9):
        directory.add_segment(tier, 0, 0, tier=True)
    directory.remove_segment(8)
    directory.set_saver(1, 9)
    obj = directory.allocate("a", SMALL.nbytes, now=0.0, rank=1, key=5, digest=5)
    directory.put_end(obj.object_id, [1] * SMALL.layers, 0.0)
    assert {rank: [one.key for one in saves] for rank, saves in directory.take_saves().items()} == {9: [5]}
    directory.check()
