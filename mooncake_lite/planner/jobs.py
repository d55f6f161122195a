"""The requests of a trace as a planner sees them: when they come, how long they compute, what they load.

Pure. Explained in docs/explain/planning.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mooncake_lite.profiles.compute import PassLoad
from mooncake_lite.workloads.reuse import cached_tokens
from mooncake_lite.workloads.traces import Trace


@dataclass(frozen=True, slots=True)
class Jobs:
    """One entry per request in each array, in the order of arrival.

    arrived_s   float64, since the trace began
    tokens      int64, of the prompt; cached: of those the ones whose KV the pool has
    answer      int64, tokens of the answer, at least 1
    """

    arrived_s: np.ndarray
    tokens: np.ndarray
    cached: np.ndarray
    answer: np.ndarray

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.tokens)

    @property
    def rate(self) -> float:
        """Return the requests per second from first to last arrival; inf where all come at once."""
        span_s = float(self.arrived_s[-1] - self.arrived_s[0])
        return (len(self) - 1) / span_s if span_s else float("inf")

    @property
    def reused(self) -> float:
        """Return the share of the prompts' tokens whose KV the pool has."""
        return float(self.cached.sum() / self.tokens.sum())


def jobs_of(trace: Trace) -> Jobs:
    """Return the requests of a trace, with what a pool without a limit has of them."""
    ask = [(one.timestamp / 1e3, one.input_length, max(1, one.output_length)) for one in trace.requests]
    arrived_s, tokens, answer = map(np.array, zip(*ask))
    return Jobs(arrived_s, tokens, np.array(cached_tokens(trace)), answer)


def compute_s(jobs: Jobs, pass_s: Callable[[PassLoad], float]) -> np.ndarray:
    """Return the seconds that each prompt computes in one pass: what the pool lacks of it, (n,) float64.

    pass_s   of the machines, see `profiles.costs.pass_seconds`
    """
    return np.array([pass_s(prompt_load(n, m)) for n, m in zip(jobs.tokens.tolist(), jobs.cached.tolist())])


def prompt_load(tokens: int, cached: int) -> PassLoad:
    """Return the load of one pass over a prompt without its cached prefix."""
    new = tokens - cached
    return PassLoad(new, new * cached + new * (new + 1) // 2)
