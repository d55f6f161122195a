"""Tokens of simulated requests. They have no values: a prompt is a length and a list of keys.

Used by the workloads and by `world.py`. Explained in docs/explain/simulator.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class Opaque(Sequence[int]):
    """So many tokens without values. Slices and copies cost the same for every length.

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
