"""Promotion: choose the blocks that stay in DRAM after they were read from SSD.

Called by the conductor for every block that it has read from a tier. Pure; knows keys, no bytes.
Explained in docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

from collections import OrderedDict


class Promotion:
    """Keep a block from its second hit on. A block that is hit once passes through and evicts no other.

        max_keys   keys that are remembered; beyond it the key with the oldest hit is forgotten

    Invariant: at most max_keys are remembered, the latest hit last.
    """

    def __init__(self, max_keys: int = 1 << 16):
        self.max_keys = max_keys
        # Not a dict: after many removals in front, finding its first entry takes a scan (100 us for 2**16).
        self._hits: OrderedDict[int, str] = OrderedDict()

    def hit(self, key: int, owner: str) -> bool:
        """Tell whether this block stays. Several questions of one owner (it had to wait) are one hit."""
        before = self._hits.pop(key, owner)
        if before != owner:
            return True
        self._hits[key] = owner
        if len(self._hits) > self.max_keys:
            self._hits.popitem(last=False)
        return False

    def check(self) -> None:
        """Assert the invariant (tests)."""
        assert len(self._hits) <= self.max_keys
