"""Allocate ranges of bytes within one segment: best fit, and free neighbours are joined at once.

Called by the directory, once per object. Knows offsets and sizes only: neither memory nor objects.
Explained in docs/explain/lifecycle.md. All KV blocks of a pool have one size, so best fit puts a block
exactly where one was evicted. Objects of many sizes leave holes that are too small for the next object. Such
an object may get several holes (`allocate_extents`).
"""

from __future__ import annotations

from bisect import bisect_left, insort

from store.errors import StoreError, UnknownObject

ALIGNMENT = 256
"""Every range starts at a multiple of this, in bytes.

It is several cache lines, so that two writers of neighbouring objects never share one, and it suits the loads
of a GPU. It wastes little: an object of 4 KiB or more takes at most a sixteenth more than it asked for.
"""

Extent = tuple[int, int]
"""(offset, nbytes) of one contiguous range of a segment."""


def padded_size(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Return the size that a range of nbytes takes: rounded up to the alignment, at least one unit."""
    return -(-nbytes // alignment) * alignment or alignment


class RangeAllocator:
    """Allocates ranges of [0, capacity), aligned.

        _used    offset -> size of each allocated range
        _starts  offset -> size of each free range (hole)
        _ends    end    -> offset of the same
        _holes   size   -> offsets of the holes of this size, as the keys of a dictionary
        _sizes   sorted sizes of holes, each once

    Invariant: used and free ranges tile [0, capacity) and no two free ones touch.
    A million holes of one size (a KV pool that was emptied) cost no more than one: what has to be kept
    sorted are distinct sizes.
    """

    def __init__(self, capacity: int, alignment: int = ALIGNMENT):
        """Manage [0, capacity), rounded down to the alignment. Raises StoreError for impossible sizes."""
        if alignment < 1 or capacity < 0:
            raise StoreError(f"a segment of {capacity} B with alignment {alignment} cannot be managed")
        self.alignment = alignment
        self.capacity = capacity - capacity % alignment
        self.free_bytes = 0
        self._used: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._holes: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []
        if self.capacity:
            self._add_free(0, self.capacity)

    @property
    def used_bytes(self) -> int:
        """Return the bytes in allocated ranges, rounding included."""
        return self.capacity - self.free_bytes

    def padded(self, nbytes: int) -> int:
        """Return `padded_size` with this allocator's alignment."""
        return padded_size(nbytes, self.alignment)

    def allocate(self, nbytes: int) -> int | None:
        """Take nbytes from the smallest hole that holds them; return the offset, None without such a hole."""
        offsets = self.allocate_run(nbytes, 1)
        return offsets[0] if offsets else None

    def allocate_run(self, nbytes: int, most: int) -> list[int]:
        """Take up to `most` ranges of nbytes, as `allocate` would one by one; return their offsets."""
        # Of a size that needs no rounding a million blocks share one number.
        size = nbytes if nbytes and not nbytes % self.alignment else padded_size(nbytes, self.alignment)
        offsets: list[int] = []
        while len(offsets) < most and (at := bisect_left(self._sizes, size)) < len(self._sizes):
            hole = self._sizes[at]  # what is left of it is the best fit again, while it holds one more
            offsets += self._take(hole, size, min(hole // size, most - len(offsets)))
        return offsets

    def allocate_extents(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Take one range of nbytes, or else the fewest holes that together hold it, largest first.

        nbytes   at least 1

        Returns the extents in the order of the object's bytes; their sizes add up to nbytes. While what is
        left fits into no hole, the whole of a largest hole is taken. The rest is a best fit again: it is
        taken from the front of the smallest hole that holds it. So all extents but the last are whole units
        long, and each can be freed by itself. Which of several holes of one size is taken does not matter.
        Returns None, and takes nothing, only when fewer than padded(nbytes) bytes are free.
        """
        # labs:begin 3a
        if self.padded(nbytes) > self.free_bytes:
            return None
        extents: list[Extent] = []
        left = nbytes
        while True:
            offset = self.allocate(left)
            if offset is not None:
                return (*extents, (offset, left))
            largest = self._sizes[-1]
            extents.append((self._take(largest, largest, 1)[0], largest))
            left -= largest
        # labs:end 3a

    def take_behind(self, offset: int, nbytes: int) -> bool:
        """Take the range of nbytes at offset, if it lies behind every range that is in use."""
        size, start = self.padded(nbytes), self._ends.get(self.capacity, self.capacity)
        if offset % self.alignment or not start <= offset <= self.capacity - size:
            return False
        self._drop_free(start)
        for first, end in ((start, offset), (offset + size, self.capacity)):
            if first < end:
                self._add_free(first, end - first)
        self._used[offset] = size
        return True

    def free(self, offset: int) -> int:
        """Free a range and return its size. Raises UnknownObject when none starts at offset."""
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
            assert not offset % self.alignment
            assert not (is_free and was_free), f"free neighbours at {offset}"
            position, was_free = offset + size, is_free
        assert position == self.capacity
        assert self._ends == {offset + size: offset for offset, size in self._starts.items()}
        assert self._sizes == sorted(self._holes)
        assert {offset: size for size, holes in self._holes.items() for offset in holes} == self._starts
        assert all(self._holes.values()), "a size without a hole"
        assert self.free_bytes == sum(self._starts.values())

    def _take(self, hole: int, size: int, count: int) -> range:
        """Take the first count * size bytes of the hole of this size that was freed last; return offsets."""
        start, _ = self._holes[hole].popitem()  # del would leave a gap that the next search has to cross
        self._forget_free(start, hole)
        end = start + count * size
        if start + hole > end:
            self._add_free(end, start + hole - end)
        offsets = range(start, end, size)
        self._used.update(dict.fromkeys(offsets, size))
        return offsets

    def _add_free(self, offset: int, size: int) -> None:
        self._starts[offset] = size
        self._ends[offset + size] = offset
        holes = self._holes.get(size)
        if holes is None:
            self._holes[size] = {offset: None}
            insort(self._sizes, size)
        else:
            holes[offset] = None
        self.free_bytes += size

    def _drop_free(self, offset: int) -> int:
        size = self._starts[offset]
        del self._holes[size][offset]
        self._forget_free(offset, size)
        return size

    def _forget_free(self, offset: int, size: int) -> None:
        """Drop the rest of the entries of a hole that is no longer among those of its size."""
        del self._starts[offset], self._ends[offset + size]
        if not self._holes[size]:
            del self._holes[size]
            del self._sizes[bisect_left(self._sizes, size)]
        self.free_bytes -= size
