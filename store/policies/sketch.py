"""Approximate counts of recent references: a count-min sketch that ages by halving.

Used by `store.policies.wtinylfu` alone. Pure. Explained in docs/explain/eviction.md.
"""

from __future__ import annotations

ROWS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
"""Odd multipliers, one per row: golden ratio and primes of the xxHash family, which spread well."""
MOST = 15
"""Counters have four bits in the paper; ours are bytes that stop there."""
SAMPLE = 10
"""References per item of the capacity after which every counter is halved."""

_HALVED = bytes(value >> 1 for value in range(256))
_U64 = 2**64 - 1


class FrequencySketch:
    """Four rows of counters; an item has one in each, and its count is the smallest of them.

        _rows   4 x 2^k bytes, 2^k at least 4 times the capacity
        _shift  64 - k: the top k bits of item * multiplier choose the counter
        _added  references since the last halving

    Never too low between two halvings (below MOST); too high only when all four counters are shared.
    """

    def __init__(self, capacity: int):
        bits = max(6, (4 * capacity - 1).bit_length())
        self._shift = 64 - bits
        self._rows = [bytearray(1 << bits) for _ in ROWS]
        self._added = 0
        self._sample = SAMPLE * capacity

    def add(self, item: int) -> None:
        """Count one reference."""
        for row, multiplier in zip(self._rows, ROWS):
            place = ((item * multiplier) & _U64) >> self._shift
            if row[place] < MOST:
                row[place] += 1
        self._added += 1
        if self._added >= self._sample:
            self._rows = [row.translate(_HALVED) for row in self._rows]
            self._added //= 2

    def count(self, item: int) -> int:
        """Return about how often an item was referenced lately, 0 to MOST."""
        shift = self._shift
        return min(row[((item * multiplier) & _U64) >> shift] for row, multiplier in zip(self._rows, ROWS))
