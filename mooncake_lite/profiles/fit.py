"""Fits the cost of forward passes and of whole prompts to measured ones, by least squares.

Used by `mooncake-lite profile`. Pure. Explained in docs/explain/emulation.md.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import msgspec
import numpy as np

from mooncake_lite.profiles.compute import CHUNK_TOKENS, ComputeCost, PassLoad, PassTerms
from scheduler.costs import PrefillCost

GAIN = 0.5
"""Two ranges of tokens must bring the squared error below this share of that of one range. The two terms more
would otherwise fit noise."""


class _Few(NamedTuple):
    """The terms of passes of few tokens: see `short_tokens` of compute.PassTerms."""

    tokens: int = 0
    base_s: float = 0.0
    per_token_s: float = 0.0


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
    (base_s, token_s, pair_s, cached_s), few = _in_two_ranges(features, [one.seconds for one in prompts])
    return PrefillCost(base_s, token_s, pair_s, cached_s, *few)


def pairs_of(num_tokens: int, cached: int) -> int:
    """Return the (query, key) pairs of a prompt's attention after a cached prefix."""
    return (num_tokens - cached) * (num_tokens + cached + 1) // 2


def fit(passes: Seq[MeasuredPass]) -> ComputeCost:
    """Fit the terms of prefill and of decode, and then the base of mixed passes, where some were measured.

    Raises ValueError with fewer than three passes of prefill or of decode.
    """
    prefill = [one for one in passes if one.kind == "prefill"]
    decode = [one for one in passes if one.kind == "decode"]
    (base_s, token_s, key_s), few = _in_two_ranges(
        [(1, one.load.new_tokens, one.load.pairs) for one in prefill], [one.seconds for one in prefill]
    )
    step_s, sequence_s, context_s = _least_squares(
        [(1, one.load.sequences, one.load.context) for one in decode], [one.seconds for one in decode]
    )
    cost = ComputeCost(PassTerms(base_s, token_s, key_s, *few), PassTerms(step_s, sequence_s, context_s))
    return with_mixed_base(cost, passes)


def with_mixed_base(cost: ComputeCost, passes: Seq[MeasuredPass]) -> ComputeCost:
    """Return a cost with the base of mixed passes that has the least squared relative error over them.

    Their tokens cost what they do in passes of one kind. Those of few tokens have no such base.
    """
    few = cost.prefill.short_tokens
    mixed = [one for one in passes if one.kind == "mixed" and one.load.new_tokens + one.load.sequences > few]
    if not mixed:
        return cost
    tokens_alone = msgspec.structs.replace(cost, mixed_base_s=0.0)
    seconds = np.array([one.seconds for one in mixed])
    left_s = seconds - np.array([tokens_alone.seconds(one.load) for one in mixed])
    base_s = float(np.sum(left_s / seconds**2) / np.sum(1 / seconds**2))
    return msgspec.structs.replace(cost, mixed_base_s=max(0.0, base_s))


def _in_two_ranges(features: Seq[tuple[int, ...]], seconds: Seq[float]) -> tuple[list[float], _Few]:
    """Fit the first two terms, of a base and of tokens, apart for few tokens and for many.

    features   (1, tokens, others...) of each row

    Returns the terms, and those of few tokens. Few are less than a chunk, and each range has at least two
    numbers of tokens.
    """
    terms = _least_squares(features, seconds)
    found, least = (terms, _Few()), GAIN * _squared_error(features, terms, seconds)
    for limit in sorted({row[1] for row in features})[1:-2]:
        if limit >= CHUNK_TOKENS:
            break
        split = [_by_range(row, row[1] <= limit) for row in features]
        terms = _least_squares(split, seconds)
        error = _squared_error(split, terms, seconds)
        if error < least:
            found, least = (terms[:-2], _Few(limit, *terms[-2:])), error
    return found


def _by_range(row: tuple[int, ...], is_short: bool) -> tuple[int, ...]:
    """Move the first two features of a row to its end if it is of few tokens; zeros take their place."""
    one, tokens, *others = row
    return (0, 0, *others, one, tokens) if is_short else (one, tokens, *others, 0, 0)


def _squared_error(features: Seq[tuple[int, ...]], terms: Seq[float], seconds: Seq[float]) -> float:
    """Return the sum of the squared relative errors."""
    shares = np.array(features, np.float64) @ np.array(terms) / np.array(seconds) - 1
    return float(shares @ shares)


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
