"""Compile, or load from Numba's cache, every kernel an engine will call: by calling them all once."""

from __future__ import annotations

import numpy as np

from kernels_numba.matmul.linear_layers import MAX_ROWS_OF_X
from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine.engine import Engine
from mooncake_lite.messages import Sampling
from scheduler.instance import JobId, pages_for
from scheduler.instance.step import Chunk, Draw


def warm_up(engine: Engine) -> None:
    """Run a tiny request through prefill, both directions of block moves, a tail, and decode.

    On a CPU the prefill has the fewest tokens that torch multiplies: more of them would call nothing else.
    """
    block = engine.block_tokens
    many = min(block, MAX_ROWS_OF_X + 1) if engine.model.device.type == "cpu" else block
    length = many + PAGE_TOKENS
    pages = tuple(range(pages_for(block + PAGE_TOKENS + 1, PAGE_TOKENS)))
    held = pages[: pages_for(block + PAGE_TOKENS, PAGE_TOKENS)]

    def compute(start: int, end: int) -> None:
        ids = (1,) * (end - start)
        prompt = end <= length
        draws = (Draw(Sampling(0.0), ids, 0, frozenset()),) if end >= length else ()
        chunks, states = [Chunk(JobId("warm-up", 0), ids, start, pages, draws, prompt)], None
        if engine.model.weights.embedding is None:
            states = np.zeros(
                (len(ids), engine.model.config.hidden_size * engine.model.dtype.itemsize), np.uint8
            )
        if engine.model.head is None:
            engine.pass_on(chunks, None, states)
        else:
            engine.compute(chunks, None, states)

    compute(0, many)
    compute(many, length)
    blocks = np.zeros((2, *engine.block_shape), engine.block_dtype)
    engine.store_blocks(held, blocks)
    engine.load_blocks(held, blocks)
    compute(length, length + 1)
