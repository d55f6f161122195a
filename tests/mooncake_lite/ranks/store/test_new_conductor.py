"""A store rank and a new conductor: when the rank joins it, and what it tells of the blocks that it holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mooncake_lite import messages as m
from mooncake_lite.ranks.store.loop import StoreRole
from store.objects import HeldBlock
from store.tier import HDF5Tier
from tests.mooncake_lite.conductor.fake_hub import ROLES
from tests.store.samples import FINGERPRINT, SMALL

pytestmark = pytest.mark.quick


def told_by(order: m.Message, until: Callable[[list[Any]], bool], tier: HDF5Tier | None = None) -> list[Any]:
    """Have a store rank serve, with a second conductor from its second look at messages on.

    order   comes from the first conductor
    until   is asked with what the rank has told, at each further look; True ends it

    Returns what the rank has told.
    """
    told: list[Any] = []
    looks, terms = [[order]], [0, 1]
    ends_at = time.monotonic() + 20.0

    def receive(limit_s: float) -> list[Any]:
        if looks:
            return looks.pop()
        time.sleep(0.001)
        return [m.Stop("over", 0.0)] if until(told) or time.monotonic() > ends_at else []

    spoke: Any = SimpleNamespace(send=told.append, wake=lambda: None, receive=receive)
    engine: Any = SimpleNamespace(local=np.zeros(SMALL.nbytes, np.uint8))
    role = StoreRole(
        engine, spoke, tier, lambda: False, SMALL, ROLES, m.RankHello(3, "store", 0),
        lambda: terms.pop(0) if terms else 0,
    )  # fmt: skip
    role._reported_at = ends_at  # no counters are told
    role.run()
    role.close(5.0)
    return told


def has_joined(told: list[Any]) -> bool:
    return any(isinstance(message, m.RankHello) for message in told)


def test_all_blocks_that_a_rank_holds_are_told_and_the_last_message_says_so() -> None:
    refs = [m.BlockRef(number, 3, number * SMALL.nbytes, SMALL.nbytes) for number in range(1500)]
    blocks = [HeldBlock(ref, ref.object_id, 1, bytes(16), None, 0, 0) for ref in refs]
    told = told_by(m.HoldBlocks(3, blocks), has_joined)
    pieces = [message for message in told if isinstance(message, m.Inventory)]
    assert [block for piece in pieces for block in piece.blocks] == blocks
    assert [piece.last for piece in pieces] == [*[False] * (len(pieces) - 1), True]


def test_a_rank_joins_no_new_conductor_while_the_disk_still_writes_into_its_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, may_end, looks = HDF5Tier(tmp_path, 1 << 26, SMALL, FINGERPRINT), threading.Event(), iter(range(5))
    monkeypatch.setattr(tier, "load", lambda *_: may_end.wait(20.0) and None)

    def until(told: list[Any]) -> bool:
        if next(looks, None) is None:
            may_end.set()
        return has_joined(told)

    order = m.LoadBlocks(3, 7, [1], [1], [m.BlockRef(1, 3, 0, SMALL.nbytes)])
    told = [type(message) for message in told_by(order, until, tier)]
    assert told.index(m.BlocksLoaded) < told.index(m.RankHello)
