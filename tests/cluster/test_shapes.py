"""Clusters of other shapes, and clusters that come back: the tokens must be the same."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from mooncake_lite.cache import VARIABLE
from mooncake_lite.demo.cluster import Cluster, free_port
from mooncake_lite.demo.document import document_text
from tests import two_nodes
from tests.cluster import asking, machine, reference
from tests.cluster.conftest import SMALL, START_LIMIT_S
from tests.patience import patient

pytestmark = pytest.mark.cluster

COLD_START_LIMIT_S = 90.0
"""What a start may take that has to compile every kernel."""

SILENCE_S = 2.0
"""The least that --dead-after-s takes."""


def test_greedy_answers_are_the_same_from_hdf5_after_a_restart_and_a_bad_file_is_a_miss(
    tmp_path: Path, model_folder: Path
) -> None:
    """The first of the three starts finds no compiled kernels, as on a fresh machine."""
    prompts = reference.prompts(model_folder)
    expected = reference.greedy_texts(model_folder, prompts)
    flags = [*SMALL, "--ssd-dir", str(tmp_path / "tier")]
    full = [len(prompt) // 64 * 64 for prompt in prompts]
    with Cluster(flags, tmp_path / "log 1", env=no_kernels(tmp_path, model_folder)) as cluster:
        cluster.wait_ready(patient(COLD_START_LIMIT_S))
        assert list(tmp_path.glob("cache/kernels-*"))
        assert asking.ask_all(cluster.base_url, prompts)[0] == expected
        on_their_way = functools.partial(machine.metric, cluster.base_url, "pool_saving")
        assert machine.wait_until(lambda: on_their_way() == 0, 30.0) < 30.0  # however slow the disk
    with Cluster(flags, tmp_path / "log 2") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        assert asking.ask_all(cluster.base_url, prompts) == (expected, full)
    files = list((tmp_path / "tier").rglob("seg-*.h5"))
    assert files
    for file in files:
        damage(file)
    with Cluster(flags, tmp_path / "log 3") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        assert asking.ask_all(cluster.base_url, prompts[-4:]) == (expected[-4:], [0] * 4)
        assert machine.wait_until(lambda: bad_in_tier(cluster) > 0, 10.0) < 10.0


def no_kernels(tmp_path: Path, model_folder: Path) -> dict[str, str]:
    """The environment of a user whose cache holds the model and nothing else."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "models").symlink_to(model_folder.parent)
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    return {**kept, VARIABLE: str(cache)}


def bad_in_tier(cluster: Cluster) -> float:
    """Files and blocks of the tier that failed a check, by /metrics."""
    return machine.metric(cluster.base_url, r"tier_(?:files|blocks)_bad\w*")


def damage(file: Path) -> None:
    """Overwrite a page in the middle of every hundred."""
    data = bytearray(file.read_bytes())
    for start in range(4096, len(data), 100 * 4096):
        data[start : start + 4096] = bytes(4096)
    file.write_bytes(bytes(data))


def test_two_ranks_of_each_role_give_the_same_tokens_and_a_long_prefill_is_no_death(
    tmp_path: Path, model_folder: Path
) -> None:
    """A cold prompt of 2,000 tokens in one forward pass takes longer than a rank may be silent."""
    prompts = reference.prompts(model_folder)[:10]
    expected = reference.greedy_texts(model_folder, prompts)
    flags = [*SMALL, "--prefill", "2", "--decode", "2", "--store", "2", "--ssd-dir", str(tmp_path / "tier")]
    flags += ["--dead-after-s", str(SILENCE_S), "--max-num-batched-tokens", "4096"]
    with Cluster(flags, tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        assert asking.ask_all(cluster.base_url, prompts)[0] == expected
        again, cached = asking.ask_all(cluster.base_url, prompts)
        assert again == expected
        assert cached == [len(prompt) // 64 * 64 for prompt in prompts]
        prefilling_s = functools.partial(machine.metric, cluster.base_url, "prefill_seconds_total")
        before = machine.settled(prefilling_s)
        ids = reference.tokenizer(model_folder).encode(document_text())
        body = {"prompt": (ids[::-1] * 4)[:2000], "max_tokens": 2, "ignore_eos": True}
        answer = httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert machine.healthy(cluster.base_url)
        assert machine.wait_until(lambda: prefilling_s() > before, 10.0) < 10.0
        seconds = machine.settled(prefilling_s) - before
    if seconds < SILENCE_S:
        pytest.skip(
            f"this machine prefills 2,000 tokens in {seconds:.1f} s: too soon to be taken for a death"
        )


def test_a_tier_folder_in_use_is_refused_in_one_line_and_its_cluster_goes_on(tmp_path: Path) -> None:
    flags = [*SMALL, "--ssd-dir", str(tmp_path / "tier")]
    with Cluster(flags, tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        command = [*machine.SERVE, *flags, "--port", str(free_port())]
        second = subprocess.run(command, capture_output=True, text=True, timeout=150)
        assert second.returncode == 2
        assert "in use" in second.stderr
        assert len(second.stderr.strip().splitlines()) == 1
        assert machine.healthy(cluster.base_url)


@pytest.mark.skipif(bool(two_nodes.problem()), reason=two_nodes.problem())
def test_a_cluster_over_two_nodes_gives_the_same_tokens(tmp_path: Path, model_folder: Path) -> None:
    """serve --hosts: conductor and prefill on one node, decode and store on the other, so that every byte of
    KV crosses MPI, and every message the network, under CURVE."""
    prompts = reference.prompts(model_folder)[:6]
    expected = reference.greedy_texts(model_folder, prompts)
    program = Path(__file__).parent / "programs" / "ask.py"
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with two_nodes.two_nodes(tmp_path) as nodes:
        serve = [*nodes.on(0), *machine.SERVE, *SMALL, "--port", str(port), *nodes.serve_args(2, 2)]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(serve, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            kv_bytes = 46_080 * sum(map(len, prompts))
            ask = [*nodes.on(0), sys.executable, str(program), url]
            ask += [str(reference.ANSWER_TOKENS), str(kv_bytes)]
            answer = subprocess.run(
                ask, input=json.dumps(prompts), capture_output=True, text=True, timeout=START_LIMIT_S + 60
            )
            assert answer.returncode == 0, answer.stderr + (tmp_path / "log").read_text()
        finally:
            family = machine.family(process.pid)
            process.terminate()
            machine.wait_until(lambda: not machine.alive(family), patient(5.0))
            left = machine.alive(family)
            for member in family:
                if member.is_running():
                    member.kill()
            process.wait(5)
    assert left == []
    texts, bytes_between = json.loads(answer.stdout)
    assert texts == expected
    assert bytes_between > kv_bytes
