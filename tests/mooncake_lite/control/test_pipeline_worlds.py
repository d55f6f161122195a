"""Worlds with pipelines: whatever goes wrong, every request ends once, and a mistake is noticed.

test_faults.py draws some of them too. Here all of them have pipelines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from mooncake_lite.control import Control
from mooncake_lite.control import events as ev
from scheduler.instance import Late, progress
from tests.worlds.faults import Faults
from tests.worlds.planted import Mistake, assert_noticed
from tests.worlds.setting import DrawnSetting
from tests.worlds.world import FaultWorld

DEATHS = Faults(rank_lost=1.0)
REQUESTS = 40


def has_pipelines(seed: int) -> bool:
    return "stage" in DrawnSetting.drawn(seed, REQUESTS).shape.config.roles


def seeds(count: int, *first: int) -> Iterator[int]:
    """The first seeds whose worlds have pipelines, after those that are named."""
    yield from first
    number = 0
    for seed in range(100 * count):
        if has_pipelines(seed) and number < count:
            number += 1
            yield seed


def run_all(some: Iterable[int], faults: Faults | None = None, observe: Any = None) -> list[FaultWorld]:
    worlds = []
    for seed in some:
        worlds.append(
            FaultWorld.drawn(seed, num_requests=REQUESTS, check_every=25, faults=faults, observe=observe)
        )
        worlds[-1].run()
    return worlds


def test_a_drawn_pipeline_stands_in_place_of_each_prefill_rank_and_on_its_node() -> None:
    for seed in seeds(10):
        shape = DrawnSetting.drawn(seed, REQUESTS).shape
        config = shape.config
        assert len(config.nodes) == len(shape.segments) == len(config.roles)
        lengths = set()
        for first in config.ranks_of("prefill"):
            pipeline = config.instance_of(first)
            lengths.add(len(pipeline))
            assert len({config.nodes[rank] for rank in pipeline}) == 1
            assert [shape.segments[rank] for rank in pipeline[1:]] == [0] * (len(pipeline) - 1)
            assert shape.rank_state(first, lambda *_: 0).limits.late
        assert lengths in ({2}, {3})


def test_without_faults_pipelines_answer_every_request_that_fits() -> None:
    ends = [
        end
        for world in run_all(seeds(5), Faults.none())
        for one in world.requests.values()
        for end in one.ends
    ]
    assert set(ends) <= {"finished", "rejected"}
    assert ends.count("finished") > REQUESTS


def test_every_request_to_pipelines_ends_once_whatever_goes_wrong() -> None:
    run_all(seeds(6), Faults(poisoned=1.0))


def test_no_client_of_pipelines_gets_a_wrong_token_whichever_ranks_die() -> None:
    lost: list[ev.RankLost] = []

    def observe(event: Any, now: float, effects: Any) -> None:
        if isinstance(event, ev.RankLost):
            lost.append(event)

    deaths, terms = set(), 0
    for seed in seeds(5, 41, 113, 127, 438):
        lost.clear()
        (world,) = run_all([seed], DEATHS, observe)
        config, terms = world.shape.config, max(terms, world.term)
        gone = {event.rank for event in lost}
        for event in lost:
            deaths.add(config.roles[event.rank])
            if world.stopped is None:
                assert gone.issuperset(config.instance_of(event.rank)), "part of a pipeline lives on"
    assert deaths >= {"prefill", "stage", "decode"}
    assert terms, "no conductor has died"


def nothing_more(self: Control, *_: Any) -> None:
    """Do not kill the others."""


END_OTHERS = Control._end_others


def not_at_first(self: Control, *lost: Any) -> None:
    """Kill the others, but not those of a pipeline whose loss an earlier conductor was told of."""
    if hasattr(self, "_handlers"):
        END_OTHERS(self, *lost)


def forgotten(*_: Any) -> list[Late]:
    return []


MISTAKES = {
    "a stage dies alone": Mistake(Control, "_end_others", nothing_more, 7, DEATHS),
    "a new conductor lets the rest of a pipeline live": Mistake(
        Control, "_end_others", not_at_first, 3168, DEATHS
    ),
    "late tokens are forgotten": Mistake(progress, "_come_late", forgotten, 7),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_world_with_pipelines_notices_a_mistake_about_them(
    mistake: str, monkeypatch: pytest.MonkeyPatch, soak: int
) -> None:
    planted = MISTAKES[mistake]

    def play(seed: int) -> None:
        if has_pipelines(seed):
            run_all([seed], planted.faults)

    assert_noticed(planted, play, soak, monkeypatch)
