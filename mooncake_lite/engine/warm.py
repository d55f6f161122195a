"""Compile, or load from Numba's cache, every kernel an engine will call: by calling them all once."""

from __future__ import annotations

import numpy as np

from mooncake_lite.config import PAGE_TOKENS
from mooncake_lite.engine.engine import Engine
from mooncake_lite.engine.sequence import Sequence
from mooncake_lite.messages import Sampling


def warm_up(engine: Engine) -> None:
    """Run a tiny request through prefill, both directions of block moves, a tail, and decode."""
    tokens = [1] * (engine.block_tokens + PAGE_TOKENS)
    sequence = Sequence("warm-up", tokens, Sampling(0.0), 4, frozenset(), len(tokens) + 4)
    blocks = np.zeros((2, *engine.block_shape), engine.block_dtype)
    try:
        engine.reserve(sequence, len(tokens) + 1)
        engine.prefill_chunk(sequence, engine.block_tokens)
        token = engine.prefill_chunk(sequence, engine.block_tokens)
        assert token is not None
        engine.store_blocks(sequence, 0, blocks)
        engine.load_blocks(sequence, 0, blocks)
        sequence.append(token)
        engine.decode_step([sequence])
    finally:
        engine.free(sequence)
