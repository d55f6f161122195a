"""Answers of clusters in every cell of the matrix are those of transformers, up to rounding.

`make soak` starts all clusters, which takes about a quarter of an hour. The cells that need no cluster are in
tests/mooncake_lite/engine/test_matrix.py.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.messages import Sampling
from mooncake_lite.model.forward import load_model
from tests.cluster import many, tiny
from tests.cluster.conftest import START_LIMIT_S
from tests.cluster.many import Question
from tests.mooncake_lite.engine.exact import assert_answers
from tests.mooncake_lite.engine.examples import a_random
from tests.mooncake_lite.engine.matrix import CLUSTERS
from tests.mooncake_lite.engine.one_rank import go_on
from tests.mooncake_lite.model.conftest import tiny_model

PROMPTS = 12
PREFIX = 128
POOL = ["--pool-bytes", "3MiB"]
"""32 blocks: those of one set of prompts and their answers, not of three."""

MODES: dict[str, list[str]] = {
    "pooled": POOL,
    "colocated": [*POOL, "--mode", "colocated", "--store", "1"],
    "split": ["--mode", "split"],
}
SAMPLINGS = (
    (Sampling(0.0, logit_bias=many.NO_SPECIAL), 1),
    (Sampling(0.9, seed=5, logit_bias=many.NO_SPECIAL), 1),
    (Sampling(0.8, top_p=0.9, top_k=40, seed=6, logit_bias=many.NO_SPECIAL), 1),
    (Sampling(0.9, top_k=20, seed=7, logit_bias=many.NO_SPECIAL), 3),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "shape" in metafunc.fixturenames:
        some = CLUSTERS if metafunc.config.getoption("--soak", default=0) else CLUSTERS[:1]
        metafunc.parametrize("shape", some, ids=" ".join)


@pytest.fixture(scope="module")
def oracle_and_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model, and the same as transformers computes it in float64."""
    folder = tiny.tiny_folder("qwen3", tmp_path_factory.mktemp("matrix") / "model")
    changes = {"vocab_size": tiny.VOCABULARY, "max_position_embeddings": tiny.CONTEXT}
    made = tiny_model("qwen3", tmp_path_factory.mktemp("oracle"), **changes, **tiny.FAMILIES["qwen3"])
    return made.double(), folder


def questions(chosen: random.Random) -> list[Question]:
    """Prompts that share their first PREFIX tokens in pairs, with every sampling."""
    bodies = [[chosen.randrange(3, tiny.VOCABULARY) for _ in range(PREFIX)] for _ in range(PROMPTS // 2)]
    found = []
    for number in range(PROMPTS):
        end = [chosen.randrange(3, tiny.VOCABULARY) for _ in range(chosen.choice([1, 16, 40, 64]))]
        sampling, n = SAMPLINGS[number % len(SAMPLINGS)]
        found.append(Question(((*bodies[number // 2], *end),), sampling, chosen.randint(40, 60), n))
    return found


def flags(shape: tuple[str, str, str, str], tier: Path) -> list[str]:
    mode, chunk, preemption, sharing = shape
    pages = str((tiny.CONTEXT + 64) * tiny.TOKEN_NBYTES)
    found = ["--kv-cache-bytes", pages, "--max-model-len", str(tiny.CONTEXT), "--threads", "1", *MODES[mode]]
    found += ["--preemption", preemption, "--prefix-sharing", sharing]
    if mode != "split":
        found += ["--ssd-dir", str(tier)]
    if chunk == "whole":
        return [*found, "--no-enable-chunked-prefill"]
    return [*found, "--max-num-batched-tokens", chunk]


def test_the_answers_of_a_cluster_are_the_oracles(
    shape: tuple[str, str, str, str], oracle_and_folder: tuple[Any, Path], tmp_path: Path, soak: int
) -> None:
    if soak == 1:
        pytest.skip("many clusters; run by make soak")
    oracle, folder = oracle_and_folder
    chosen = a_random(soak)
    asked, second, third = (questions(chosen) for _ in range(3))
    wanted = set() if shape[0] == "split" else {"dram", "ssd"}
    if shape[3] != "off":
        wanted.add("pages")
    with Cluster([str(folder), *flags(shape, tmp_path / "tier")], tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        url = cluster.base_url
        reused: Counter[str] = Counter()
        cases = many.ask_all(url, asked, 1, reused)  # the second prompt of each pair finds pages
        for some in (asked, second, third, asked):  # DRAM; others, which evict; HDF5
            cases += many.ask_all(url, some, reused=reused)
        many.assert_at_rest(url, pool=shape[0] != "split")
    assert_answers(oracle, cases, lambda again: go_on(load_model(folder), again))
    assert wanted <= set(+reused), f"reused from {reused} only"
