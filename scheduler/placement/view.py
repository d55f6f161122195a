"""A policy's view of the cluster for one request: columns over the prefill instances.

Built by `choose.py` for each decision. Knows the books, makes no choices. Explained in
docs/explain/conductor.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from scheduler.columns import Column
from scheduler.requests import Request
from scheduler.state import State

NOTHING = np.zeros(())


class View:
    """One request among the prefill instances. Lengths of prefixes are in blocks, times in seconds.

    Lengths are float64 as times are: NumPy takes twice as long to multiply integers by floats.

    rows      of the instances that may be chosen: their requests would have a decode slot
    pool      what the pool has of the prompt
    best      leading blocks that the pool has anywhere, in any tier
    near      (n,) leading blocks in DRAM of each instance's node, or in its own pages if those are more
    in_pages  (n,) leading blocks in each instance's own pages
    queue_s   (n,) predicted seconds until each instance could begin (the paper's T_queue)
    """

    def __init__(self, state: State, request: Request, now: float, rows: np.ndarray) -> None:
        self.state, self.request, self.now, self.rows = state, request, now, rows
        columns = state.prefill_columns
        self.pool = state.index.leading(request.keys)
        self.best = float(self.pool.blocks)
        self.near: np.ndarray = self.pool.near_columns()[columns.node_column].astype(np.float64)
        pages = state.pages.leading(request.keys)
        self.in_pages: np.ndarray = NOTHING
        if pages.blocks:
            self.in_pages = pages.near_columns()[columns.page_column]
            self.near = np.maximum(self.near, self.in_pages)
        self.queue_s = state.queue_s(now)
        self._fetch_s: np.ndarray | None = None
        self._in_rack: np.ndarray | None = None

    def tokens(self, blocks: Column) -> Any:
        """Return what `Request.cached_tokens` gives, for a number or a column of blocks."""
        request = self.request
        return np.minimum(blocks * request.block_tokens, request.num_tokens - 1)

    def prefill_s(self, reused: Column) -> np.ndarray:
        """Return (n,) predicted seconds of each instance for the prompt without its first `reused` blocks."""
        columns, cached = self.state.prefill_columns, self.tokens(reused)
        return self.state.costs.prefill_s(columns.instance, self.request.num_tokens, cached)  # type: ignore[no-any-return]

    @property
    def fetch_s(self) -> np.ndarray:
        """Return (n,) predicted seconds to move the rest of the longest prefix to each instance."""
        if self._fetch_s is None:
            self._fetch_s = self.fetch_beyond_s(self.near)
        return self._fetch_s

    def fetch_beyond_s(self, had: np.ndarray) -> np.ndarray:
        """Return (n,) predicted seconds to move the longest prefix without its first `had` blocks.

        Blocks on SSD are counted as far if there are other nodes: the index does not tell on which they are.
        """
        state, pool = self.state, self.pool
        moved = np.maximum(self.best - had, 0) * state.block_nbytes
        ssd = np.minimum(pool.ssd_blocks * state.block_nbytes, moved) if pool.ssd_blocks else 0
        if len(state.index.nodes) == 1:
            return state.costs.fetch_s(state.prefill_columns.instance, moved, ssd=ssd)  # type: ignore[no-any-return]
        flows = state.flows.least(pool)
        return state.costs.fetch_s(state.prefill_columns.instance, 0, moved, flows, ssd)  # type: ignore[no-any-return]

    @property
    def in_rack(self) -> np.ndarray:
        """Return (n,) leading blocks in DRAM of all nodes of each instance's rack; at least `near`."""
        if self._in_rack is None:
            state = self.state
            found = {
                rack: self.pool.among(bits) for rack, bits in state.racks.bits(state.index.nodes).items()
            }
            of_rows = [found[rack] for rack in state.prefill_columns.rack.tolist()]
            self._in_rack = np.maximum(self.near, of_rows)
        return self._in_rack

    @property
    def rack_fetch_s(self) -> np.ndarray:
        """Return (n,) predicted seconds to move what `in_rack` has beyond `near`, within the rack."""
        state = self.state
        moved = (self.in_rack - self.near) * state.block_nbytes
        instance, flows = state.prefill_columns.instance, state.flows.least(self.pool)
        return state.costs.rack_transfer_s(instance, moved, flows)  # type: ignore[no-any-return]

    def handover_s(self, rack: int) -> np.ndarray:
        """Return (m,) predicted seconds to move all KV of the prompt from a rack to each decode instance."""
        state, request = self.state, self.request
        nbytes, columns = (
            -(-request.num_tokens // request.block_tokens) * state.block_nbytes,
            state.decode_columns,
        )
        within_s = state.costs.rack_transfer_s(columns.instance, nbytes)
        return np.where(columns.rack == rack, within_s, state.costs.transfer_s(columns.instance, nbytes))

    def draw(self, what: str) -> int:
        """Return a number that depends on the request alone: the same in every process and every replay."""
        return xxh3_64_intdigest(f"{what} {self.request.request_id}".encode())
