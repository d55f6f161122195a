"""Poisoned and drawn requests on the real engine, in each mode: they fail alone, and cost no rank.

A poisoned request makes logits that are no numbers: its prompt, or its answer so far, has a token whose row
of the embedding is none. The models are those of `kinds`, one per mode. `make test` draws 285 requests, `make
soak` 50 times as many. Those to the default model are in test_drawn.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooncake_lite.launch.serve_child import Cluster
from tests.cluster import judged, kinds, many, tiny
from tests.cluster.conftest import START_LIMIT_S
from tests.cluster.drawn import Drawn, Vocabulary, drawn
from tests.mooncake_lite.engine.examples import a_random

SMALL = [
    *("--kv-cache-bytes", "768KiB", "--max-model-len", str(tiny.CONTEXT), "--threads", "1"),
    *("--max-num-batched-tokens", "64", "--wait-for-rank-s", "1"),
]
"""Pages for two of the longest requests, so that each page is soon used again, and chunks of 64 tokens."""

POOL = ["--pool-bytes", "3MiB"]
"""64 blocks."""

MODES = {
    "pooled": (kinds.padded_llama, POOL),
    "split": (kinds.qwen2_with_a_gap, ["--mode", "split"]),
    "colocated": (kinds.mistral_with_a_window, ["--mode", "colocated", "--compute", "1"]),
    "pipelined": (kinds.padded_llama, [*POOL, "--prefill", "2", "--pipeline-parallel-size", "2"]),
}
"""The last one is left to `make soak`."""

DRAWN = 95
"""Requests per model."""


@dataclass(frozen=True, slots=True)
class Served:
    """A cluster, and what it answers to the plain requests when no other is there."""

    url: str
    log: Path
    vocabulary: Vocabulary
    undisturbed: judged.Plain
    has_pool: bool

    def plain(self, http: httpx.Client, salt: str) -> judged.Plain:
        """Ask the plain requests again."""
        return judged.plain_answers(http, judged.plain_requests(salt, self.vocabulary.poison))


@pytest.fixture(scope="module", params=list(MODES))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if request.param == "pipelined" and not request.config.getoption("--soak"):
        pytest.skip("another cluster; run by make soak")
    make, flags = MODES[request.param]
    home = tmp_path_factory.mktemp(request.param)
    vocabulary = make(home / "model")
    log = home / "log"
    with Cluster([str(home / "model"), *SMALL, *flags], log) as cluster:
        cluster.wait_ready(START_LIMIT_S)
        with judged.client(cluster.base_url) as http:
            bodies = judged.plain_requests("undisturbed", vocabulary.poison)
            undisturbed = judged.plain_answers(http, bodies)
        yield Served(cluster.base_url, log, vocabulary, undisturbed, has_pool="--pool-bytes" in flags)


def poisoned(vocabulary: Vocabulary) -> dict[str, dict[str, Any]]:
    """Bodies of requests that must fail, by what is special about them."""
    nan, infinite, _ = vocabulary.poison
    text = [5 + i % 150 for i in range(200)]
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    sampled = {**greedy, "temperature": 1, "top_p": 0.9, "seed": 1}
    prompt = {"prompt": [*text[:20], nan, *text[20:30]]}
    drawn = {"prompt": text[:70], "logit_bias": {str(nan): 100}}
    return {
        "greedy": greedy | prompt,
        "sampled": sampled | prompt,
        "one token": greedy | {"prompt": [nan], "max_tokens": 1},
        "an infinite row": sampled | {"prompt": [infinite, *text[:16]]},
        "three answers": sampled | prompt | {"n": 3},
        "a stream": greedy | prompt | {"stream": True},
        "the first of three prompts": sampled | {"prompt": [[nan, 5], text[:40], text[:63]]},
        "in the first of three chunks": greedy | {"prompt": [text[0], nan, *text[1:130]]},
        "at the end of four chunks": sampled | {"prompt": [*text, infinite]},
        "a penalty and a bias": sampled | prompt | {"repetition_penalty": 1.3, "logit_bias": {"9": 100}},
        "end tokens are masked": greedy | prompt | {"min_tokens": 4, "stop_token_ids": list(range(64))},
        "drawn, then read": greedy | drawn,
        "drawn in a stream": sampled | drawn | {"stream": True},
        "drawn in three answers": sampled | drawn | {"n": 3},
        "drawn in three streams": greedy | drawn | {"n": 3, "stream": True, "logprobs": 3},
        "an echo with logprobs": greedy | prompt | {"echo": True, "logprobs": 2},
        "an echo of several chunks": greedy | {"prompt": [nan, *text], "echo": True, "logprobs": 0},
        "an echo for no token": {**prompt, "max_tokens": 0, "echo": True, "logprobs": 5},
    }  # fmt: skip


def test_a_poisoned_request_fails_alone_and_its_neighbours_do_not_notice(served: Served, soak: int) -> None:
    """Eight plain streams run again and again meanwhile, and afterwards once more, in the same pages."""
    nan, _, huge = served.vocabulary.poison
    harmless = {
        "warming": {"prompt": [nan] * 100, "max_tokens": 0},
        "huge": {"prompt": [7, huge, 8], "max_tokens": 5, "temperature": 0, "ignore_eos": True},
    }
    bodies = poisoned(served.vocabulary) | harmless
    with judged.client(served.url) as http, ThreadPoolExecutor(4) as pool:
        asked = [(name, pool.submit(failure_of, http, bodies[name])) for name in list(bodies) * min(soak, 10)]
        for salt in itertools.count():
            assert served.plain(http, f"beside {salt}") == served.undisturbed
            if all(future.done() for _, future in asked):
                break
        found = {(name, future.result()) for name, future in asked}
        answered = {name for name, result in found if result == "answered"}
        assert answered <= set(harmless)
        assert found == {(name, "answered" if name in answered else "logits_not_finite") for name in bodies}
        assert failure_of(http, {"prompt": [nan] * 101, "max_tokens": 1}) == "logits_not_finite"
        for salt in range(3):
            assert served.plain(http, f"after {salt}") == served.undisturbed
        judged.assert_sound(http, served.log)
    many.assert_at_rest(served.url, served.has_pool)


def failure_of(http: httpx.Client, body: dict[str, Any]) -> str:
    """How a request ends, as `judged` says it."""
    return judged.judged(http, Drawn("/v1/completions", json.dumps(body), bool(body.get("stream"))))


def test_requests_with_drawn_parameters_cost_no_rank(served: Served, soak: int) -> None:
    requests = itertools.islice(drawn(a_random(soak), served.vocabulary), DRAWN * soak)
    found = judged.ask_drawn(served.url, requests)
    print(dict(found))
    assert found["answered"] > found.total() / 3
    assert set(found) <= {"answered", "400", "left", "logits_not_finite"}
    with judged.client(served.url) as http:
        assert served.plain(http, "after drawn ones") == served.undisturbed
        judged.assert_sound(http, served.log)
    many.assert_at_rest(served.url, served.has_pool)


def test_a_model_that_only_makes_nan_fails_every_request_and_costs_no_rank(tmp_path: Path, soak: int) -> None:
    """One logit of each row is NaN, for any prompt."""
    if soak == 1:
        pytest.skip("another cluster; run by make soak. In one process: engine/test_poison.py")
    kinds.mistral_with_a_window(tmp_path / "model")
    kinds.poison_the_head(tmp_path / "model")
    flags = [*SMALL, "--mode", "colocated", "--compute", "1"]
    with Cluster([str(tmp_path / "model"), *flags], tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        hows: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 1, "n": 3},
            {"temperature": 0, "stream": True, "logit_bias": {"9": -100}},
            {"temperature": 2, "top_k": 1, "stop_token_ids": [9], "min_tokens": 2},
            {"temperature": 0, "echo": True, "logprobs": 1},
        ]
        with judged.client(cluster.base_url) as http:
            for how in hows * 2:
                assert failure_of(http, {"prompt": [5] * 70, "max_tokens": 4} | how) == "logits_not_finite"
            judged.assert_sound(http, tmp_path / "log")
