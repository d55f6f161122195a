"""Admission on real clusters of sleeping ranks: what a refused client sees, and what an overload leaves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from openai._legacy_response import LegacyAPIResponse
from openai.types import Completion

from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.profiles.compute import ComputeCost, PassTerms
from mooncake_lite.tools.bench.goodput import Bench, GoodputPlan
from mooncake_lite.tools.bench.goodput_load import Shape
from tests import emulation
from tests.cluster import machine
from tests.cluster.conftest import START_LIMIT_S
from tests.patience import patient, wait_until

pytestmark = pytest.mark.cluster

COST = ComputeCost(prefill=PassTerms(0.0, 1e-3, 0.0), decode=PassTerms(0.02, 1e-3, 0.0))
"""A prompt token takes 1 ms, a decode step of one sequence 21 ms."""

TINY = ["--pool-bytes", "64MiB", "--staging-bytes", "1MiB", "--kv-cache-bytes", "64MiB"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """It refuses for the time to first token as early rejection does, which the last test has by itself."""
    home = tmp_path_factory.mktemp("admission")
    flags = [*emulation.flags(home / "model", COST), *TINY, "--admission", "after-prefill"]
    flags += ["--slo-ttft-ms", "60000", "--slo-tpot-ms", "1000"]
    with Cluster(flags, home / "log") as cluster:
        cluster.wait_ready(patient(START_LIMIT_S))
        yield cluster


def test_a_check_after_prefill_refuses_with_429_before_any_token_and_keeps_what_was_computed(
    cluster: Cluster,
) -> None:
    """arXiv 2407.00079, section 7.2: a refusal after the prefill wastes it."""
    url = f"{cluster.base_url}/v1/completions"
    body = {"prompt": [5] * 130, "max_tokens": 4, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", url, json=body, headers={"x-slo-tpot-ms": "15"}, timeout=60) as refused:
        text = refused.read().decode()
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["content-type"].startswith("application/json"), "no stream has begun"
    assert "the predicted time between tokens is 21 ms, the limit 15 ms" in text
    assert '"choices"' not in text

    served = httpx.post(url, json=body | {"stream": False}, headers={"x-slo-tpot-ms": "40"}, timeout=60)
    assert served.status_code == 200
    details = served.json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 128, "two blocks of the first prompt are reused"


def test_a_client_that_waits_as_long_as_a_refusal_says_is_served(cluster: Cluster) -> None:
    """A prefill of 3 s runs. The OpenAI client waits for the seconds of Retry-After, and tries once more."""
    with ThreadPoolExecutor(1) as other:
        url = f"{cluster.base_url}/v1"
        body = {"prompt": [7] * 3000, "max_tokens": 1}
        long = other.submit(httpx.post, f"{url}/completions", json=body, timeout=60)
        wait_until(lambda: machine.open_requests(cluster.base_url) > 0, 20.0)

        with openai.OpenAI(base_url=url, api_key="none", timeout=60) as client:

            def ask(retries: int) -> LegacyAPIResponse[Completion]:
                completions = client.with_options(max_retries=retries).completions.with_raw_response
                limit = {"x-slo-ttft-ms": "1000"}
                return completions.create(model="model", prompt=[6] * 130, max_tokens=4, extra_headers=limit)

            with pytest.raises(openai.RateLimitError, match="time to first token") as refused:
                ask(retries=0)
            retry_after_s = int(refused.value.response.headers["retry-after"])
            assert 1 <= retry_after_s <= 3, "at most the rest of the long prefill, less the limit"
            began = time.monotonic()
            served = ask(retries=1)
        assert served.retries_taken == 1
        assert time.monotonic() - began >= retry_after_s - 1, "the second refusal may name a second less"
        assert served.parse().choices[0].finish_reason in ("length", "stop")
        assert long.result().status_code == 200


def test_early_rejection_keeps_the_goodput_of_a_cluster_that_gets_ten_times_too_much(tmp_path: Path) -> None:
    folder = emulation.model_folder(tmp_path / "model")
    shape = Shape(prefill=2, decode=1, slo_ttft_ms=2000.0, slo_tpot_ms=100.0)
    plan = GoodputPlan(loads=(10.0,), shape=shape, warm_s=1.0, window_s=4.0)
    bench = Bench(folder, emulation.profile_of(folder, COST), plan)
    capacity = bench.estimate()
    (cell,) = bench.form("early-rejection", capacity, lambda: None)
    print(f"\n{cell.served}")
    assert cell.served.offered == pytest.approx(10 * capacity * 4.0, rel=0.25)
    assert cell.served.goodput > 0.4 * capacity
    assert cell.served.refused > 0.5 * cell.served.offered
    assert cell.served.refusal_s is not None
    assert cell.served.refusal_s < patient(0.25)
