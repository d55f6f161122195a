"""Requests in one process, without MPI: what `mooncake-lite generate` does, and the tests' reference."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from mooncake_lite.config.machine import usable_cores
from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine import compiling
from mooncake_lite.engine.engine import Engine
from mooncake_lite.engine.runner import Runner
from mooncake_lite.errors import ClusterError, ConfigError
from mooncake_lite.messages import Sampling
from mooncake_lite.model import forward
from mooncake_lite.model.config import DType
from mooncake_lite.model.forward import Model
from scheduler import instance
from scheduler.instance.lookup import Lookup
from scheduler.instance.outcomes import Failed, Token

BLOCK_TOKENS = 4 * PAGE_TOKENS

LIMITS = instance.Limits(tokens=2048, prefills=4)
"""No other client waits. A prompt of 2,048 tokens takes 1.2 times as long in chunks of 256, because torch
multiplies fewer rows at once."""


def generate_all(
    model: Model,
    prompts: list[list[int]],
    sampling: Sampling,
    max_tokens: int,
    stop_ids: frozenset[int],
    limits: instance.Limits = LIMITS,
    speculates: bool = False,
) -> Iterator[tuple[int, int]]:
    """Yield (number of the prompt, next token of its answer) for all prompts in one running batch.

    Raises ConfigError when a prompt fills the context, ClusterError when one cannot be computed.
    """
    context = model.config.max_position
    for prompt in prompts:
        if not 0 < len(prompt) < context:
            raise ConfigError(f"the prompt has {len(prompt)} tokens; the context takes 1 to {context - 1}")
    num_pages = sum(
        instance.pages_for(min(context, len(prompt) + max_tokens), PAGE_TOKENS) for prompt in prompts
    )
    duties = frozenset({instance.PREFILL, instance.DECODE})
    state = instance.State(
        duties, instance.Pages(num_pages, PAGE_TOKENS), instance.Staging(0, 0), BLOCK_TOKENS, limits,
        new_drafter=Lookup if speculates else None,
    )  # fmt: skip
    runner = Runner(Engine(model, num_pages, BLOCK_TOKENS))
    for number, prompt in enumerate(prompts):
        job = instance.Job(str(number), 0, duties, prompt, 0, max_tokens, context, stop_ids, sampling)
        instance.on(state, instance.Arrived(job), time.monotonic())
    while state.busy:
        step = instance.next_step(state, time.monotonic())
        instance.begin(state, step)
        for outcome in instance.on(state, runner.run(step), time.monotonic()):
            if isinstance(outcome, Token) and outcome.finish != "stop":
                yield int(outcome.job[0]), outcome.token
            elif isinstance(outcome, Failed):
                raise ClusterError(f"the request failed: {outcome.reason}")


def load_visibly(
    folder: Path,
    dtype: DType,
    device: str,
    weights: str,
    threads: int,
    codec: str | None = None,
    batch_invariant: bool = False,
) -> Model:
    """Load a model that computes with that many threads; show what is compiled before. See `load_model`.

    codec   of the pool's blocks, None where no blocks are moved
    """
    use_threads(threads)
    if use := compiling.kernel_use(folder, dtype, device, weights, codec):
        with compiling.console_compiling() as report:
            compiling.compile_with_helpers(use, report, helpers=usable_cores() - 1)
    return forward.load_model(folder, dtype, device, weights, batch_invariant)


def use_threads(count: int) -> None:
    """Let torch and Numba take `count` threads each in this process."""
    import numba

    torch.set_num_threads(count)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
