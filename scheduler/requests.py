"""The vocabulary of scheduling: a request, and the answers that it can get. Plain data.

Made by `mooncake_lite.control` (requests) and by the policies in `scheduler.placement` (answers). An instance
is a number that the caller chose; policies never see ranks. Explained in docs/explain/conductor.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec


class Request(msgspec.Struct, frozen=True):
    """Describe one request, as far as scheduling needs to know it.

    num_tokens     tokens to prefill, at least 1: the prompt, and the answer so far when it is resumed
    keys           prefix key of each full block (empty: nothing can be reused)
    block_tokens   tokens per block
    max_tokens     most tokens of the answer
    class_id       service class, 0 the highest: an index of the configured classes
    wait_limit_s   longest time that the client waits for its prefill to begin
    n              answers to the one prompt: each takes a decode slot, all on one instance
    tenant         that sent it; "" if none was named
    slo_ttft_s     time to first token that it asks for; inf: none
    slo_tbt_s      likewise, time between tokens
    arrived_s      when it came, or was preempted, on the caller's clock
    predicted_tokens   of one answer, as a predictor expects it: those that are still to come
    """

    request_id: str
    num_tokens: int
    keys: Sequence[int]
    block_tokens: int
    max_tokens: int
    class_id: int = 0
    wait_limit_s: float = inf
    n: int = 1
    tenant: str = ""
    slo_ttft_s: float = inf
    slo_tbt_s: float = inf
    arrived_s: float = 0.0
    predicted_tokens: float = 0.0

    @property
    def has_limit(self) -> bool:
        """Tell whether it asks for a limit on latency."""
        return min(self.slo_ttft_s, self.slo_tbt_s) < inf

    @property
    def context(self) -> float:
        """Return the tokens that each of its sequences attends to, in the mean over its answer."""
        return self.num_tokens + self.predicted_tokens / 2

    def cached_tokens(self, blocks: int) -> int:
        """Return the tokens that reused blocks save. The last token of a prompt is always computed."""
        return min(blocks * self.block_tokens, self.num_tokens - 1)


class Terms(msgspec.Struct, frozen=True):
    """Record the numbers that decided a placement, or those of one candidate. Times are predictions.

    score           what the policy minimised
    queue_s         until the prefill instance could begin
    transfer_s      for blocks that it reads from other nodes or from SSD
    prefill_s       for the tokens that it computes
    near_blocks     leading blocks in DRAM of its node, or in its pages
    reused_blocks   leading blocks that it would not compute
    best_blocks     leading blocks that the pool has anywhere
    decode_batch    sequences of the decode instance before this request
    tbt_s           of the decode instance with this request
    start_s         for blocks that it reads from DRAM of its node, and for messages; no policy compares it
    """

    score: float
    queue_s: float
    transfer_s: float
    prefill_s: float
    near_blocks: int
    reused_blocks: int
    best_blocks: int
    decode_batch: int
    tbt_s: float
    start_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Return the predicted time to the first token, from the decision on."""
        return self.queue_s + self.transfer_s + self.start_s + self.prefill_s


class Placement(msgspec.Struct, frozen=True):
    """Name the instances that serve a request.

    fetch           whether its prefix may come from other nodes and from SSD, or only what is near is reused
    cached_tokens   tokens that were expected to be reused when the choice was made
    terms           the numbers that decided
    """

    request_id: str
    prefill: int
    decode: int
    fetch: bool
    cached_tokens: int
    terms: Terms

    @property
    def most_blocks(self) -> int | None:
        """Return the most leading blocks to load when the prefill begins. None: all that exist then."""
        terms = self.terms
        return terms.reused_blocks if self.fetch and terms.reused_blocks < terms.best_blocks else None


class Wait(msgspec.Struct, frozen=True):
    """Tell that a request has no place now. Ask again when capacity frees."""

    request_id: str
    reason: str


class Rejection(msgspec.Struct, frozen=True):
    """Refuse a request, before its prefill or after it: HTTP 429, or 503 when no rank is left for a duty."""

    request_id: str
    reason: str
    retry_after_s: float
