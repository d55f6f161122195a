"""Tiers that are closed when their test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from store.tier import HDF5Tier
from tests.store.samples import new_tier


@pytest.fixture
def tier_at() -> Iterator[Callable[..., HDF5Tier]]:
    """Opens tiers as `new_tier` does."""
    with ExitStack() as opened:

        def begin(folder: Path, *sizes: int, **options: Any) -> HDF5Tier:
            tier = new_tier(folder, *sizes, **options)
            opened.callback(tier.close)
            return tier

        yield begin


@pytest.fixture
def tier(tier_at: Callable[..., HDF5Tier], tmp_path: Path) -> HDF5Tier:
    return tier_at(tmp_path)
