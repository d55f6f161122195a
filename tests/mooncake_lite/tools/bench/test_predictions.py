"""The benchmark of predictions: its requests, what it compares, and what its rows say."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_lite.conductor.recording import Recorder
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import events as ev
from mooncake_lite.tools.bench import predictions
from mooncake_lite.tools.bench.cluster import Ask, Reply
from mooncake_lite.tools.bench.predictions import (
    MAX_TOKENS,
    Compared,
    Workload,
    compared,
    predicted_ttft_s,
    rows,
)
from scheduler.costs import CostConfig, PrefillCost
from tests import emulation

pytestmark = pytest.mark.quick


def test_equal_seeds_make_equal_requests_of_mixed_length_that_share_beginnings() -> None:
    asks = Workload(1000, 3).asks(200, 0.5)
    assert asks == Workload(1000, 3).asks(200, 0.5)
    lengths = [len(ask.prompt) for ask in asks]
    assert 64 <= min(lengths) < 150
    assert 900 < max(lengths) <= MAX_TOKENS
    beginnings = [tuple(ask.prompt[:64]) for ask in asks]
    assert 60 < len(set(beginnings)) < 120, "a third are alone, the others share 16 beginnings"
    assert asks[-1].at_s == pytest.approx(100, rel=0.25)
    others = {tuple(ask.prompt[:64]) for ask in Workload(1000, 4).asks(200)}
    assert not others & set(beginnings)


def test_the_time_that_a_request_was_held_is_part_of_its_prediction(tmp_path: Path) -> None:
    """10 ms per token; the decode rank has one slot, so the second request is placed when the first ends."""
    costs = CostConfig(prefill=PrefillCost(0.0, 0.01), is_guess=False)
    roles = ["steward", "prefill", "decode", "store"]
    config = ControlConfig(layout=(2, 1, 16, 4, 4, "none"), roles=roles, nodes=[0] * 4, costs=costs)
    control, recorder = Control(config), Recorder(tmp_path / "run", config)
    steps: list[tuple[float, ev.Event]] = [
        (0.0, ev.RankJoined(1, 0, 1, ("prefill",), 0, 1, 0)),
        (0.0, ev.RankJoined(2, 0, 2, ("decode",), 0, 1, 0)),
        (0.0, ev.RankJoined(3, 0, 3, (), 0, 0, 1 << 20)),
        (0.0, ev.GatewayReady("gateway")),
        (1.0, ev.RequestArrived("a", 100, 8, [], [])),
        (2.0, ev.RequestArrived("b", 50, 8, [], [])),
        (3.0, ev.RequestCancelled("a")),
        (4.0, ev.RequestFailed(1, 0, "a", 1, "cancelled")),
    ]
    for now, event in steps:
        recorder.record(event, now, control.on(event, now))
    recorder.close()
    assert predicted_ttft_s(tmp_path / "run") == pytest.approx({"a": 1.0, "b": 2.0 + 0.5})


def reply(request_id: str, ttft_s: float, **cached: int) -> Reply:
    return Reply(Ask(0.0, [1], 2), 0.0, 200, request_id, ttft_s, trace={"cached_tokens": cached})


def test_a_request_counts_for_the_slowest_tier_that_it_reused() -> None:
    replies = [
        reply("a", 2.0, dram=0, ssd=0),
        reply("b", 2.0, pages=64, dram=0, ssd=0),
        reply("c", 2.0, pages=64, dram=64, ssd=0),
        reply("d", 2.0, dram=64, ssd=64),
    ]
    found = compared(replies, dict.fromkeys("abcd", 1.5))
    assert [one.tier for one in found] == ["", "pages", "dram", "ssd"]
    assert [one.error for one in found] == [0.25] * 4


def test_rows_have_the_goal_of_their_replay_and_a_guess_that_knows_no_request() -> None:
    found = [Compared("", 1.1, 1.0), Compared("ssd", 0.9, 1.0), Compared("", 1.0, 4.0)]
    alone = {row.name.partition(": ")[2]: row for row in rows(predictions.ALONE, found)}
    share = alone["predictions within 20% of measured TTFT"]
    assert (share.ours, share.runs) == (pytest.approx(200 / 3), 3)
    assert share.peer.value == pytest.approx(200 / 3), "the median, 1 s, is right twice"
    assert share.limit == predictions.GOAL_SHARE
    assert alone["median error"].ours == pytest.approx(10)
    assert alone["median error"].limit is None
    by_tier = {row.name: (row.ours, row.runs) for row in rows(predictions.TOGETHER, found)[2:]}
    assert by_tier == {
        "overlapping, nothing reused: median error": (pytest.approx((10 + 75) / 2), 2),
        "overlapping, SSD reused: median error": (pytest.approx(10), 1),
    }
    assert rows(predictions.TOGETHER, found)[1].limit == predictions.GOAL_ERROR


def test_the_cluster_has_less_memory_than_its_prompts_and_enough_for_each(tmp_path: Path) -> None:
    folder = emulation.model_folder(tmp_path / "model")
    flags = predictions.cluster_flags(folder)
    given = dict(zip(flags[1::2], map(int, flags[2::2])))
    token_nbytes = 3 * 2 * 2 * 32 * 4
    assert given["--kv-cache-bytes"] == predictions.PAGES_TOKENS * token_nbytes
    assert predictions.PAGES_TOKENS >= given["--max-model-len"] >= MAX_TOKENS
    all_tokens = sum(len(ask.prompt) for ask in Workload(1000, 1).asks(200))
    assert predictions.PAGES_TOKENS < predictions.POOL_TOKENS < all_tokens
    assert ServeConfig(model=str(folder)).block_size == 64
