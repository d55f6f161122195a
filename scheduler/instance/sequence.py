"""A sequence: the tokens of one request, their pages, and how far their KV is computed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class Sequence:
    """A prompt, the answer so far, and where their KV lies.

        token_ids      prompt, then answer; opaque integers
        answered       number of token_ids that belong to the answer
        max_tokens     longest answer; 0: only the prompt's KV is wanted
        max_len        longest prompt and answer together
        stop_ids       tokens that end the answer
        num_computed   tokens whose KV is written, from the first one on
        pages          physical page of each logical page

    Invariant: num_computed <= len(token_ids), and the pages hold the first num_computed tokens.
    """

    token_ids: list[int]
    answered: int
    max_tokens: int
    max_len: int
    stop_ids: frozenset[int]
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def num_uncomputed(self) -> int:
        """Return the number of tokens whose KV is not written."""
        return len(self.token_ids) - self.num_computed

    def end_with(self, token: int) -> str | None:
        """Tell why the answer would end with this next token; None when it would go on.

        "stop": an end token, which is not part of the answer. "length": max_tokens or max_len is reached;
        with max_tokens 0, the token is not part of the answer either.
        """
        if self.max_tokens == 0:
            return "length"
        if token in self.stop_ids:
            return "stop"
        if self.answered + 1 >= self.max_tokens or len(self.token_ids) + 1 >= self.max_len:
            return "length"
        return None

    def append(self, token: int) -> str | None:
        """Append the next token, if it is part of the answer. Return why the answer ends with it, or None."""
        finish = self.end_with(token)
        if self.max_tokens and finish != "stop":
            self.token_ids.append(token)
            self.answered += 1
        return finish


class Drafter(Protocol):
    """Makes the drafts of one sequence (`drafts.py`). It may remember what it has read of it."""

    def after(self, sequence: Sequence, most: int) -> tuple[Seq[int], bool]:
        """Return at most so many tokens that may come next, and whether they are of a prediction."""
