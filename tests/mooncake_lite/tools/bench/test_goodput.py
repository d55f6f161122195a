"""The benchmark of goodput: its loads, what counts as good, the search for the capacity, and its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.errors import ConfigError
from mooncake_lite.profiles.compute import ComputeCost, PassTerms
from mooncake_lite.tools.bench import goodput
from mooncake_lite.tools.bench.cluster import GIVEN_UP, Ask, Reply, scaled_profile
from mooncake_lite.tools.bench.goodput import Bench, Cell, GoodputPlan, cell_rows
from mooncake_lite.tools.bench.goodput_load import NEW_TOKENS, PROMPT_TOKENS, Load, Served, served, thirds
from tests import emulation

pytestmark = pytest.mark.quick

LOAD = Load(rate=20.0, warm_s=2.0, window_s=8.0)


def reply(at_s: float, status: int, ttft_s: float, whole_s: float) -> Reply:
    return Reply(Ask(at_s, [1], 11), at_s, status, "", ttft_s, whole_s)


def test_every_form_of_admission_gets_the_same_requests_at_random_times() -> None:
    asks = LOAD.asks(1000, 0)
    assert asks == LOAD.asks(1000, 0)
    assert len(asks) == pytest.approx(200, rel=0.25)
    assert all(PROMPT_TOKENS[0] <= len(ask.prompt) <= PROMPT_TOKENS[1] for ask in asks)
    assert all(NEW_TOKENS[0] <= ask.new_tokens <= NEW_TOKENS[1] for ask in asks)
    assert len({tuple(ask.prompt[:8]) for ask in asks}) == len(asks)
    assert 0 < asks[0].at_s < asks[-1].at_s < 10.0


def test_a_request_is_good_if_it_was_sent_in_the_window_and_kept_both_limits() -> None:
    replies = [
        reply(1.9, 200, 0.5, 1.0),  # before the window
        reply(2.0, 200, 1.0, 2.0),  # just within both limits
        reply(3.0, 200, 1.1, 1.5),  # the first token is late
        reply(3.0, 200, 0.5, 1.6),  # the others are
        reply(4.0, GIVEN_UP, 0.0, 0.0),
        reply(5.0, 429, 0.02, 0.03),
        reply(6.0, 429, 0.04, 0.05),
    ]
    found = served(replies, LOAD, 1.0, 0.1)
    assert found == Served(6, 2, 1, 8.0, pytest.approx(0.03))
    assert (found.goodput, found.good_share) == (1 / 8, 1 / 6)


def bench(tmp_path: Path, plan: GoodputPlan) -> Bench:
    """A bench of a model whose prefill takes 1 ms per token."""
    folder = emulation.model_folder(tmp_path / "model")
    cost = ComputeCost(prefill=PassTerms(0.0, 1e-3, 0.0), decode=emulation.COST.decode)
    return Bench(folder, emulation.profile_of(folder, cost), plan)


def test_the_capacity_is_found_by_bisection_below_what_prefill_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, told = [], []

    @contextlib.contextmanager
    def cluster(*_: Any) -> Iterator[None]:
        yield None

    def offer(_: Bench, __: object, load: Load) -> tuple[Served, dict[str, Sequence[int]]]:
        tried.append(load.rate)
        return Served(100, 0, 90 if load.rate <= 19.3 else 89, 10.0, None), {}

    monkeypatch.setattr(goodput, "sleepers", cluster)
    monkeypatch.setattr(Bench, "_offer", offer)
    measured = bench(tmp_path, GoodputPlan(probes=8))
    assert measured.estimate() == pytest.approx(6 / 0.256)
    found = measured.capacity(lambda: told.append(1))
    assert 19.2 < found <= 19.3
    assert len(tried) == len(told) == 8
    assert bench(tmp_path, GoodputPlan(probes=0)).capacity(lambda: None) == pytest.approx(0.7 * 6 / 0.256)


def test_rows_compare_with_no_admission_and_with_the_best_and_tell_of_refusals() -> None:
    cells = [
        Cell("none", 1.0, Served(100, 0, 50, 10.0, None)),
        Cell("none", 10.0, Served(1000, 0, 5, 10.0, None)),
        Cell("shed", 10.0, Served(1000, 940, 45, 10.0, 0.02)),
    ]
    plain, _, shed, refusal = cell_rows(cells)
    assert (plain.ours, plain.peer, plain.limit) == (5.0, None, goodput.Other("the best of all", 5.0))
    assert shed.name == "goodput at 10 x capacity, shed"
    assert (shed.ours, shed.peer, shed.runs) == (4.5, goodput.Other("none", 0.5), 1000)
    assert shed.ratio(shed.limit) == pytest.approx(0.9)
    assert (refusal.ours, refusal.unit, refusal.runs) == (pytest.approx(20.0), "ms", 940)
    assert refusal.ratio(refusal.limit) == pytest.approx(2.5)


def test_memory_is_compared_between_the_middle_and_the_end_of_a_run() -> None:
    assert thirds([1, 9, 4, 6, 7, 9, 20]) == (5.0, pytest.approx(12.0))


def test_the_profile_is_the_shipped_one_with_other_times(tmp_path: Path) -> None:
    shipped, slow = (scaled_profile(tmp_path / "SmolLM2-135M-Instruct", factor).compute for factor in (1, 3))
    assert (slow.time_scale, slow.fit) == (3 * shipped.time_scale, shipped.fit)
    with pytest.raises(ConfigError, match="no profile of other comes with this program"):
        scaled_profile(tmp_path / "other", 3)
