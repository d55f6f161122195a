"""Memory of the caller that receives bytes: registered ranges, and the buffers that get_buffer returns.

Used by `api`. As in Mooncake, the caller's addresses are not checked, except by get_into_ranges, which
compares them with the registered ranges. Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right

from store.mooncake_store.codes import BAD_PARAMETERS, OK


class BufferHandle(bytearray):
    """A copy of one object in memory of its own: a buffer with `ptr()` and `size()`.

    It lives as long as a reference to it. Its address is valid until it is resized.
    """

    def ptr(self) -> int:
        """Return the address of the first byte."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def size(self) -> int:
        """Return the number of bytes."""
        return len(self)


class Buffers:
    """Registered ranges of this process's memory. They do not overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._ends: list[int] = []

    def register(self, ptr: int, size: int) -> int:
        """Register a range; return OK, or BAD_PARAMETERS if it is empty, at 0, or overlaps another."""
        if ptr < 1 or size < 1:
            return BAD_PARAMETERS
        with self._lock:
            at = bisect_right(self._starts, ptr)
            if at and self._ends[at - 1] > ptr:
                return BAD_PARAMETERS
            if at < len(self._starts) and self._starts[at] < ptr + size:
                return BAD_PARAMETERS
            self._starts.insert(at, ptr)
            self._ends.insert(at, ptr + size)
        return OK

    def unregister(self, ptr: int) -> int:
        """Forget a range; return OK, or BAD_PARAMETERS when no range starts there."""
        with self._lock:
            at = bisect_right(self._starts, ptr) - 1
            if at < 0 or self._starts[at] != ptr:
                return BAD_PARAMETERS
            del self._starts[at], self._ends[at]
        return OK

    def room(self, ptr: int) -> int:
        """Return the registered bytes from this address on; 0 when it is in no range."""
        with self._lock:
            at = bisect_right(self._starts, ptr) - 1
            return max(0, self._ends[at] - ptr) if at >= 0 else 0

    def check(self) -> None:
        """Assert that ranges are in order and apart (tests)."""
        edges = [edge for pair in zip(self._starts, self._ends) for edge in pair]
        assert edges == sorted(edges)
        assert all(start < end for start, end in zip(self._starts, self._ends))
