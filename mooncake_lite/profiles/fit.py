"""Fits the cost of forward passes and of whole prompts to measured ones, by least squares.

Used by `mooncake-lite profile`. Pure. Explained in docs/explain/emulation.md.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec
import numpy as np

from mooncake_lite.profiles.compute import ComputeCost, PassLoad, Terms
from scheduler.costs import PrefillCost


class MeasuredPass(msgspec.Struct, frozen=True):
    """One measured pass. seconds: of the fastest of several runs."""

    load: PassLoad
    seconds: float

    @property
    def kind(self) -> str:
        """Return "prefill", "decode", or "mixed" for a pass with tokens of both."""
        if not self.load.sequences:
            return "prefill"
        return "mixed" if self.load.new_tokens else "decode"


class MeasuredPrompt(msgspec.Struct, frozen=True):
    """One measured prefill. seconds: of the fastest of several runs; cached: tokens of its reused prefix."""

    num_tokens: int
    cached: int
    seconds: float


def fit_prompts(prompts: Seq[MeasuredPrompt]) -> PrefillCost:
    """Fit the cost of whole prompts. Raises ValueError with fewer than four."""
    features = [
        (1, one.num_tokens - one.cached, pairs_of(one.num_tokens, one.cached), one.cached) for one in prompts
    ]
    return PrefillCost(*_least_squares(features, [one.seconds for one in prompts]))


def pairs_of(num_tokens: int, cached: int) -> int:
    """Return the (query, key) pairs of a prompt's attention after a cached prefix."""
    return (num_tokens - cached) * (num_tokens + cached + 1) // 2


def fit(passes: Seq[MeasuredPass]) -> ComputeCost:
    """Fit the terms of prefill and of decode. Mixed passes take no part: they test the model.

    Raises ValueError with fewer than three passes of a kind.
    """
    prefill = [one for one in passes if one.kind == "prefill"]
    decode = [one for one in passes if one.kind == "decode"]
    prefill_terms = _least_squares(
        [(1, one.load.new_tokens, one.load.pairs) for one in prefill], [one.seconds for one in prefill]
    )
    decode_terms = _least_squares(
        [(1, one.load.sequences, one.load.context) for one in decode], [one.seconds for one in decode]
    )
    return ComputeCost(Terms(*prefill_terms), Terms(*decode_terms))


def _least_squares(features: Seq[tuple[int, ...]], seconds: Seq[float]) -> list[float]:
    """Solve for terms that are not negative, with the least relative error.

    Each row is divided by its seconds, so that short passes count as much as long ones. A term that comes out
    negative is noise: it becomes 0, and the others are fitted again.
    """
    wanted = len(features[0]) if features else 1
    if len(features) < wanted:
        raise ValueError(f"{len(features)} passes of a kind are too few to fit {wanted} terms")
    rows = np.array(features, np.float64) / np.array(seconds)[:, None]
    used = list(range(wanted))
    while True:
        scale = np.linalg.norm(rows[:, used], axis=0)
        found = np.linalg.lstsq(rows[:, used] / scale, np.ones(len(rows)), rcond=None)[0] / scale
        if found.min() >= 0:
            break
        used.pop(int((found * scale).argmin()))
    terms = np.zeros(wanted)
    terms[used] = found
    return terms.tolist()


class FitError(msgspec.Struct, frozen=True):
    """How far a fit is from its measurement, as shares of the measured seconds."""

    mean: float
    largest: float


def error_of(cost: PrefillCost, prompts: Seq[MeasuredPrompt]) -> FitError:
    """Return the error over whole prompts."""
    shares = [abs(cost.seconds(one.num_tokens, one.cached) / one.seconds - 1) for one in prompts]
    return FitError(sum(shares) / len(shares), max(shares))


def errors(cost: ComputeCost, passes: Seq[MeasuredPass]) -> dict[str, FitError]:
    """Return the error of each kind of pass that was measured."""
    shares: dict[str, list[float]] = {}
    for one in passes:
        share = abs(cost.seconds(one.load) - one.seconds) / one.seconds
        shares.setdefault(one.kind, []).append(share)
    return {kind: FitError(sum(found) / len(found), max(found)) for kind, found in shares.items()}
