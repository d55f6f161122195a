"""The time to move KV from another rank: its size over the present bandwidth of the sender.

Pure. The Mooncake paper counts congestion at the sender and gives no formula (FAST'25, 4.1). Here the
transfers of one sender share its bandwidth equally. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from typing import Any

import msgspec

from scheduler.columns import Column


class TransferCost(msgspec.Struct, frozen=True):
    """Bandwidths between two nodes. `LoadCost` has those on one node.

    far_bytes_per_s    until the bytes are in the reader's pages
    latency_s          of any transfer
    rack_bytes_per_s   between nodes of one rack; 0: as between any nodes
    """

    far_bytes_per_s: float
    latency_s: float
    rack_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.far_bytes_per_s > 0:
            raise ValueError(f"{self}: far_bytes_per_s must be above 0")
        if not min(self.latency_s, self.rack_bytes_per_s) >= 0:
            raise ValueError(f"{self}: the latency and rack_bytes_per_s must be 0 or more")

    def seconds(self, nbytes: Column, flows: Column = 0) -> Any:
        """Return the seconds of a transfer. No bytes take no time.

        flows   transfers that the sender has under way already
        """
        return (nbytes > 0) * self.latency_s + nbytes * ((1 + flows) * (1.0 / self.far_bytes_per_s))

    def rack_seconds(self, nbytes: Column, flows: Column = 0) -> Any:
        """Return the seconds of a transfer from another node of the same rack."""
        bytes_per_s = self.rack_bytes_per_s or self.far_bytes_per_s
        return (nbytes > 0) * self.latency_s + nbytes * ((1 + flows) / bytes_per_s)
