"""A directory that takes over blocks of an earlier one: readers compare them, and nothing overlaps."""

from __future__ import annotations

from array import array

import pytest

from store.directory import Directory
from store.layout import BlockLayout, check_of
from store.objects import BlockRef, HeldBlock, Wanted

pytestmark = pytest.mark.quick

LAYOUT = BlockLayout(2, 1, 16, 8, 4)
LATE_S = 120.0


def held(place: int, key: int, *, rank: int = 1, sums: tuple[int, int] = (1, 2)) -> tuple[HeldBlock, Wanted]:
    ref = BlockRef(99, rank, place * LAYOUT.nbytes, LAYOUT.nbytes)
    block = HeldBlock(ref, key, key * 3, array("Q", sums).tobytes(), None, 0, 0)
    return block, Wanted(LAYOUT.nbytes, key, key * 3)


@pytest.fixture
def directory() -> Directory:
    directory = Directory(LAYOUT)
    directory.add_segment(1, 10 * LAYOUT.nbytes, 0)
    return directory


def test_adopted_blocks_are_found_where_they_were_and_the_rest_is_free(directory: Directory) -> None:
    assert directory.adopt([held(7, 1), held(2, 2)], 0.0, LATE_S) == 2
    directory.check()
    assert [obj.offset // LAYOUT.nbytes for obj in directory.lookup([1, 2], [3, 6], 0.0)] == [7, 2]
    free = directory.allocate_many("a", [Wanted(LAYOUT.nbytes)] * 8, now=0.0)
    assert sorted(obj.offset // LAYOUT.nbytes for obj in free) == [0, 1, 3, 4, 5, 6, 8, 9]
    directory.check()


def test_a_place_a_key_or_a_segment_is_adopted_once_and_only_where_it_is_there(directory: Directory) -> None:
    blocks = [held(3, 1), held(3, 2), held(4, 1), held(10, 4), held(0, 5, rank=2)]
    assert directory.adopt(blocks, 0.0, LATE_S) == 1
    assert directory.places() == {(1, 1, "dram")}
    assert len(directory.allocate_many("a", [Wanted(LAYOUT.nbytes)] * 10, now=0.0)) == 10, "none is lost"
    directory.check()


def test_readers_compare_adopted_blocks_always_and_others_while_late_bytes_may_land(
    directory: Directory,
) -> None:
    assert not directory.has_doubts
    directory.adopt([held(0, 1)], 0.0, LATE_S)
    (adopted,) = directory.visible_objects()
    early = directory.allocate("a", LAYOUT.nbytes, now=1.0, key=2, digest=6)
    directory.put_end(early.object_id, [5, 6], 1.0)
    assert directory.check_of(early.object_id, 1.0) == check_of([5, 6])
    assert directory.check_of(early.object_id, LATE_S + 1.0) == check_of([5, 6]), "it was written meanwhile"
    late = directory.allocate("a", LAYOUT.nbytes, now=LATE_S + 2.0, key=3, digest=9)
    directory.put_end(late.object_id, [7, 8], LATE_S + 2.0)
    assert directory.check_of(late.object_id, LATE_S + 2.0) == 0
    assert directory.check_of(late.object_id, LATE_S + 2.0, always=True) == check_of([7, 8])
    assert directory.check_of(adopted.object_id, LATE_S + 2.0) == check_of([1, 2])


def test_a_bad_block_is_a_miss_and_is_freed_when_its_last_reader_has_ended(directory: Directory) -> None:
    directory.adopt([held(0, 1)], 0.0, LATE_S)
    (obj,) = directory.visible_objects()
    directory.lease("reader", [obj.object_id], 0.0, 9.0)
    directory.bad([obj.object_id, 12345])
    assert directory.lookup([1], [3], 0.0) == []
    assert directory.has(obj.object_id)
    directory.release("reader", 1.0)
    assert not directory.has(obj.object_id)
    directory.check()
    assert directory.counters["dram_bad_blocks"] == 1
