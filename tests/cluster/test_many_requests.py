"""Hundreds of streams on ranks with few pages, some given up: right answers, and nothing is left behind.

`make test` asks 60 of one pooled cluster, `make soak` 500 of a cluster in each mode.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.model.forward import load_model
from tests.cluster import machine, many, tiny
from tests.cluster.conftest import START_LIMIT_S
from tests.mooncake_lite.engine.exact import Case, assert_answers
from tests.mooncake_lite.engine.examples import a_random
from tests.mooncake_lite.engine.one_rank import go_on
from tests.mooncake_lite.model.conftest import tiny_model
from tests.patience import patient, wait_until

FEW = [
    *("--kv-cache-bytes", str(tiny.CONTEXT * tiny.TOKEN_NBYTES), "--max-model-len", str(tiny.CONTEXT)),
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "128", "--threads", "1"),
]
POOL = ["--pool-bytes", "3MiB"]
"""32 blocks."""

MODES: dict[str, list[str]] = {
    "pooled": POOL,
    "colocated": [*POOL, "--mode", "colocated", "--store", "1"],
    "split": ["--mode", "split"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_folder("qwen3", tmp_path_factory.mktemp("many") / "model")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model as transformers computes it in float64."""
    changes = {"vocab_size": tiny.VOCABULARY, "max_position_embeddings": tiny.CONTEXT}
    made = tiny_model("qwen3", tmp_path_factory.mktemp("oracle"), **changes, **tiny.FAMILIES["qwen3"])
    return made.double()


def assert_right(oracle: Any, folder: Path, cases: list[Case]) -> None:
    assert_answers(oracle, cases, lambda again: go_on(load_model(folder), again))


@pytest.mark.parametrize("mode", list(MODES))
def test_streams_with_few_pages_are_answered_right_and_leave_the_cluster_at_rest(
    mode: str, folder: Path, oracle: Any, tmp_path: Path, soak: int
) -> None:
    if soak == 1 and mode != "pooled":
        pytest.skip("another cluster; run by make soak")
    chosen = a_random(soak)
    asked = many.questions(chosen, 60 if soak == 1 else 500)
    with Cluster([str(folder), *FEW, *MODES[mode]], tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        url = cluster.base_url
        cases = many.ask_all(url, asked)
        # The questions may take less than a second, after which a rank has reported nothing of them yet.
        assert wait_until(lambda: machine.metric(url, "num_preemptions_total") > 0, patient(10.0))
        many.assert_at_rest(url, pool=mode != "split")
        assert "num_swaps" not in machine.scraped(url)
        if mode != "split":
            assert machine.metric(url, "pool_evictions_total") > 0
            assert owners(machine.run_dir(machine.family(cluster.pid))) == 0
    assert_right(oracle, folder, cases)


def owners(run_dir: Path) -> int:
    """Requests that hold leases or unpublished objects, as `mooncake-lite store stat` tells."""
    command = [sys.executable, "-m", "mooncake_lite", "store", "stat", str(run_dir), "--json"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    (owners,) = [row["value"] for row in json.loads(told) if row["figure"] == "owners"]
    return int(owners)
