"""Blocks with known bytes, for all tests of the store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Never

import numpy as np

from store.layout import BlockLayout
from store.tier import HDF5Tier

SMALL = BlockLayout(layers=2, kv_heads=1, block_tokens=16, head_dim=8, itemsize=4)  # 2048 B
FINGERPRINT = "0123456789abcdef"


def block_of(key: int, layout: BlockLayout = SMALL) -> np.ndarray:
    """The bytes that a block of this key has in every test, (nbytes,) uint8."""
    return np.random.default_rng(key).integers(0, 256, layout.nbytes, dtype=np.uint8)


def digest_of(key: int) -> int:
    return key * 7 + 1


def new_tier(
    folder: Path | str, capacity_bytes: int = 1 << 30, layout: BlockLayout = SMALL,
    fingerprint: str = FINGERPRINT, **options: Any,
) -> HDF5Tier:  # fmt: skip
    return HDF5Tier(folder, capacity_bytes, layout, fingerprint, **options)


def append(tier: HDF5Tier, key: int, now: float = 0.0) -> bool:
    """Append the block of this key."""
    block = block_of(key, tier.layout)
    return tier.append(key, digest_of(key), tier.layout.checksums(block), block, now)


def loaded(tier: HDF5Tier, key: int) -> bool:
    """Load a key and compare it with what it must be."""
    out = np.zeros(tier.layout.nbytes, np.uint8)
    sums = tier.load(key, out, digest_of(key))
    return bool((out == block_of(key, tier.layout)).all()) and sums == tier.layout.checksums(out)


def fill(tier: HDF5Tier, keys: Iterable[int]) -> None:
    """Append and seal."""
    for key in keys:
        append(tier, key)
    tier.seal()


def failing(number: int) -> Callable[..., Never]:
    """A system call that ends with this error."""

    def fail(*_: object, **__: object) -> Never:
        raise OSError(number, os.strerror(number))

    return fail
