"""The vocabulary of scheduling: a request, and the answers that it can get. Plain data.

Made by `mooncake_lite.control` (requests) and by the policies in `scheduler.placement` (answers). An instance
is a number that the caller chose; policies never see ranks. Explained in docs/explain/paper.md, "Scheduling".
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
    class_id       priority class; the first policy ignores it
    wait_limit_s   longest time that the client waits for its prefill to begin
    n              answers to the one prompt: each takes a decode slot, all on one instance
    """

    request_id: str
    num_tokens: int
    keys: Sequence[int]
    block_tokens: int
    max_tokens: int
    class_id: int = 0
    wait_limit_s: float = inf
    n: int = 1


class Terms(msgspec.Struct, frozen=True):
    """Record the numbers that decided a placement.

    pending_tokens   uncached tokens that the prefill instance had to compute before this request
    num_tokens       tokens of the request
    near_tokens      leading tokens of the request in the DRAM of the prefill instance's node, or in its pages
    score            what the policy minimised, in tokens
    decode_used      decode slots of the decode instance that were taken before this request
    decode_slots     all decode slots of the decode instance
    """

    pending_tokens: int
    num_tokens: int
    near_tokens: int
    score: int
    decode_used: int
    decode_slots: int


class Placement(msgspec.Struct, frozen=True):
    """Name the instances that serve a request.

    cached_tokens   tokens that were expected to be reused when the choice was made
    terms           the numbers that decided
    """

    request_id: str
    prefill: int
    decode: int
    cached_tokens: int
    terms: Terms


class Wait(msgspec.Struct, frozen=True):
    """Tell that a request has no place now. Ask again when capacity frees."""

    request_id: str
    reason: str


class Rejection(msgspec.Struct, frozen=True):
    """Refuse a request before any work is spent on it (HTTP 429)."""

    request_id: str
    reason: str
    retry_after_s: float
