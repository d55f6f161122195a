"""Fits the cost of forward passes to measured ones, by least squares, and states the error.

Used by `mooncake-lite profile`. Pure. Explained in docs/explain/emulation.md.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec
import numpy as np

from mooncake_lite.profiles.compute import ComputeCost, PassLoad, Terms


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


def fit(passes: Seq[MeasuredPass]) -> ComputeCost:
    """Fit the terms of prefill and of decode. Mixed passes take no part: they test the model.

    Raises ValueError with fewer than three passes of a kind.
    """
    prefill = [one for one in passes if one.kind == "prefill"]
    decode = [one for one in passes if one.kind == "decode"]
    return ComputeCost(
        _terms([(1, one.load.new_tokens, one.load.pairs) for one in prefill], prefill),
        _terms([(1, one.load.sequences, one.load.context) for one in decode], decode),
    )


def _terms(features: Seq[tuple[int, int, int]], passes: Seq[MeasuredPass]) -> Terms:
    """Solve for three terms that are not negative, with the least relative error.

    Each row is divided by its seconds, so that short passes count as much as long ones. A term that comes out
    negative is noise: it becomes 0, and the others are fitted again.
    """
    if len(passes) < 3:
        raise ValueError(f"{len(passes)} passes of a kind are too few to fit three terms")
    rows = np.array(features, np.float64) / np.array([[one.seconds] for one in passes])
    used = [0, 1, 2]
    while True:
        scale = np.linalg.norm(rows[:, used], axis=0)
        found = np.linalg.lstsq(rows[:, used] / scale, np.ones(len(rows)), rcond=None)[0] / scale
        if found.min() >= 0:
            break
        used.pop(int((found * scale).argmin()))
    terms = np.zeros(3)
    terms[used] = found
    return Terms(*terms.tolist())


class FitError(msgspec.Struct, frozen=True):
    """How far a fit is from its measurement, as shares of the measured seconds."""

    mean: float
    largest: float


def errors(cost: ComputeCost, passes: Seq[MeasuredPass]) -> dict[str, FitError]:
    """Return the error of each kind of pass that was measured."""
    shares: dict[str, list[float]] = {}
    for one in passes:
        share = abs(cost.seconds(one.load) - one.seconds) / one.seconds
        shares.setdefault(one.kind, []).append(share)
    return {kind: FitError(sum(found) / len(found), max(found)) for kind, found in shares.items()}
