"""What the engine benchmark compares: ways to answer prompts, which take turns, and the rows that come of it.

Used by all `engine_*` modules. Knows neither models nor processes.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mooncake_lite.bench.result import LOWER_IS_BETTER, Other, Row

Prompts = list[list[int]]

Figure = TypeVar("Figure")

Answer = Callable[[Prompts, int], float]
"""Answers each prompt with that many new tokens, none of which ends an answer; returns the seconds."""


@dataclass(frozen=True, slots=True)
class Side:
    """A peer.

    answer   None where the peer is missing; `note` then says why
    """

    name: str
    answer: Answer | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit. measure: returns its figure, in the unit of the row."""

    name: str
    measure: Callable[[], float]


def in_turns(runs: int, *actions: Callable[[], Figure]) -> list[list[Figure]]:
    """Return the figures of each action. They take turns, so that a slow moment of the machine hits all."""
    figures: list[list[Figure]] = [[] for _ in actions]
    for _ in range(runs):
        for action, found in zip(actions, figures):
            found.append(action())
    return figures


def rows(
    name: str,
    unit: str,
    runs: int,
    measure: Callable[[Answer], float],
    ours: Answer,
    peers: Sequence[Side],
    bound: Bound | None = None,
) -> list[Row]:
    """Measure one figure of ours, of each peer and of the limit; one row for each peer.

    measure   the figure of one side, in `unit`
    """
    there = [peer.answer for peer in peers if peer.answer is not None]
    actions = [lambda side=side: measure(side) for side in (ours, *there)]  # type: ignore[misc]
    mine, *found = in_turns(runs, *actions, *([bound.measure] if bound else []))
    limit = Other(bound.name, best(unit, found.pop())) if bound else None
    own, figures = statistics.median(mine), iter(found)
    return [
        Row(
            *(name, unit, own),
            Other(peer.name, statistics.median(next(figures))) if peer.answer is not None else None,
            *(limit, runs, peer.note),
        )
        for peer in peers
    ] or [Row(name, unit, own, None, limit, runs)]


def best(unit: str, figures: Sequence[float]) -> float:
    """Return the best of some figures in this unit."""
    return min(figures) if unit in LOWER_IS_BETTER else max(figures)


def random_prompts(count: int, tokens: int, vocab_size: int, seed: int = 0) -> Prompts:
    """Make prompts of random tokens, which no cache knows. The first eighth of the ids is left out: control
    tokens and single bytes are there."""
    chosen = random.Random(f"{seed} {count} {tokens}")
    return [[chosen.randrange(vocab_size // 8, vocab_size) for _ in range(tokens)] for _ in range(count)]


def decode_seconds(answer: Answer, prompts: Prompts, new: int) -> float:
    """Return the seconds of `new` - 1 decode steps: the whole run less a run with one new token."""
    whole = answer(prompts, new)
    return max(1e-9, whole - answer(prompts, 1))
