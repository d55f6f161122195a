"""When a request that did not fit is tried again: when what it lacks was freed, and at no other event."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.room import Room
from tests.mooncake_lite.control.plane import BLOCK, LAYOUT, Plane, only

pytestmark = pytest.mark.quick


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the requests for which space is looked for."""
    names: list[str] = []
    reserve = Room.reserve

    def noted(self: Room, record: Any, now: float) -> Any:
        names.append(record.request_id)
        return reserve(self, record, now)

    monkeypatch.setattr(Room, "reserve", noted)
    return names


def put(plane: Plane, number: int, *keys: int) -> list[int]:
    """Grant places for blocks of rank 2; returns the ids of the objects."""
    before: list[tuple[int | None, int]] = [(None, 0) for _ in keys]
    effects = plane.on(ev.PutsWanted(2, 0, number, list(keys), list(keys), before, ["d"] * len(keys)))
    return [place.object_id for place in only(fx.GrantPuts, effects).places if place]


def test_a_deferred_request_is_not_tried_again_before_space_is_freed(tried: list[str]) -> None:
    plane = Plane(blocks=3)
    places = put(plane, 1, 91)
    put(plane, 2, 92)
    plane.arrive("b", 2 * BLOCK)
    assert tried == ["b"]
    for _ in range(20):
        plane.on(ev.PagesChanged(1, 0, [7], []))
        plane.on(ev.DecodeEnded(2, 0, "gone", 1))
        plane.on(ev.Tick())
    assert tried == ["b"]
    only(fx.StartPrefill, plane.on(ev.PutsEnded(2, 0, 1, [], [], places)))
    assert tried == ["b", "b"]


def test_a_deferred_request_is_not_tried_again_before_enough_space_is_freed(tried: list[str]) -> None:
    plane = Plane(blocks=8)
    places = [put(plane, number, 90 + number) for number in range(1, 9)]
    plane.arrive("b", 7 * BLOCK)
    for number in range(1, 7):
        plane.on(ev.PutsEnded(2, 0, number, [], [], places[number - 1]))
    assert tried == ["b"]
    only(fx.StartPrefill, plane.on(ev.PutsEnded(2, 0, 7, [], [], places[6])))


def test_a_decode_rank_without_space_keeps_no_request_from_another_one(tried: list[str]) -> None:
    roles = ["steward", *["prefill"] * 4, "decode", "decode"]
    control = Control(
        ControlConfig(layout=(2, 1, BLOCK, 8, 4, "none"), roles=roles, nodes=[0] * 7, mode="split")
    )
    for rank in range(1, 5):
        control.on(ev.RankJoined(rank, 0, rank, ("prefill",), 0, slots=1), 0.0)
    for rank in (5, 6):
        nbytes = 3 * LAYOUT.nbytes
        control.on(ev.RankJoined(rank, 0, rank, ("decode",), 0, slots=4, segment_bytes=nbytes), 0.0)
    control.on(ev.GatewayReady("gateway"), 0.0)
    started = {}
    for name, blocks in (("a", 3), ("b", 2), ("c", 3), ("d", 1)):
        effects = control.on(ev.RequestArrived(name, blocks * BLOCK, 4, [], []), 1.0)
        started |= {one.request_id: one for one in effects if isinstance(one, fx.StartPrefill)}
        control.check()
    assert [*started] == ["a", "b", "d"], "c waits for rank 5, which is full"
    for _ in range(20):
        control.on(ev.PagesChanged(1, 0, [7], []), 2.0)
    cancelled = started["b"]
    control.on(ev.RequestFailed(cancelled.rank, 0, "b", 1, "why"), 3.0)
    assert tried == ["a", "b", "c", "d"], "rank 6 has more space, and c waits for rank 5"
