"""One request in one process, without MPI: what `mooncake-lite generate` does, and the tests' reference."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mooncake_lite.config import PAGE_TOKENS
from mooncake_lite.engine.engine import Engine
from mooncake_lite.engine.pages import pages_for
from mooncake_lite.engine.sequence import Sequence
from mooncake_lite.errors import ConfigError
from mooncake_lite.messages import Sampling
from mooncake_lite.model import Model

BLOCK_TOKENS = 4 * PAGE_TOKENS


def generate_tokens(
    model: Model,
    prompt_ids: list[int],
    sampling: Sampling,
    max_tokens: int,
    stop_ids: frozenset[int],
    chunk_tokens: int = 256,
) -> Iterator[int]:
    """Yield the answer's tokens, one by one. Raises ConfigError when the prompt fills the context."""
    context = model.config.max_position
    if not 0 < len(prompt_ids) < context:
        raise ConfigError(f"the prompt has {len(prompt_ids)} tokens; the context takes 1 to {context - 1}")
    length = min(context, len(prompt_ids) + max_tokens)
    engine = Engine(model, pages_for(length), BLOCK_TOKENS)
    sequence = Sequence("local", list(prompt_ids), sampling, max_tokens, stop_ids, context)
    engine.reserve(sequence, length)
    token = None
    while token is None:
        token = engine.prefill_chunk(sequence, chunk_tokens)
    finish = sequence.append(token)
    while finish != "stop":
        yield token
        if finish:
            return
        (token,) = engine.decode_step([sequence])
        finish = sequence.append(token)


def use_threads(count: int) -> None:
    """Let torch and Numba take `count` threads each in this process."""
    import numba

    torch.set_num_threads(count)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
