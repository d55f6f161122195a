"""Measures forward passes of the real engine in this process.

Called by `mooncake-lite profile`. Loads torch. Explained in docs/explain/emulation.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine.engine import Engine
from mooncake_lite.errors import ConfigError
from mooncake_lite.messages import Sampling
from mooncake_lite.profiles.compute import CHUNK_TOKENS, load_of
from mooncake_lite.profiles.fit import MeasuredPass, MeasuredPrompt
from scheduler.instance import JobId, pages_for
from scheduler.instance.step import Chunk, Draw

LEAST_CONTEXT = 256


class Shape(NamedTuple):
    """A pass: one prompt's chunk of `new` tokens after `start`, and `batch` sequences of `context` tokens."""

    new: int = 0
    start: int = 0
    batch: int = 0
    context: int = 0

    @property
    def longest(self) -> int:
        """Return the longest sequence, in tokens."""
        return max(self.new + self.start, self.context)


class ProfilePlan(NamedTuple):
    """Which passes and prompts are measured, and how often each.

    prompts        (tokens, tokens of the cached prefix)
    prompt_runs    of each of them: they take long, and so vary less
    """

    shapes: list[Shape]
    runs: int
    prompts: list[tuple[int, int]]
    prompt_runs: int

    @property
    def num_passes(self) -> int:
        """Return how many passes and prompts run in all."""
        return (self.runs + 1) * len(self.shapes) + self.prompt_runs * len(self.prompts)


def plan(longest: int, quick: bool) -> ProfilePlan:
    """Choose the passes for a model whose context is `longest` tokens.

    Raises ConfigError for a context that is too short for as many passes as a fit needs.
    """
    if longest < LEAST_CONTEXT:
        raise ConfigError(f"the model's context is {longest} tokens; profile needs {LEAST_CONTEXT} or more")
    news, starts = [8, 32, 64, 128, 256], [0, 512, 2048]
    batches, contexts = [1, 2, 4, 8, 16], [64, 512, 2048]
    if quick:
        news, starts, batches, contexts = news[::2], starts[:2], batches[::2], contexts[:2]
    shapes = [Shape(new, start) for new in news for start in starts]
    shapes += [Shape(batch=batch, context=context) for batch in batches for context in contexts]
    half = min(512, longest // 2)
    chunks, beside = ((64, 256), (4, 16)) if quick else ((32, 64, 128, 256), (1, 4, 16))
    shapes += [Shape(new, half, batch, half) for new in chunks for batch in beside]
    lengths = [length for length in (64, 256, 1024, 2048)[: 3 if quick else 4] if length <= longest]
    prompts = [(length, int(share * length)) for length in lengths for share in (0.0, 0.5, 0.95)]
    few = (8, 32, 64, 128) if quick else (1, 8, 16, 24, 32, 40, 64, 96, 128, 192)
    prompts += [(half + count, half) for count in few if half + count <= longest]
    shapes = [shape for shape in shapes if shape.longest <= longest]
    return ProfilePlan(shapes, 3 if quick else 5, prompts, 1 if quick else 3)


def pages_needed(shapes: Seq[Shape]) -> int:
    """Return the KV pages that the largest of these passes needs."""
    return max(len(chunks[-1].pages) + chunks[-1].pages[0] for chunks in map(chunks_of, shapes))


def chunks_of(shape: Shape) -> list[Chunk]:
    """Return the chunks of a pass, on pages of their own."""
    chunks: list[Chunk] = []
    first = 0
    lengths = [(shape.new, shape.start, True)] if shape.new else []
    lengths += [(1, shape.context - 1, False)] * shape.batch
    for number, (count, start, prompt) in enumerate(lengths):
        pages = tuple(range(first, first + pages_for(start + count, PAGE_TOKENS)))
        first += len(pages)
        draw = Draw(Sampling(0.0), (1,) * count, 0, frozenset())
        chunks.append(Chunk(JobId(str(number), 0), (1,) * count, start, pages, (draw,), prompt))
    return chunks


def measure(engine: Engine, todo: ProfilePlan, done: Callable[[int], None]) -> list[MeasuredPass]:
    """Time every pass. The passes take turns, so that a slow moment of the machine hits all alike.

    done   told how many passes have run

    The fastest run of a pass counts: whatever else runs on the machine can only add time.
    """
    chunks = [chunks_of(shape) for shape in todo.shapes]
    # The first turn touches memory for the first time, and does not count.
    taken = _in_turns(engine, [[one] for one in chunks], todo.runs + 1, done)
    return [MeasuredPass(load_of(one), min(seconds[1:])) for one, seconds in zip(chunks, taken)]


def measure_prompts(engine: Engine, todo: ProfilePlan, done: Callable[[int], None]) -> list[MeasuredPrompt]:
    """Time every prompt, in chunks after its cached prefix. done: told how many have run."""
    taken = _in_turns(engine, [prompt_chunks(*prompt) for prompt in todo.prompts], todo.prompt_runs, done)
    return [MeasuredPrompt(*prompt, min(seconds)) for prompt, seconds in zip(todo.prompts, taken)]


def _in_turns(
    engine: Engine, work: Seq[Seq[list[Chunk]]], turns: int, done: Callable[[int], None]
) -> list[list[float]]:
    """Compute lists of passes in turns; return the seconds of each list by turn."""
    taken: list[list[float]] = [[] for _ in work]
    for turn in range(turns):
        for number, passes in enumerate(work):
            began = time.perf_counter()
            for one in passes:
                engine.compute(one)
            taken[number].append(time.perf_counter() - began)
            done(turn * len(work) + number + 1)
    return taken


def prompt_chunks(num_tokens: int, cached: int) -> list[list[Chunk]]:
    """Return the passes of one prompt after its cached prefix."""
    starts = range(cached, num_tokens, CHUNK_TOKENS)
    return [chunks_of(Shape(min(CHUNK_TOKENS, num_tokens - start), start)) for start in starts]
