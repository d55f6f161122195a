"""Hot spots: blocks that a node reads from other nodes again and again, to be copied to it.

Asked by `mooncake_lite.control` whenever a prefill begins. The store's `replicate` makes the copies.
Pure. Explained in docs/explain/conductor.md (the paper's hot-spot replication, FAST'25 4.2 and Algorithm 1).

    TransferKVCache(best, p)  if  best_len / p.prefix_len > threshold           as the paper has it
                              and this is the block's TIMES-th read from p      ours
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

TIMES = 2
"""Reads by one node that make a block hot.

The paper copies at the first read. But three quarters of the blocks in its own trace are used once, and each
copy takes space from another block.
"""

WINDOW_S = 60.0
"""A read counts for this time: the default of copy_cold_s, for which a copy stays without being read."""

REMEMBERED = 100_000
"""Pairs of block and node whose reads are counted; the one not read for longest is forgotten first.

Any value works that exceeds the blocks that nodes read from each other within WINDOW_S.
"""


class HotSpots:
    """Counts reads of blocks from other nodes.

        threshold   how many times longer than the near prefix the whole one must be
        _reads   (key, node) -> (time of the last read, reads so far), the oldest in front

    Invariant: at most `remembered` pairs, in the order of their times.
    """

    def __init__(
        self,
        threshold: float,
        *,
        times: int = TIMES,
        window_s: float = WINDOW_S,
        remembered: int = REMEMBERED,
    ):
        self._threshold, self._times, self._window_s = threshold, times, window_s
        self._remembered = remembered
        self._reads: OrderedDict[tuple[int, int], tuple[float, int]] = OrderedDict()

    def on_read(self, node: int, keys: Sequence[int], near: Sequence[bool], now: float) -> list[int]:
        """Count a prefill's reads on `node`. Returns the keys to copy there, front to back.

        keys   of the prefix' blocks, front to back
        near   whether each one is read from DRAM of that node

        The near prefix is the leading blocks that are near. Unless `keys` are more than `_threshold` times
        as many, no read counts. Otherwise each block that is not near is read once more by `node` now, front
        to back: `_count` notes that. A block is hot with its `_times`-th read. Its pair then leaves `_reads`,
        so that it counts from 0 again. At the end, the pairs not read for longest are forgotten until
        `_remembered` are left.
        """
        # labs:begin 7c
        near_len = next((index for index, is_near in enumerate(near) if not is_near), len(near))
        if len(keys) <= self._threshold * near_len:
            return []
        hot = []
        for key, is_near in zip(keys, near, strict=True):
            if not is_near and self._count(key, node, now) >= self._times:
                del self._reads[key, node]
                hot.append(key)
        while len(self._reads) > self._remembered:
            self._reads.popitem(last=False)
        return hot
        # labs:end 7c

    def _count(self, key: int, node: int, now: float) -> int:
        """Count a read, and return the number of reads within the window."""
        last_s, reads = self._reads.pop((key, node), (now, 0))
        reads = 1 if now - last_s > self._window_s else reads + 1
        self._reads[key, node] = (now, reads)
        return reads

    def check(self) -> None:
        """Assert the invariant (tests)."""
        times = [time_s for time_s, _ in self._reads.values()]
        assert times == sorted(times)
        assert len(self._reads) <= self._remembered
