"""Empties the prefix cache of a running cluster, as vLLM's `POST /reset_prefix_cache` does.

Used by `endpoints`. The control plane removes the blocks, as for `mooncake-lite store rm --all --force`
(`control/commands.py`). Knows no HTTP. Explained in docs/reference/http.md.
"""

from __future__ import annotations

import asyncio

from mooncake_lite.gateway.answer_types import ResetAnswer
from mooncake_lite.gateway.cluster_view import ClusterView
from mooncake_lite.gateway.problems import Broken, Unavailable

ANSWER_LIMIT_S = 10.0
"""Longest wait for the conductor's answer. Every tier has to log the removals first."""

RETRY_LIMIT_S = 2.0
"""Longest wait for blocks that are being written. An answer ends before its last blocks are written."""

PAUSE_S = 0.1


async def reset_prefix_cache(cluster: ClusterView) -> ResetAnswer:
    """Remove every block of the pool, in DRAM and on SSD. Running requests are not disturbed.

    A block that a request is reading is no longer found, and freed when it has been read. A block that is
    being written, or waits to be written to SSD, cannot be removed; after RETRY_LIMIT_S it stays.
    Raises Unavailable when nothing could be removed, and Broken when removed blocks may come back.
    """
    removed = 0
    give_up_at = asyncio.get_running_loop().time() + RETRY_LIMIT_S
    while True:
        ended = await cluster.remove_all_blocks(ANSWER_LIMIT_S)
        removed += ended.blocks
        if ended.problem:
            raise Broken(ended.problem) if removed else Unavailable(ended.problem)
        if not ended.kept or asyncio.get_running_loop().time() >= give_up_at:
            return ResetAnswer(removed, ended.kept)
        await asyncio.sleep(PAUSE_S)
