"""The next token from one row of logits.

Called by `engine.Engine`, on whichever rank holds the request. The draw is a function of (seed, position)
alone: a request that moves to another rank goes on with the same tokens.
"""

from __future__ import annotations

import numpy as np

from mooncake_lite.messages import Sampling

CANDIDATES = 1024
"""Sorting a whole vocabulary costs milliseconds; the tokens that top_p keeps are nearly always among
the best 1024. When they are not, everything is sorted."""


def sample(logits: np.ndarray, sampling: Sampling, position: int) -> int:
    """Token id chosen from `logits` (vocab,) float32 for the answer's token at `position` of the sequence.

    Greedy at temperature 0 (the lowest id among equals). Otherwise softmax(logits / temperature), cut to the
    top_k best, then to the smallest set of best tokens whose probabilities reach top_p (nucleus sampling,
    Holtzman et al. 2020).
    """
    if sampling.temperature == 0.0:
        return int(np.argmax(logits))
    behind = logits.astype(np.float64) - float(logits.max())
    with np.errstate(over="ignore"):  # a very small temperature: infinitely far behind the best
        weights = np.exp(behind / sampling.temperature)
    uniform = _uniform(sampling.seed, position)
    if sampling.top_k <= 0 and sampling.top_p >= 1.0:
        return _pick(weights, uniform)
    ids = _best_first(weights, sampling)
    return int(ids[_pick(weights[ids], uniform)])


def _best_first(weights: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Ids that survive top_k and top_p, best first; equal weights by ascending id."""
    keep = sampling.top_k if sampling.top_k > 0 else len(weights)
    count = min(len(weights), min(keep, CANDIDATES) if sampling.top_p < 1.0 else keep)
    ids = _top(weights, count)
    if sampling.top_p < 1.0:
        total = weights[_top(weights, keep)].sum() if keep < len(weights) else weights.sum()
        reached = np.cumsum(weights[ids])
        if reached[-1] < sampling.top_p * total and count < keep:
            ids = _top(weights, min(keep, len(weights)))
            reached = np.cumsum(weights[ids])
        cut = int(np.searchsorted(reached, sampling.top_p * total)) + 1
        ids = ids[:cut]
    return ids


def _top(weights: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest weights, largest first, equal ones by ascending id."""
    if count < len(weights):
        threshold = np.partition(weights, -count)[-count]
        ids = np.flatnonzero(weights >= threshold)
    else:
        ids = np.arange(len(weights))
    return ids[np.argsort(-weights[ids], kind="stable")][:count]


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a counter-based generator (Philox, Salmon et al. 2011)."""
    generator = np.random.Philox(key=seed % 2**64, counter=position)
    return float(np.random.Generator(generator).random())


def _pick(weights: np.ndarray, uniform: float) -> int:
    """Index i with probability weights[i] / sum(weights), by inversion."""
    reached = np.cumsum(weights)
    return min(int(np.searchsorted(reached, uniform * reached[-1], side="right")), len(weights) - 1)
