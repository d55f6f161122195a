"""One request inside an engine: its tokens, its pages, how far its KV is computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from mooncake_lite.config import PAGE_TOKENS
from mooncake_lite.messages import Sampling


@dataclass(slots=True)
class Sequence:
    """A prompt, the answer so far, and where their KV lies.

        token_ids      prompt, then answer
        answered       how many of token_ids are answer
        num_computed   tokens whose KV is written, from the first one on
        pages          physical page of each logical page

    Invariant: num_computed <= len(pages) * PAGE_TOKENS and num_computed <= len(token_ids).
    """

    request_id: str
    token_ids: list[int]
    sampling: Sampling
    max_tokens: int
    stop_ids: frozenset[int]
    max_len: int
    answered: int = 0
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)

    def slots(self, start: int, end: int) -> list[int]:
        """Flat cache slot (page * PAGE_TOKENS + offset) of tokens start..end-1."""
        return [self.pages[t // PAGE_TOKENS] * PAGE_TOKENS + t % PAGE_TOKENS for t in range(start, end)]

    def append(self, token: int) -> str | None:
        """Take the next token of the answer; returns why the answer ends with it, or None.

        "stop": an end token, which is not part of the answer. "length": max_tokens or the context is full.
        """
        if token in self.stop_ids:
            return "stop"
        self.token_ids.append(token)
        self.answered += 1
        if self.answered >= self.max_tokens or len(self.token_ids) >= self.max_len:
            return "length"
        return None
