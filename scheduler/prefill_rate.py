"""The measured rate of prefill: seconds of computing per computed token.

Kept by `scheduler.state`; admission turns waiting tokens into a wait with it, and the pool turns blocks into
the cost of computing them again. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_GUESS_S_PER_TOKEN = 0.005
"""Rate before the first measurement. It shapes Retry-After only; no request is refused because of it."""

WEIGHT = 0.2
"""Weight of a new measurement in the moving average."""

FULL_WEIGHT_TOKENS = 256
FEWEST_TOKENS = 16
"""Each step of a model takes a fixed time, mostly to read its weights. A full hit computes one token, so its
seconds per token can be a hundred times those of a long prompt. A measurement below 16 tokens is therefore
ignored, and one below 256 has less weight in proportion, as in a mean over tokens."""


@dataclass(slots=True)
class PrefillRate:
    """A moving average over measurements, weighted by tokens.

    The average of w * rate is divided by the average of w, as in Adam's bias correction. The first
    measurement therefore counts alone, whatever its weight, and a heavier one soon outweighs it.
    """

    _weight: float = 0.0
    _weighted_s_per_token: float = 0.0

    def measured(self, computed_tokens: int, compute_s: float) -> None:
        """Add a measurement. Too few tokens, or no time, change nothing."""
        if computed_tokens < FEWEST_TOKENS or compute_s <= 0:
            return
        weight = WEIGHT * min(1.0, computed_tokens / FULL_WEIGHT_TOKENS)
        self._weight += weight * (1.0 - self._weight)
        self._weighted_s_per_token += weight * (compute_s / computed_tokens - self._weighted_s_per_token)

    @property
    def is_measured(self) -> bool:
        """Tell whether there was a measurement."""
        return self._weight > 0

    @property
    def s_per_token(self) -> float:
        """Return the average, or a guess before the first measurement."""
        return self._weighted_s_per_token / self._weight if self._weight else FIRST_GUESS_S_PER_TOKEN
