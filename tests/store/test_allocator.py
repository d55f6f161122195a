"""The range allocator: never two owners of a byte, never a byte lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.allocator import RangeAllocator
from store.errors import StoreError, UnknownObject

pytestmark = pytest.mark.quick


def largest_hole(held: dict[int, int], capacity: int) -> int:
    """Bytes between neighbouring ranges {offset: size}, the largest."""
    end, largest = 0, 0
    for offset, size in sorted((held | {capacity: 0}).items()):
        largest, end = max(largest, offset - end), offset + size
    return largest


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=60))
def test_any_sequence_keeps_ranges_apart_and_loses_nothing(steps) -> None:
    allocator = RangeAllocator(4096)
    held: dict[int, int] = {}
    for is_free, number in steps:
        if is_free and held:
            offset = sorted(held)[number % len(held)]
            assert allocator.free(offset) == held.pop(offset)
        else:
            fits = largest_hole(held, 4096) >= allocator.padded(number)
            offset = allocator.allocate(number)
            assert (offset is not None) == fits
            if offset is not None:
                assert offset % 64 == 0
                held[offset] = allocator.padded(number)
        allocator.check()
        assert allocator.used_bytes == sum(held.values())
    for offset in list(held):
        allocator.free(offset)
    allocator.check()
    assert allocator.free_bytes == 4096
    assert allocator.allocate(4096) == 0, "the holes have become one again"


def test_it_refuses_only_when_no_hole_is_large_enough() -> None:
    allocator = RangeAllocator(640)
    offsets = [allocator.allocate(64) for _ in range(10)]
    assert allocator.allocate(1) is None
    for offset in offsets[::2]:
        allocator.free(offset)
    assert allocator.free_bytes == 320
    assert allocator.allocate(65) is None
    assert allocator.allocate(64) == 0


def test_the_smallest_hole_that_fits_is_taken() -> None:
    allocator = RangeAllocator(1024)
    large, fence, small, _ = (allocator.allocate(n) for n in (256, 64, 128, 64))
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(128) == small
    assert allocator.allocate(128) == large
    assert fence == 256


def test_blocks_of_one_size_never_fragment_the_segment() -> None:
    allocator, random_ = RangeAllocator(100 * 192), random.Random(3)
    held = [allocator.allocate(192) for _ in range(100)]
    for _ in range(500):
        allocator.free(held.pop(random_.randrange(len(held))))
        held.append(allocator.allocate(192))
        assert held[-1] is not None
    allocator.check()


def test_freeing_what_is_not_allocated_is_a_named_error() -> None:
    allocator = RangeAllocator(256)
    offset = allocator.allocate(10)
    allocator.free(offset)
    with pytest.raises(UnknownObject, match="offset 0 is not known"):
        allocator.free(offset)
    with pytest.raises(UnknownObject):
        allocator.free(1)


def test_a_segment_is_rounded_down_to_whole_cache_lines() -> None:
    assert RangeAllocator(127).capacity == 64
    assert RangeAllocator(63).allocate(1) is None
    with pytest.raises(StoreError, match="cannot be managed"):
        RangeAllocator(-1)
