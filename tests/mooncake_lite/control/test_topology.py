"""What the control plane loads under the policy topology: the nearest copies, no more than was counted."""

from __future__ import annotations

import msgspec
import pytest

from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import events as ev
from mooncake_lite.control.effects import StartPrefill
from scheduler import CostConfig
from scheduler.costs import LoadCost, PrefillCost, TransferCost
from store.objects import Wanted

pytestmark = pytest.mark.quick

BLOCK_BYTES = 1024
KEYS = [11, 12, 13, 14]
CONFIG = ControlConfig(
    layout=(2, 1, 16, 4, 4, "none"),
    roles=["steward", "prefill", "decode", "store", "store"],
    nodes=[0, 0, 0, 1, 2],
    racks=[0, 1, 0],
    policy="topology",
    costs=CostConfig(
        prefill=PrefillCost(0.0, 0.01),
        transfer=TransferCost(1e9, 0.0),
        load=LoadCost(1e9, 1e9, 0.0),
        is_guess=False,
    ),
)


def loads(config: ControlConfig, far: list[int], in_rack: list[int]) -> list[int]:
    """Return the ranks that a prompt of KEYS is loaded from. Rank 3 has `far`, rank 4 copies of `in_rack`."""
    control = Control(config)
    for rank, role in enumerate(config.roles):
        nbytes = 16 * BLOCK_BYTES if role == "store" else 0
        if rank:
            control.on(ev.RankJoined(rank, 0, rank, (role,), config.nodes[rank], 4, nbytes), 0.1)  # type: ignore[arg-type]
    control.on(ev.GatewayReady("gateway"), 0.2)
    directory = control.directory
    for key in far:
        (obj,) = directory.allocate_many("writer", [Wanted(BLOCK_BYTES, key, key)], now=0.3, rank=3)
        directory.put_end(obj.object_id, [1, 2], 0.3)
        if key in in_rack:
            copy = directory.put_copy(obj.object_id, now=0.3, rank=4)
            directory.put_end(copy.object_id, [1, 2], 0.3)
    control.on(ev.Tick(), 0.4)
    effects = control.on(ev.RequestArrived("a", 70, 4, KEYS, KEYS), 1.0)
    (order,) = (effect for effect in effects if isinstance(effect, StartPrefill))
    return [ref.rank for ref in order.load]


@pytest.mark.parametrize(("racks", "ranks"), [([0, 1, 0], [4, 4, 4, 4]), ([0, 0, 1], [3, 3, 3, 3])])
def test_of_two_copies_that_in_the_readers_rack_is_read(racks: list[int], ranks: list[int]) -> None:
    assert loads(msgspec.structs.replace(CONFIG, racks=racks), KEYS, KEYS) == ranks


def test_what_is_in_the_rack_is_read_there_and_the_rest_from_afar() -> None:
    assert loads(CONFIG, KEYS, KEYS[:2]) == [4, 4, 3, 3]


def test_blocks_that_are_too_far_are_not_loaded() -> None:
    """A block takes 0.16 s to compute, 1 ms from the rack and 1 s from elsewhere."""
    slow = TransferCost(BLOCK_BYTES, 0.0, 1000.0 * BLOCK_BYTES)
    costs = msgspec.structs.replace(CONFIG.costs, transfer=slow)
    assert loads(msgspec.structs.replace(CONFIG, costs=costs), KEYS, KEYS[:2]) == [4, 4]
    assert loads(msgspec.structs.replace(CONFIG, costs=costs), KEYS, []) == []
