"""The pages of one rank's KV cache, and who holds them.

Used by `engine.Engine`. It knows page numbers and tokens, not requests' contents.
"""

from __future__ import annotations

import torch

from mooncake_lite.config import PAGE_TOKENS
from mooncake_lite.model import ModelConfig


class OutOfPages(Exception):
    """Fewer pages are free than wanted; the caller preempts somebody or waits."""

    def __init__(self, needed: int, free: int):
        super().__init__(f"{needed} KV pages are needed, {free} are free")
        self.needed = needed
        self.free = free


class PagePool:
    """Which of `num_pages` pages are free.

    Invariant: free pages are distinct, and with the pages handed out they are all of them.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages, now owned by the caller. Raises OutOfPages, and then takes none."""
        if count > len(self._free):
            raise OutOfPages(count, len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        self._held.update(pages)
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Return pages that were taken; returning one twice is our own bug."""
        for page in pages:
            assert page in self._held, f"page {page} is given back but was not taken"
            self._held.remove(page)
            self._free.append(page)

    def check(self) -> None:
        """Assert the invariant."""
        assert sorted([*self._free, *self._held]) == list(range(self.num_pages))


def pages_for(num_tokens: int) -> int:
    """Pages that hold the KV of num_tokens tokens."""
    return -(-num_tokens // PAGE_TOKENS)


def new_caches(config: ModelConfig, num_pages: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """KV pages of all layers, one array: (layers, 2, pages, kv_heads, PAGE_TOKENS, head_dim).

    Left uninitialised: the system gives memory to a page when it is first written, and no kernel reads
    a slot before that.
    """
    shape = (config.layers, 2, num_pages, config.kv_heads, PAGE_TOKENS, config.head_dim)
    return torch.empty(shape, dtype=dtype, device=device)
