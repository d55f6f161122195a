"""Clusters of other shapes: the tokens must be the same."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from mooncake_lite.profiles.compute import ComputeCost, PassTerms
from mooncake_lite.tools.demo.cluster import Cluster, free_port
from mooncake_lite.tools.streams import process_of
from tests import emulation, two_nodes
from tests.cluster import asking, machine, tiny
from tests.cluster.conftest import SMALL, START_LIMIT_S
from tests.patience import patient, wait_until

SILENCE_S = 2.0
"""The least that --dead-after-s takes."""


@pytest.mark.cluster
def test_two_ranks_of_each_role_give_the_same_tokens_and_a_long_prefill_is_no_death(tmp_path: Path) -> None:
    """A cold prompt of 2,000 tokens in one forward pass takes 3 s, longer than a rank may be silent."""
    prompts = tiny.prompts(10)
    expected = asking.emulated_texts(prompts)
    cost = ComputeCost(prefill=PassTerms(2e-3, 1.5 * SILENCE_S / 2000, 0.0), decode=emulation.COST.decode)
    flags = [*emulation.flags(tmp_path / "model", cost), *SMALL, "--ssd-dir", str(tmp_path / "tier")]
    flags += ["--prefill", "2", "--decode", "2", "--store", "2"]
    flags += ["--dead-after-s", str(SILENCE_S), "--max-num-batched-tokens", "4096"]
    with Cluster(flags, tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        assert asking.ask_all(cluster.base_url, prompts)[0] == expected
        again, cached = asking.ask_all(cluster.base_url, prompts)
        assert again == expected
        assert cached == [len(prompt) // 64 * 64 for prompt in prompts]
        body = {"prompt": [7] * 2000, "max_tokens": 2, "ignore_eos": True}
        began = time.monotonic()
        answer = httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=120)
        assert time.monotonic() - began > SILENCE_S
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert machine.healthy(cluster.base_url)


@pytest.mark.skipif(bool(two_nodes.problem()), reason=two_nodes.problem())
def test_a_cluster_over_two_nodes_gives_the_same_tokens(tmp_path: Path) -> None:
    """serve --hosts: conductor and prefill on one node, decode and store on the other, so that every byte of
    KV crosses MPI, and every message the network, under CURVE. A
    rank that dies on the other node is lost long before it has been silent for 6 s."""
    prompts = tiny.prompts(6)
    expected = asking.emulated_texts(prompts)
    program = Path(__file__).parent / "programs" / "ask.py"
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with two_nodes.two_nodes(tmp_path) as nodes:
        serve = [*nodes.on(0), *machine.SERVE, *emulation.flags(tmp_path / "model"), *tiny.SIZES]
        serve += [
            "--port",
            str(port),
            *two_nodes.serve_args(nodes, 2, 2),
            "--prefix-sharing",
            "off",
        ]  # so that all of it moves
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(serve, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            blocks = {tuple(prompt[:end]) for prompt in prompts for end in range(64, len(prompt) + 1, 64)}
            tails = sum(len(prompt) % 64 for prompt in prompts)
            kv_bytes = tiny.TOKEN_NBYTES * (64 * len(blocks) + tails)  # blocks that are shared move once
            ask = [*nodes.on(0), sys.executable, str(program), url]
            ask += [str(asking.ANSWER_TOKENS), str(kv_bytes)]
            answer = subprocess.run(
                ask, input=json.dumps(prompts), capture_output=True, text=True, timeout=START_LIMIT_S + 60
            )
            assert answer.returncode == 0, answer.stderr + (tmp_path / "log").read_text()
            process_of(process.pid, "3").kill()
            told = "rank 3 (store) died: MPI reports that it failed"
            assert wait_until(lambda: told in (tmp_path / "log").read_text(), patient(2.0))
        finally:
            family = machine.family(process.pid)
            process.terminate()
            wait_until(lambda: not machine.alive(family), patient(5.0))
            left = machine.alive(family)
            for member in family:
                if member.is_running():
                    member.kill()
            process.wait(5)
    assert left == []
    texts, bytes_between = json.loads(answer.stdout)
    assert texts == expected
    assert bytes_between > kv_bytes
