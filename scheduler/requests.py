"""What the Conductor is asked, and what it answers. Plain data, made by whoever drives it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as far as scheduling needs to know it.

    num_tokens     prompt tokens
    keys           prefix key of each full block of the prompt (empty: nothing can be reused)
    block_tokens   tokens of one block
    max_tokens     tokens of the answer, at most
    """

    request_id: str
    num_tokens: int
    keys: tuple[int, ...]
    block_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Which ranks serve a request. `cached_tokens` is what was expected to be reused at that moment."""

    request_id: str
    prefill: int
    decode: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Rejection:
    """The request is refused before any work is spent on it (HTTP 429)."""

    request_id: str
    reason: str
    retry_after_s: float
