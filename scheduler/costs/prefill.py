"""The time to compute a prompt: a polynomial in its length and in the length of its cached prefix.

Pure. The Mooncake paper fits T_prefill offline as such a polynomial and gives no formula (FAST'25, 4.1).
Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from typing import Any

import msgspec

from scheduler.columns import Column


class PrefillCost(msgspec.Struct, frozen=True):
    """Coefficients of the time to compute a prompt, all in seconds and at least 0.

    base_s               of any prompt
    per_token_s          of each computed token: the linear layers
    per_pair_s           of each (query, key) pair of its attention: a token at position p has p + 1
    per_cached_token_s   of each token of the cached prefix
    short_tokens         up to so many computed tokens, other kernels multiply, and the next two replace the
                         first two; 0: never
    short_base_s, short_per_token_s
    """

    base_s: float
    per_token_s: float
    per_pair_s: float = 0.0
    per_cached_token_s: float = 0.0
    short_tokens: int = 0
    short_base_s: float = 0.0
    short_per_token_s: float = 0.0

    def __post_init__(self) -> None:
        if not min(msgspec.structs.astuple(self)) >= 0:
            raise ValueError(f"{self}: every coefficient must be 0 or more")

    def seconds(self, num_tokens: Column, cached: Column) -> Any:
        """Return the seconds to compute the tokens after a cached prefix, alone on an instance.

        num_tokens   of the whole prompt
        cached       tokens of the prefix whose KV is there, less than num_tokens
        """
        half_s = 0.5 * self.per_pair_s  # n tokens have n (n + 1) / 2 pairs
        whole_s = num_tokens * (self.per_token_s + half_s * (num_tokens + 1))
        saved_s = cached * (self.per_token_s + half_s - self.per_cached_token_s + half_s * cached)
        seconds = self.base_s + whole_s - saved_s
        if not self.short_tokens:
            return seconds
        computed = num_tokens - cached
        less_s = self.base_s - self.short_base_s + computed * (self.per_token_s - self.short_per_token_s)
        return seconds - (computed <= self.short_tokens) * less_s

    def marginal_s(self, num_tokens: Column, cached: Column) -> Any:
        """Return the seconds that these tokens add to a prefill that takes place anyway."""
        pairs_per_token = 0.5 * (num_tokens + cached + 1)  # the mean of cached + 1 ... num_tokens
        return (num_tokens - cached) * (self.per_token_s + self.per_pair_s * pairs_per_token)
