"""Hints of simulated clients: what agents would say after each turn, or what is wrong, on purpose.

Used by `trace_source.py`. A client knows which of its blocks will be used again and, with an error, when. In
a trace both are found by looking ahead. Explained in docs/explain/hints.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from random import Random
from typing import Literal, get_args

from mooncake_lite.control.asked import Verb
from mooncake_lite.control.hints import MOST_S
from mooncake_lite.workloads.traces import Trace

Kind = Literal["none", "agents", "wrong", "random"]
KINDS: tuple[str, ...] = get_args(Kind)
VERBS: tuple[Verb, ...] = get_args(Verb)

Said = tuple[Verb, int, float, bool]
"""A hint: verb, number of blocks of the prompt, seconds, and whether it has a session of its own."""

FACTOR, MORE_S = 1.25, 15.0
"""A client has its blocks retained for so many times the pause that it expects, and so much longer: prompts
wait before they are read, and a block whose time is over is evicted next. One that knows its error waits for
two standard deviations more."""

LONG_S = 600.0
"""How long wrong hints hold blocks: longer than most prompts wait for their next turn."""


class Hints:
    """The hints about each request of a trace, said when its answer ends.

    agents   retain and prefetch the blocks that will be used again, until then, and demote the rest
    wrong    the contrary: demote what will be used again; retain, pin, share or prefetch the rest
    random   any verb about any blocks
    """

    def __init__(self, trace: Trace, kind: str, error: float, seed: int, more_s: float = MORE_S) -> None:
        """error: standard deviation of the logarithm of (expected pause / pause). more_s: see MORE_S."""
        self._kind, self._error, self._dice = kind, error, Random(f"hints {seed}")
        self._factor, self._more_s = FACTOR * exp(2 * error), more_s
        self._size = trace.block_tokens
        self._next: list[tuple[int, int, float]] = []
        next_use: dict[int, float] = {}
        for request in reversed(trace.requests):
            full = request.input_length // trace.block_tokens
            uses = [next_use.get(one) for one in request.hash_ids[:full]]
            alive = next((place for place, use in enumerate(uses) if use is None), full)
            self._next.append((full, alive, (uses[alive - 1] or 0.0) if alive else 0.0))
            next_use.update(dict.fromkeys(request.hash_ids[:full], request.timestamp / 1000))
        self._next.reverse()

    def after(self, number: int, now: float) -> Sequence[Said]:
        """Return what is said of request `number`, from 0 on, once it is answered; now: of the trace."""
        full, alive, used_s = self._next[number]
        pause_s = max(0.0, used_s - now) * self._dice.lognormvariate(0.0, self._error)
        if not full:
            return []
        if self._kind == "random":
            return [(self._dice.choice(VERBS), self._dice.randint(1, full), self._dice.uniform(0, 60), True)]
        if self._kind == "wrong":
            if alive == full:
                return [("demote", full, 0.0, False)]
            return [(self._dice.choice(("retain", "pin", "share", "prefetch")), full, LONG_S, True)]
        said: list[Said] = []
        if alive:  # also if the next turn waits already
            said += [
                ("retain", alive, min(MOST_S, self._factor * pause_s + self._more_s), True),
                ("prefetch", alive, min(MOST_S, pause_s), True),
            ]
        if alive < full:
            said.append(("demote", full, 0.0, False))
        return said
