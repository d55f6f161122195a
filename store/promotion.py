"""Whether a block that was read from SSD stays in DRAM.

Called by the conductor for every block that it has read from a tier. Pure; knows keys, no bytes.
Explained in docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

from collections import OrderedDict


class SecondHit:
    """From its second hit on: what is asked for once only passes through, and evicts nothing that others use.

        max_keys   remembered; beyond it the key whose hit is the longest ago is forgotten

    Invariant: at most max_keys are remembered, the latest hit last.
    """

    def __init__(self, max_keys: int = 1 << 16):
        self.max_keys = max_keys
        # Not a dict: after many removals in front, finding its first entry takes a scan (100 us for 2**16).
        self._hits: OrderedDict[int, str] = OrderedDict()

    def hit(self, key: int, owner: str) -> bool:
        """True when this block is to stay. An owner that asks again (it had to wait) is one hit."""
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
