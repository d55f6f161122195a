"""The forms of prefix sharing inside a rank, by the names that configurations use."""

from __future__ import annotations

from scheduler.instance.pages import Pages
from scheduler.instance.prefix import PrefixCache
from scheduler.instance.prefix_hash import HashPrefix
from scheduler.instance.prefix_radix import RadixPrefix

SHARING = ("off", "hash", "radix")


def new_prefix_cache(sharing: str, pages: Pages, block_tokens: int) -> PrefixCache:
    """Make an empty prefix cache over the pages of a rank. sharing: one of SHARING."""
    if sharing == "hash":
        return HashPrefix(pages, block_tokens)
    assert sharing in SHARING, f"sharing={sharing!r}"
    return RadixPrefix(pages, block_tokens) if sharing == "radix" else PrefixCache()
