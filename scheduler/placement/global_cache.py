"""Global cache-aware: the least predicted TTFT, where every prefill instance may reuse the longest prefix.

The paper's name (FAST'25, figure 5), without a formula. Here: of the longest prefix, fetched, and of the near
one, each instance takes whichever is faster. KVCache-centric differs by its threshold and its copies.
"""

from __future__ import annotations

from scheduler.placement.kvcache_centric import KVCacheCentric


class GlobalCache(KVCacheCentric):
    """Minimises queue + fetch + prefill, or queue + prefill where nothing is fetched."""

    name = "global-cache"

    def __init__(self) -> None:
        super().__init__(threshold=0.0)
