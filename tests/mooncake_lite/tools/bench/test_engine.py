"""The engine's benchmark: what its figures mean, missing peers, and its workers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.config.machine import machine
from mooncake_lite.errors import ClusterError
from mooncake_lite.model.config import load_config
from mooncake_lite.tools.bench import engine, engine_sides, peers, result
from mooncake_lite.tools.bench.engine import decode_seconds, longest_gap_s, of_peer, of_times
from mooncake_lite.tools.bench.engine_limits import prefill_flops
from mooncake_lite.tools.bench.engine_sides import Peer, Prompts, random_prompts, start_peers
from mooncake_lite.tools.bench.peers import Worker
from mooncake_lite.tools.bench.result import Row, Side, compare
from tests.mooncake_lite.tools.bench.conftest import VOCABULARY


def seconds_per_token(each: float) -> Any:
    """A side whose prompt takes a second and each further token some seconds."""
    return lambda prompts, new: 1.0 + (new - 1) * each


# ------------------------------------------------------------------------------------ figures


@pytest.mark.quick
def test_decode_is_a_whole_run_less_a_run_with_one_token() -> None:
    assert decode_seconds(seconds_per_token(0.5), [[1]], 9) == pytest.approx(4.0)


@pytest.mark.quick
def test_there_is_a_row_for_each_peer_and_a_missing_one_says_why() -> None:
    peers = [Peer("slow", seconds_per_token(0.5)), Peer("absent", None, "absent is not installed")]
    sides = [peer.measured(lambda answer: 1 / (answer([[1]], 2) - 1)) for peer in peers]
    found = compare("d", "tokens/s", 3, lambda: 4.0, sides, Side("the machine", lambda: 16.0))
    first, second = [row.to_dict() for row in found]
    assert (first["peer"], first["ratio_to_peer"]) == ({"name": "slow", "value": 2.0}, 2.0)
    assert (second["peer"], second["note"]) == (None, "absent is not installed")
    assert {row["ratio_to_limit"] for row in (first, second)} == {0.25}


@pytest.mark.quick
@pytest.mark.parametrize(("unit", "limit"), [("ms", 1.0), ("tokens/s", 3.0)])
def test_the_limit_is_its_best_run_whatever_the_unit(unit: str, limit: float) -> None:
    runs = iter([2.0, 1.0, 3.0])
    (row,) = compare("r", unit, 3, lambda: 1.0, [], Side("b", lambda: next(runs)))
    assert row.limit.value == limit


@pytest.mark.quick
def test_prompts_are_the_same_for_all_sides_and_differ_from_each_other() -> None:
    prompts = random_prompts(3, 50, 1000)
    assert prompts == random_prompts(3, 50, 1000)
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert all(125 <= token < 1000 for prompt in prompts for token in prompt)


def test_causal_attention_counts_half_of_the_square(tiny: Path) -> None:
    config = load_config(tiny)
    width = config.layers * config.heads * config.head_dim
    assert prefill_flops(config, 1000, 1) == 2 * 1000 + 4 * width
    assert prefill_flops(config, 0, 3) == 4 * width * (1 + 2 + 3)


@pytest.mark.quick
def test_ttft_and_tpot_of_a_batch_are_means_over_its_requests() -> None:
    found = of_times([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])
    assert found == (1.0, 1500.0, 1500.0)
    peer = of_peer(seconds_per_token(0.5), [[1], [1]], 3, gaps=True)
    assert peer == (3.0, 1000.0, 500.0)


@pytest.mark.quick
def test_the_longest_gap_lies_between_two_tokens() -> None:
    assert longest_gap_s([9.0, 10.0, 14.0, 15.0]) == 4.0


# ------------------------------------------------------------------------------------ peers


@pytest.mark.quick
def test_a_peer_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_sides, "interpreter_with", lambda package: None)
    (tmp_path / "m.gguf").touch()
    with start_peers(tmp_path) as found:
        assert found.generate.answer is found.generate_batch.answer is found.llama.answer is None
        assert found.generate.note.endswith("pip install 'mooncake-lite[peers]'")
        assert found.llama.note.endswith("pip install 'mooncake-lite[peers-llama]'")


@pytest.mark.quick
def test_a_peer_may_be_installed_for_another_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_LITE_PEER_PYTHON", raising=False)
    assert peers.interpreter_with("json") == sys.executable
    assert peers.interpreter_with("no_such_package") is None
    monkeypatch.setenv("MOONCAKE_LITE_PEER_PYTHON", "/nonexistent/python")
    assert peers.interpreter_with("no_such_package") is None


@pytest.mark.quick
def test_a_worker_that_ends_is_an_error_and_no_answer() -> None:
    worker = Worker(["no such peer", "-", "2"], sys.executable, os.environ, 30.0)
    try:
        with pytest.raises(ClusterError, match="no such peer did not answer"):
            worker.answer()
    finally:
        worker.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_transformers_answers_with_as_many_tokens_as_asked_both_ways(tiny: Path) -> None:
    with start_peers(tiny) as found:
        assert "has 0" in found.llama.note
        for side in (found.generate, found.generate_batch):
            assert side.answer is not None
            assert side.answer(random_prompts(2, 20, VOCABULARY), 3) > 0


# ------------------------------------------------------------------------------------ all of it


def test_a_quick_run_has_a_row_for_each_promise(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With neither peers nor a cluster, whose parts are tested above."""
    monkeypatch.setattr(engine_sides, "interpreter_with", lambda package: None)

    def no_cluster(ours: Any, folder: Path, streams: Prompts, *_: object) -> list[Row]:
        return [
            Row(f"TPOT through a cluster, {count} streams", "ms", 1.0, None, None, 1) for count in streams
        ]

    monkeypatch.setattr(engine, "cluster", no_cluster)
    found = result.report(engine.run(quick=True, folder=tiny), machine())
    names = [row["name"] for row in json.loads(json.dumps(found))["rows"]]
    assert list(dict.fromkeys(names)) == [
        "decode, 1 sequence of 32 + 17 tokens",
        "decode step, 1 sequence of 32 + 17 tokens",
        "decode, 4 sequences of 32 + 9 tokens",
        "decode step, 4 sequences of 32 + 9 tokens",
        "prefill of 512 tokens, float32",
        "longest gap of an answer beside a prompt of 512 tokens, chunks of 256",
        *(f"{what}, 1 x 128 + 8 tokens" for what in ("throughput", "TTFT", "TPOT")),
        *(f"{what}, 4 x 32 + 8 tokens" for what in ("throughput", "TTFT", "TPOT")),
        "TPOT through a cluster, 1 streams",
        "TPOT through a cluster, 4 streams",
    ]
    assert all(row["ours"] > 0 for row in found["rows"])
    notes = {row["note"].partition(":")[0] for row in found["rows"] if "note" in row}
    assert notes == {"transformers is not installed", f"llama.cpp needs a GGUF file, and {tiny} has 0"}
