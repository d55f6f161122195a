"""The time to load KV that is on this node: from DRAM into pages, or from SSD into DRAM.

Pure. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from scheduler.columns import Column

Tier = Literal["dram", "ssd"]


class LoadCost(msgspec.Struct, frozen=True):
    """Bandwidths on one node.

    dram_bytes_per_s   from a segment of this node into the pages of an engine
    ssd_bytes_per_s    from the SSD tier into a segment; ssd_latency_s: of any such read
    """

    dram_bytes_per_s: float
    ssd_bytes_per_s: float
    ssd_latency_s: float

    def __post_init__(self) -> None:
        if not min(self.dram_bytes_per_s, self.ssd_bytes_per_s) > 0 or not self.ssd_latency_s >= 0:
            raise ValueError(f"{self}: bandwidths must be above 0, the latency 0 or more")

    def seconds(self, tier: Tier, nbytes: Column) -> Any:
        """Return the seconds to load from one tier. No bytes take no time."""
        if tier == "dram":
            return nbytes / self.dram_bytes_per_s
        return (nbytes > 0) * self.ssd_latency_s + nbytes / self.ssd_bytes_per_s
