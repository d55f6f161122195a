"""What the directory promises beyond KV blocks: extents, copies, pins, removal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.directory import Directory
from store.errors import CopyExists, LayoutError, ObjectInUse, PoolFull, StoreError, UnknownObject, WrongState
from store.objects import BlockRemoved, BlockStored, ObjectState, PoolObject, Wanted, pieces
from tests.store.samples import SMALL

pytestmark = pytest.mark.quick
KIB = 1024


def pool(*segments: int, **settings_) -> Directory:
    """General objects; one segment of so many KiB on each of ranks 1, 2, ...; two ranks to a node."""
    directory = Directory(None, **settings_)
    for rank, size in enumerate(segments, 1):
        directory.add_segment(rank, size * KIB, (rank - 1) // 2)
    return directory


def put(directory: Directory, key: int, kib: int = 1, now: float = 0.0, rank=None, **wanted) -> PoolObject:
    wish = Wanted(kib * KIB, key, **wanted)
    (obj,) = directory.allocate_many("put", [wish], now=now, rank=rank, contiguous=False)
    assert directory.put_end(obj.object_id, [key], now)
    return obj


def copied(directory: Directory, key: int, rank: int, now: float = 0.0) -> PoolObject:
    """A copy of a key on this rank, visible."""
    _, copy = directory.replicate("copier", key, 0, rank=rank, now=now, until=now + 100)
    assert directory.put_end(copy.object_id, [key], now)
    directory.release("copier", now)
    return copy


def there(directory: Directory, *keys: int, now: float = 0.0) -> list[int]:
    """Which of these keys can be read; nothing is leased."""
    directory.check()
    return [key for key in keys if directory.locations(key, 0)]


# ----------------------------------------------------------------------------------- extents


def holey() -> Directory:
    """A segment of 8 KiB in which every other KiB is used by keys 1, 3, 5, 7, pinned."""
    directory = pool(8)
    for key in range(8):
        put(directory, key, hard_pin=True)
    for key in range(0, 8, 2):
        directory.remove(key, 0, 0)
    return directory


def test_an_object_that_no_hole_holds_is_found_in_pieces_and_frees_all_of_them() -> None:
    directory = holey()
    obj = put(directory, 9, 3)
    assert len(obj.extents) == 3
    assert sum(nbytes for _, nbytes in obj.extents) == 3 * KIB
    assert obj.offset == obj.extents[0][0]
    assert directory.locations(9, 0) == [obj]
    directory.remove(9, 0, 0, force=True)
    directory.check()
    assert directory.stats()["free_bytes"] == 4 * KIB


def test_a_contiguous_wish_is_refused_where_pieces_would_do() -> None:
    directory = holey()
    with pytest.raises(PoolFull) as caught:
        directory.allocate_many("r", [Wanted(2 * KIB)], now=0)
    assert caught.value.free_bytes == 4 * KIB
    (obj,) = directory.allocate_many("r", [Wanted(4 * KIB)], now=0, contiguous=False)
    assert len(obj.extents) == 4
    directory.put_revoke(obj.object_id, now=0, writer_may_live=True)
    assert directory.settle("r") == 1
    directory.check()
    assert directory.stats()["free_bytes"] == 4 * KIB


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 40), st.integers(0, 40))
def test_a_part_of_an_object_lies_where_its_bytes_lie(lengths, start, nbytes) -> None:
    extents = [(100 * i, length) for i, length in enumerate(lengths)]
    places = [offset + i for offset, length in extents for i in range(length)]
    if start + nbytes > len(places):
        with pytest.raises(LayoutError, match=f"of an object of {len(places)} B"):
            pieces(extents, start, nbytes)
        return
    found = pieces(extents, start, nbytes)
    assert [offset + i for offset, length in found for i in range(length)] == places[start : start + nbytes]
    assert all(length for _, length in found)


# ------------------------------------------------------------------------------------ copies


def test_a_copy_is_found_only_after_its_put_end_and_by_whom_it_is_nearest_to() -> None:
    directory = pool(8, 8, 8, 8)
    first = put(directory, 7, rank=1)
    source, copy = directory.replicate("copier", 7, 0, rank=3, now=0, until=10)
    assert source is first
    assert directory.locations(7, 0) == [first]
    directory.drain_events()
    assert directory.put_end(copy.object_id, [7], 0)
    assert directory.drain_events() == [BlockStored(7, 3, "dram")]
    near = {
        (rank, node): directory.lookup([7], [0], 0, rank=rank, node=node)[0].rank
        for rank, node in [(None, None), (1, 0), (3, 0), (4, 1), (2, 0), (None, 1), (9, 9)]
    }
    assert near == {(None, None): 1, (1, 0): 1, (3, 0): 3, (4, 1): 3, (2, 0): 1, (None, 1): 3, (9, 9): 1}
    assert directory.lookup([7], [0], 0, node=1) == [copy]


def test_copies_lie_on_distinct_segments_as_many_as_there_are() -> None:
    directory = pool(8, 8, 8)
    first = directory.allocate("w", KIB, now=0, key=7)
    ranks = {first.rank}
    for _ in range(2):
        ranks.add(directory.put_copy(first.object_id, now=0).rank)
    assert ranks == {1, 2, 3}
    with pytest.raises(PoolFull):
        directory.put_copy(first.object_id, now=0)
    with pytest.raises(CopyExists, match="rank 2 has a copy"):
        directory.put_copy(first.object_id, now=0, rank=2)
    directory.check()


def test_a_copy_may_be_ready_before_what_it_is_a_copy_of() -> None:
    directory = pool(8, 8)
    first = directory.allocate("w", KIB, now=0, key=7)
    copy = directory.put_copy(first.object_id, now=0)
    assert directory.put_end(copy.object_id, [7], 0)
    assert directory.locations(7, 0) == [copy]
    assert directory.put_end(first.object_id, [7], 0)
    assert directory.locations(7, 0) == [first, copy]
    directory.check()


def test_what_was_put_twice_is_no_copy() -> None:
    """Two requests put one key, and one of them a copy: the copy belongs to what is not published."""
    directory = pool(8, 8)
    first, second = (directory.allocate("w", KIB, now=0, key=7, rank=1) for _ in range(2))
    copy = directory.put_copy(second.object_id, now=0)
    assert directory.put_end(first.object_id, [7], 0)
    assert not directory.put_end(second.object_id, [7], 0)
    directory.check()
    assert not directory.put_end(copy.object_id, [7], 0)
    assert directory.locations(7, 0) == [first]
    assert directory.counters["puts_duplicate"] == 2
    directory.release("w", 1)
    directory.check()


def test_a_copy_with_other_checksums_is_freed_and_counted() -> None:
    directory = pool(8, 8)
    first = put(directory, 7, rank=1)
    _, copy = directory.replicate("copier", 7, 0, rank=2, now=0, until=10)
    assert not directory.put_end(copy.object_id, [8], 0)
    assert directory.locations(7, 0) == [first]
    assert directory.counters["copies_bad"] == 1
    assert directory.stats()["visible_bytes"] == KIB
    directory.check()


@pytest.mark.parametrize("sums", [[1, 2], [1, 3]])
def test_a_copy_of_what_is_found_bad_meanwhile_is_held_against_its_checksums(
    sums: list[int],
) -> None:
    directory = Directory(SMALL)
    directory.add_segment(1, 4 * SMALL.nbytes, 0, tier=True)
    directory.add_segment(2, 4 * SMALL.nbytes, 0)
    first = directory.allocate("w", SMALL.nbytes, now=0, key=7, rank=1)
    directory.put_end(first.object_id, [1, 2], 0)
    directory.take_saves()
    _, copy = directory.replicate("copier", 7, 0, rank=2, now=0, until=10)
    directory.bad_in_dram(1, [7])
    assert there(directory, 7) == []
    good = sums == [1, 2]
    assert directory.put_end(copy.object_id, sums, 1) == good
    assert there(directory, 7) == ([7] if good else [])
    assert directory.counters["copies_bad"] == (not good)
    directory.release("copier", 1)
    directory.check()


def test_the_source_of_a_copy_is_leased_while_it_is_written() -> None:
    directory = pool(1, 8)
    put(directory, 7, rank=1)
    _, copy = directory.replicate("copier", 7, 0, rank=2, now=0, until=10)
    with pytest.raises(PoolFull):
        put(directory, 8, now=1, rank=1)
    directory.put_end(copy.object_id, [7], 2)
    directory.release("copier", 2)
    put(directory, 8, now=3, rank=1)
    assert directory.locations(7, 0) == [copy]
    directory.check()


def test_only_what_can_be_found_by_its_key_can_be_copied() -> None:
    directory = pool(8, 8)
    tail = directory.allocate("r", KIB, now=0)
    with pytest.raises(WrongState):
        directory.put_copy(tail.object_id, now=0)
    with pytest.raises(UnknownObject, match="key 5 is not known"):
        directory.replicate("r", 5, 0, rank=2, now=0, until=1)
    put(directory, 7)
    with pytest.raises(UnknownObject, match="rank 9"):
        directory.replicate("r", 7, 0, rank=9, now=0, until=1)
    with pytest.raises(UnknownObject):
        directory.replicate("r", 7, 1, rank=2, now=0, until=1)  # another digest
    assert directory.counters["digest_mismatches"] == 1


def test_a_copy_evicts_no_block_that_was_used_lately() -> None:
    directory = pool(8, 1)
    put(directory, 7, rank=1)
    put(directory, 8, now=10, rank=2)
    with pytest.raises(PoolFull):
        directory.replicate("copier", 7, 0, rank=2, now=15, until=20, idle_s=10)
    assert there(directory, 8) == [8]
    directory.replicate("copier", 7, 0, rank=2, now=21, until=30, idle_s=10)
    assert there(directory, 8) == []


def test_a_cold_copy_goes_before_older_blocks_and_the_last_copy_as_its_turn_comes() -> None:
    directory = pool(3, 8, copy_cold_s=60)
    for key in (1, 2, 7):
        put(directory, key, now=key, rank=1)
    copied(directory, 7, rank=2, now=10)
    directory.lookup([7], [0], 50, rank=2)
    put(directory, 8, now=60, rank=1)
    assert there(directory, 1, 2, 7, 8) == [2, 7, 8], "not yet cold: the least recently used went"
    put(directory, 9, now=71, rank=1)
    assert there(directory, 2, 7, 8, 9) == [2, 7, 8, 9], "the copy on rank 1, unused for 61 s, went"
    assert [obj.rank for obj in directory.locations(7, 0)] == [2]
    assert directory.counters["copies_evicted"] == 1
    put(directory, 10, now=200, rank=1)
    assert there(directory, 2, 7) == [7]


def test_a_key_survives_the_segment_of_its_first_copy() -> None:
    directory = pool(8, 8)
    put(directory, 7, rank=1)
    copy = copied(directory, 7, rank=2)
    directory.drain_events()
    assert directory.remove_segment(1) == []
    assert directory.drain_events() == [BlockRemoved(7, 1, "dram")]
    assert directory.locations(7, 0) == [copy]
    directory.check()
    directory.add_segment(3, KIB, 0)
    assert copied(directory, 7, rank=3).copies == [copy, directory.locations(7, 0)[1]]


def test_a_copy_is_not_written_to_a_second_tier() -> None:
    directory = Directory(SMALL)
    for rank in (1, 2):
        directory.add_segment(rank, 4 * SMALL.nbytes, 0, tier=True)
    first = directory.allocate("w", SMALL.nbytes, now=0, key=7, rank=1)
    directory.put_end(first.object_id, [1, 2], 0)
    _, copy = directory.replicate("w", 7, 0, rank=2, now=0, until=9)
    directory.put_end(copy.object_id, [1, 2], 0)
    assert directory.take_saves() == {1: [first]}
    directory.saved(2, [7])
    assert first.unsaved
    directory.saved(1, [7])
    assert not first.unsaved
    directory.check()


# ---------------------------------------------------------------------------- pins and eviction


def test_soft_pinned_objects_go_last_and_hard_pinned_ones_never() -> None:
    directory = pool(4)
    put(directory, 1, now=1, soft_until=1e9)
    put(directory, 2, now=2, hard_pin=True)
    put(directory, 3, now=3)
    put(directory, 4, now=4)
    put(directory, 5, 2, now=5)
    assert there(directory, 1, 2, 3, 4, 5) == [1, 2, 5]
    put(directory, 6, 3, now=6)
    assert there(directory, 1, 2, 5, 6) == [2, 6]
    with pytest.raises(PoolFull, match="leased or pinned 1024"):
        put(directory, 7, 4, now=7)
    assert directory.stats()["objects"] == 2


def test_a_soft_pin_ends_at_its_time_and_both_pins_can_be_changed() -> None:
    directory = pool(2)
    put(directory, 1, now=1, soft_until=5)
    put(directory, 2, now=2)
    put(directory, 3, now=3)
    assert there(directory, 1, 2, 3) == [1, 3]
    put(directory, 4, now=6)
    assert there(directory, 1, 3, 4) == [3, 4], "its pin has ended"
    directory.pin(3, 0, hard=True)
    directory.pin(4, 0, soft_until=100)
    put(directory, 5, now=7)
    assert there(directory, 3, 4, 5) == [3, 5]
    directory.pin(3, 0, hard=False)
    put(directory, 6, 2, now=8)
    assert there(directory, 3, 5, 6) == [6]
    with pytest.raises(UnknownObject):
        directory.pin(3, 0, hard=True)


def test_among_segments_one_that_has_more_than_soft_pinned_objects_gives() -> None:
    directory = pool(1, 1)
    put(directory, 1, now=1, soft_until=1e9)
    put(directory, 2, now=2)
    put(directory, 3, now=3)
    assert there(directory, 1, 2, 3) == [1, 3]


def test_a_pin_holds_for_all_copies_also_for_one_that_is_made_later() -> None:
    directory = pool(1, 1)
    put(directory, 1, rank=1)
    directory.pin(1, 0, hard=True)
    copied(directory, 1, rank=2)
    with pytest.raises(PoolFull):
        put(directory, 2, now=1000)
    directory.pin(1, 0, hard=False)
    put(directory, 2, now=1000)
    assert there(directory, 1, 2) == [1, 2]


# ------------------------------------------------------------------------------------ removal


def test_removal_waits_for_leases_unless_it_is_forced() -> None:
    directory = pool(8, 8)
    first = put(directory, 1, rank=1)
    copied(directory, 1, rank=2)
    directory.lease("reader", [first.object_id], 0, until=10)
    with pytest.raises(ObjectInUse):
        directory.remove(1, 0, 5)
    assert len(directory.locations(1, 0)) == 2, "all stay"
    assert directory.remove(1, 0, 5, rank=2) == 1
    assert directory.remove(1, 0, 5, force=True) == 1
    assert directory.counters["removals"] == 2
    assert directory.stats()["owners"] == 0
    with pytest.raises(UnknownObject, match="key 1 is not known"):
        directory.remove(1, 0, 5)


def test_removing_a_copy_where_there_is_none_is_a_named_error() -> None:
    directory = pool(8, 8)
    put(directory, 1, rank=1)
    with pytest.raises(UnknownObject, match="copy of object 0000000000000001 on rank 2 is not known"):
        directory.remove(1, 0, 0, rank=2)
    assert there(directory, 1) == [1]


def test_a_copy_under_way_does_not_bring_a_removed_key_back() -> None:
    directory = pool(8, 8)
    put(directory, 1, rank=1)
    _, copy = directory.replicate("copier", 1, 0, rank=2, now=0, until=10)
    assert directory.remove(1, 0, 1, force=True) == 1
    again = put(directory, 1, now=2, rank=1)  # another value, perhaps
    assert not directory.put_end(copy.object_id, [1], 3)
    assert directory.locations(1, 0) == [again]
    assert copy.state is ObjectState.PRIVATE
    directory.release("copier", 4)
    directory.check()
    assert directory.stats()["objects"] == 1


def test_a_block_that_its_tier_still_writes_is_not_removed_even_by_force() -> None:
    directory = Directory(SMALL)
    directory.add_segment(1, 4 * SMALL.nbytes, 0, tier=True)
    obj = directory.allocate("w", SMALL.nbytes, now=0, key=7)
    directory.put_end(obj.object_id, [1, 2], 0)
    with pytest.raises(ObjectInUse, match="not yet on SSD"):
        directory.remove(7, 0, 0, force=True)
    directory.durable(1, [7])
    assert directory.remove(7, 0, 0) == 1
    assert directory.lookup([7], [0], 0)[0].tier == "ssd"


def test_a_pool_without_a_block_layout_has_objects_of_any_size_and_no_tier() -> None:
    directory = pool(8)
    assert put(directory, 1, 3).nbytes == 3 * KIB
    with pytest.raises(StoreError, match="no layout"):
        directory.add_segment(9, KIB, 0, tier=True)
    assert there(directory, 1) == [1]


def tiered() -> Directory:
    """Blocks of SMALL: 1 in DRAM and durable, 2 in a tier alone, 3 on its way there, 4 not yet saved."""
    directory = Directory(SMALL)
    directory.add_segment(1, 8 * SMALL.nbytes, 0, tier=True)
    for key in (1, 3, 4):
        obj = directory.allocate("w", SMALL.nbytes, now=0, key=key)
        directory.put_end(obj.object_id, [1, 2], 0)
    directory.take_saves()
    directory.durable(1, [1])
    directory.saved(1, [3])
    directory.add_tier_blocks(1, [2], [0])
    directory.drain_events()
    return directory


def test_a_key_that_is_removed_everywhere_is_found_nowhere_and_everybody_hears_it() -> None:
    directory = tiered()
    directory.remove_everywhere([1, 2, 3], 0)
    directory.check()
    assert directory.places() == {(4, 1, "dram")}
    gone = [(1, "dram"), (3, "dram"), (1, "ssd"), (2, "ssd")]
    removed = {BlockRemoved(key, 1, tier) for key, tier in gone}
    events = directory.drain_events()
    assert len(events) == len(removed)
    assert set(events) == removed
    directory.durable(1, [3])  # sealed before the tier heard of it
    assert directory.lookup([3], [0], 0) == []
    assert (directory.counters["removals"], directory.counters["tier_removals"]) == (2, 3)


def test_all_are_removed_or_none() -> None:
    directory = tiered()
    directory.allocate("w", SMALL.nbytes, now=0, key=5)
    before = directory.places()
    for keys, error, why in (
        ([1, 9], UnknownObject, "key 9"),
        ([1, 4], ObjectInUse, "0000000000000004 on rank 1 is not yet on SSD"),
        ([1, 5], ObjectInUse, "0000000000000005 on rank 1 is being written"),
    ):
        for force in (False, True):
            with pytest.raises(error, match=why):
                directory.remove_everywhere(keys, 0, force=force)
    assert directory.places() == before
    assert directory.removable(0) == ([1, 2, 3], 2)


def test_what_is_removed_by_force_is_read_to_the_end_by_those_who_do() -> None:
    directory = tiered()
    (obj,) = (obj for obj in directory.visible_objects() if obj.key == 1)
    directory.lease("reader", [obj.object_id], 0, until=10)
    with pytest.raises(ObjectInUse, match="is leased"):
        directory.remove_everywhere([1], 0)
    directory.remove_everywhere([1], 0, force=True)
    directory.check()
    assert directory.lookup([1], [0], 0) == []
    assert (obj.state, directory.object(obj.object_id)) == (ObjectState.UNLISTED, obj)
    directory.release("reader", 1)
    with pytest.raises(UnknownObject):
        directory.object(obj.object_id)
    directory.check()
