"""The time of one decode step: the whole batch gets one token each.

Pure. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from typing import Any

import msgspec

from scheduler.columns import Column


class DecodeCost(msgspec.Struct, frozen=True):
    """Coefficients of the time of a decode step, all in seconds and at least 0.

    base_s           of any step: it reads the weights once
    per_sequence_s   of each sequence in the batch: the arithmetic of its token
    per_key_s        of each token of context, summed over the batch: its KV is read
    """

    base_s: float
    per_sequence_s: float
    per_key_s: float

    def __post_init__(self) -> None:
        if not min(self.base_s, self.per_sequence_s, self.per_key_s) >= 0:
            raise ValueError(f"{self}: every coefficient must be 0 or more")

    def step_s(self, batch: Column, context_tokens: Column, steps: int = 1) -> Any:
        """Return the seconds of a step, or of several from the sums of batch and context over them.

        batch            sequences
        context_tokens   tokens of all sequences together
        """
        return steps * self.base_s + self.per_sequence_s * batch + self.per_key_s * context_tokens
