"""`bench simulator`: what is played, what is compared, and a small run on sleeping ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.model.config import load_config
from mooncake_lite.tools.bench import simulator
from mooncake_lite.tools.bench.cluster import Ask, Reply
from mooncake_lite.tools.bench.result import Other
from mooncake_lite.tools.bench.simulator_ranks import LAYERS, Ranks, few_layers, record_of
from mooncake_lite.tools.profile.overheads import COST, overheads_of, sleeping_profile
from mooncake_lite.workloads.traces import Trace, TraceRequest
from tests import emulation


def sleeping(folder: Path, **nodes: int) -> Ranks:
    return Ranks(folder, sleeping_profile(folder), nodes, True, 32, 512, 8, 64 << 20)


@pytest.mark.quick
def test_a_trace_is_played_at_the_wanted_load(tmp_path: Path) -> None:
    ranks = sleeping(emulation.model_folder(tmp_path / "model"), prefill=2, decode=1, store=1)
    trace = Trace([TraceRequest(900.0 * n, 320, 4, list(range(10 * n, 10 * n + 10))) for n in range(20)], 32)
    played = ranks.at(trace, 0.5)
    busy_s = 20 * ranks.simulate(trace)["prefill_s_per_request"]
    assert played.requests[-1].timestamp / 1000 == pytest.approx(busy_s / (2 * 0.5))
    assert ranks.simulate(played) == ranks.simulate(played)
    first, second = (ranks.simulate(played, seed, errs=True) for seed in (1, 2))
    assert first["ttft_s"] != second["ttft_s"]


@pytest.mark.quick
def test_equal_ids_are_equal_tokens_in_one_run_and_in_no_other(tmp_path: Path) -> None:
    ranks = sleeping(emulation.model_folder(tmp_path / "model"), prefill=1, decode=1, store=1)
    one, other = TraceRequest(0, 50, 1, [7, 8]), TraceRequest(5, 64, 1, [7, 9])
    assert len(ranks.tokens(one, 1)) == 50
    assert ranks.tokens(one, 1)[:32] == ranks.tokens(other, 1)[:32]
    assert ranks.tokens(one, 1)[:32] != ranks.tokens(one, 2)[:32]


@pytest.mark.quick
def test_a_reply_becomes_a_record_of_its_tokens_alone() -> None:
    ask = Ask(0.0, [1] * 4, 3)
    reply = Reply(ask, 10.0, 200, ttft_s=0.5, times=[10.6, 10.7, 10.9, 10.91])
    assert list(record_of(reply).token_times_s) == [10.5, 10.7, 10.9]
    assert record_of(reply).tpot_s == pytest.approx(0.2)
    assert record_of(Reply(ask, 10.0, 429)).outcome == "rejected"


@pytest.mark.quick
def test_an_error_stands_beside_the_spread_of_live_runs_and_the_goal() -> None:
    def result(ttft_s: float, hits: float = 0.5) -> dict[str, Any]:
        return {"ttft_s": {"mean": ttft_s}, "hit_rate": {"all": hits}}

    goals = {"mean TTFT": ("ttft_s", "mean", 5.0)}
    value, error, reused = simulator.compared("case", [result(0.9), result(1.1)], [result(1.05)], goals)
    assert (value.ours, value.peer) == (1.05, Other("live", 1.0))
    assert error.ours == pytest.approx(5.0)
    assert error.peer is not None
    assert error.peer.value == pytest.approx(10.0)
    assert error.limit == Other("the goal", 5.0)
    assert (reused.ours, reused.peer) == (50.0, Other("live", 50.0))


@pytest.mark.quick
def test_the_model_of_sleeping_ranks_has_few_layers_and_the_same_tokens(tmp_path: Path) -> None:
    model = emulation.model_folder(tmp_path / "model", emulation.SMOL)
    (tmp_path / "few").mkdir()
    few = load_config(few_layers(model, tmp_path / "few"))
    assert (few.layers, few.vocab_size) == (LAYERS, load_config(model).vocab_size)


@pytest.mark.timeout(240)
def test_a_simulated_cluster_takes_about_as_long_as_a_live_one(tmp_path: Path) -> None:
    """Wide limits: other tests run beside. What is reused must be exactly the same."""
    ranks = sleeping(emulation.model_folder(tmp_path / "model", context=8192), prefill=1, decode=1, store=1)
    trace = Trace(
        [TraceRequest(700.0 * n, 400, 6, [*range(5), *range(100 * n, 100 * n + 8)]) for n in range(1, 9)], 32
    )
    with ranks.serve() as cluster:
        overheads = overheads_of(cluster.port, ranks.vocab_size)
        live = ranks.live(cluster.port, trace, 1, lambda: None)
    simulated = ranks.with_overheads(overheads).simulate(trace)
    assert 0 < overheads.step_s < COST.decode.base_s
    assert live["completed"] == simulated["completed"] == 8
    assert simulated["hit_rate"]["all"] == pytest.approx(live["hit_rate"]["all"])
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert simulated[name]["mean"] == pytest.approx(live[name]["mean"], rel=0.5)
