"""NVIDIA Dynamo's cost, for comparison: blocks to compute, weighted, plus blocks that are being decoded.

    cost = overlap weight * (blocks that wait for prefill + blocks of the prompt - blocks it would reuse)
           + blocks of the running sequences

after the documentation of its KV router ("KV cache routing": the worker with the least cost is chosen, with a
temperature of 0). Counted in blocks, not in seconds: it knows no transfer and no quadratic attention.
"""

from __future__ import annotations

import numpy as np

from scheduler.placement.contract import Ranked, near_only
from scheduler.placement.view import View

OVERLAP_WEIGHT = 1.0
"""Dynamo's default: a block to compute counts as much as a block to decode."""


class DynamoCost:
    """Minimises blocks."""

    name = "dynamo"

    def rank(self, view: View) -> Ranked:
        """Score: blocks."""
        state, size = view.state, view.request.block_tokens
        pending = np.array([one.pending_tokens for one in state.prefills.values()])
        uncached = view.request.num_tokens - view.tokens(view.near)
        own = [state.decode_of(instance) for instance in state.prefills]
        decoding = np.array([one.context if one else 0.0 for one in own])
        score = (OVERLAP_WEIGHT * (pending + uncached) + decoding) / size
        return near_only(view, score)
