"""Tokens of simulated requests: real ones in runs with faults, opaque lengths everywhere else.

Used by the workloads and by `kv.py`. A run with faults has short prompts of real tokens, and the answers that
the emulated engine gives to them, so that a rank that reads wrong KV answers with wrong tokens. In other runs
nobody looks at a token: a prompt is a length and a list of keys. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from mooncake_lite.engine import emulated
from mooncake_lite.engine.emulated import FIRST, emulated_token
from mooncake_lite.messages import Sampling
from scheduler.instance.step import Draw

VOCABULARY = 40
"""Tokens to choose from: an answer has some 40 of them, unless it is cut."""

STOP = 3
"""The token that ends answers."""

digest_after = lru_cache(1 << 16)(emulated.digest_after)
"""As the emulated engine has it. Client, rank, control plane and custody each ask for the same digests."""


def digests_of(token_ids: Sequence[int], before: int = FIRST) -> list[int]:
    """Return the emulated KV of each token. before: that of the token in front of them.

    The last digest of a block is its key in runs with faults: it stands for the block and all before it.
    """
    found = []
    for token in token_ids:
        before = digest_after(before, token)
        found.append(before)
    return found


def next_key(salt: Any, last_key: int | None, token_ids: Sequence[int]) -> int:
    """Return the key of a full block, as `scheduler.instance.state.NextKey`."""
    return digests_of(token_ids, FIRST if last_key is None else last_key)[-1]


def answer_of(last: int, sampling: Sampling, branch: int, max_tokens: int) -> list[int]:
    """Return a whole answer, without ranks, pages or a pool. last: the digest of the prompt's last token."""
    answer: list[int] = []
    draw = Draw(sampling, (), 0, frozenset({STOP}), branch)
    while len(answer) < max_tokens:
        token = emulated_token(last, draw, VOCABULARY)
        if token == STOP:
            break
        answer.append(token)
        last = digest_after(last, token)
    return answer


class Opaque(Sequence[int]):
    """So many tokens at which nobody looks. Slices and copies cost the same for every length.

    keys    of the full blocks of the whole text, from its first token on
    start   of these tokens in the text

    A token that is appended changes the length alone: `keys` has the keys of the answer from the beginning.
    """

    __slots__ = ("block_tokens", "keys", "length", "start")

    def __init__(self, keys: list[int], block_tokens: int, length: int, start: int = 0) -> None:
        self.keys, self.block_tokens, self.length, self.start = keys, block_tokens, length, start

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.length

    def __getitem__(self, index: Any) -> Any:
        """Return a slice as an Opaque. One token is always 0."""
        if not isinstance(index, slice):
            return 0
        first, end, _ = index.indices(self.length)
        return Opaque(self.keys, self.block_tokens, max(0, end - first), self.start + first)

    def __iter__(self) -> Iterator[int]:
        """Yield nothing of interest."""
        return iter((0,) * self.length)

    def __eq__(self, other: object) -> bool:
        """Tell whether two slices are the same tokens: the same stretch under the same key."""
        if not isinstance(other, Opaque):
            return NotImplemented
        same_stretch = (self.start, self.length) == (other.start, other.length)
        return same_stretch and self._last_key() == other._last_key()

    __hash__ = None  # type: ignore[assignment]

    def _last_key(self) -> int | None:
        blocks = (self.start + self.length) // self.block_tokens
        return self.keys[blocks - 1] if 0 < blocks <= len(self.keys) else None

    def append(self, token: int) -> None:
        """Make room for one more token."""
        self.length += 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Make room for more tokens."""
        self.length += len(tokens)

    def key(self) -> int:
        """Return the key of the block that ends with these tokens."""
        found = self._last_key()
        assert found is not None, "a text grows beyond its keys"
        return found


def opaque_key(salt: Any, last_key: int | None, token_ids: Sequence[int]) -> int:
    """Return the key of a full block of an opaque text, as `scheduler.instance.state.NextKey`."""
    assert isinstance(token_ids, Opaque)
    return token_ids.key()


def opaque_digest(token_ids: Sequence[int]) -> int:
    """Return a second digest of a full block of an opaque text."""
    assert isinstance(token_ids, Opaque)
    return token_ids.key() ^ 1
