"""Ranges of bytes within one segment: best fit, free neighbours joined at once.

Called by the directory, once per object. Knows offsets and sizes only: neither memory nor objects.
Explained in docs/lifecycle.md. All KV blocks of a pool have one size, so best fit puts a block
exactly where one was evicted, and the odd tail into the smallest hole that holds it.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from store.errors import StoreError, UnknownObject

ALIGNMENT = 64
"""A cache line, so that two writers of neighbouring objects never share one."""

_OFFSET_BITS = 48  # a free range is one integer, size << 48 | offset: sorts by size, then address


def padded_size(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """What a range of nbytes really takes: rounded up to the alignment, at least one unit."""
    return max(-(-nbytes // alignment), 1) * alignment


class RangeAllocator:
    """Allocates ranges of [0, capacity), aligned.

        _used    offset -> size of each allocated range
        _starts  offset -> size of each free range
        _ends    end    -> offset of the same
        _sizes   sorted integers size << 48 | offset of the same

    Invariant: used and free ranges tile [0, capacity) and no two free ones touch.
    """

    def __init__(self, capacity: int, alignment: int = ALIGNMENT):
        """Manage [0, capacity), rounded down to the alignment. Raises StoreError for impossible sizes."""
        if alignment < 1 or not 0 <= capacity < 1 << _OFFSET_BITS:
            raise StoreError(f"a segment of {capacity} B with alignment {alignment} cannot be managed")
        self.alignment = alignment
        self.capacity = capacity - capacity % alignment
        self.free_bytes = 0
        self._used: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._sizes: list[int] = []
        if self.capacity:
            self._add_free(0, self.capacity)

    @property
    def used_bytes(self) -> int:
        """Bytes in allocated ranges, rounding included."""
        return self.capacity - self.free_bytes

    def padded(self, nbytes: int) -> int:
        """`padded_size` with this allocator's alignment."""
        return padded_size(nbytes, self.alignment)

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a range of nbytes, from the smallest hole that holds it; None when none does."""
        size = self.padded(nbytes)
        at = bisect_left(self._sizes, size << _OFFSET_BITS)
        if at == len(self._sizes):
            return None
        hole, offset = divmod(self._sizes.pop(at), 1 << _OFFSET_BITS)
        del self._starts[offset], self._ends[offset + hole]
        self.free_bytes -= hole
        if hole > size:
            self._add_free(offset + size, hole - size)
        self._used[offset] = size
        return offset

    def free(self, offset: int) -> int:
        """Give a range back; returns its size. Raises UnknownObject when none starts at offset."""
        size = self._used.pop(offset, None)
        if size is None:
            raise UnknownObject("range at offset", offset)
        start, end = offset, offset + size
        if (before := self._ends.get(start)) is not None:
            start = before
            self._drop_free(before)
        if end in self._starts:
            end += self._drop_free(end)
        self._add_free(start, end - start)
        return size

    def check(self) -> None:
        """Assert the invariant (tests)."""
        ranges = sorted([*self._used.items(), *self._starts.items()])
        position, was_free = 0, False
        for offset, size in ranges:
            is_free = offset in self._starts
            assert offset == position, f"a gap or overlap at {position}"
            assert size > 0, f"an empty range at {offset}"
            assert not (is_free and was_free), f"free neighbours at {offset}"
            position, was_free = offset + size, is_free
        assert position == self.capacity
        assert self._ends == {offset + size: offset for offset, size in self._starts.items()}
        assert self._sizes == sorted(size << _OFFSET_BITS | offset for offset, size in self._starts.items())
        assert self.free_bytes == sum(self._starts.values())

    def _add_free(self, offset: int, size: int) -> None:
        self._starts[offset] = size
        self._ends[offset + size] = offset
        insort(self._sizes, size << _OFFSET_BITS | offset)
        self.free_bytes += size

    def _drop_free(self, offset: int) -> int:
        size = self._starts.pop(offset)
        del self._ends[offset + size]
        del self._sizes[bisect_left(self._sizes, size << _OFFSET_BITS | offset)]
        self.free_bytes -= size
        return size
