"""Clusters of other shapes, and clusters that come back: the tokens must be the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from mooncake_lite.demo.cluster import Cluster, free_port
from tests import two_nodes
from tests.cluster import machine, reference
from tests.cluster.conftest import SMALL, START_LIMIT_S

pytestmark = pytest.mark.cluster

TOKENS = 32


def ask_all(url: str, prompts: list[list[int]], at_once: int = 4) -> tuple[list[str], list[int]]:
    """Greedy answers and cached tokens, by prompt."""

    def ask(prompt: list[int]) -> tuple[str, int]:
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["text"], cached

    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(ask, prompts))
    return [text for text, _ in found], [cached for _, cached in found]


def test_greedy_answers_are_the_same_from_hdf5_after_a_restart_and_a_bad_file_is_a_miss(
    tmp_path: Path, model_folder: Path
) -> None:
    prompts = reference.prompts(model_folder)
    expected = reference.greedy_texts(model_folder, prompts, TOKENS)
    flags = [*SMALL, "--ssd-dir", str(tmp_path / "tier")]
    full = [len(prompt) // 64 * 64 for prompt in prompts]
    with Cluster(flags, tmp_path / "log 1") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        assert ask_all(cluster.base_url, prompts)[0] == expected
    with Cluster(flags, tmp_path / "log 2") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        assert ask_all(cluster.base_url, prompts) == (expected, full)
    for file in sorted((tmp_path / "tier").rglob("seg-*.h5"))[:1]:
        damage(file)
    with Cluster(flags, tmp_path / "log 3") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        texts, cached = ask_all(cluster.base_url, prompts[-4:])
        assert texts == expected[-4:]
        log = (tmp_path / "log 3").read_text()
        assert cached != full[-4:] or "set aside" in log or ".bad" in log


def damage(file: Path) -> None:
    """Overwrite a page in the middle of every hundred."""
    data = bytearray(file.read_bytes())
    for start in range(4096, len(data), 100 * 4096):
        data[start : start + 4096] = bytes(4096)
    file.write_bytes(bytes(data))


def test_two_ranks_of_each_role_give_the_same_tokens(tmp_path: Path, model_folder: Path) -> None:
    prompts = reference.prompts(model_folder)[:10]
    expected = reference.greedy_texts(model_folder, prompts, TOKENS)
    flags = [*SMALL, "--prefill", "2", "--decode", "2", "--store", "2", "--ssd-dir", str(tmp_path / "tier")]
    with Cluster(flags, tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        assert ask_all(cluster.base_url, prompts)[0] == expected
        again, cached = ask_all(cluster.base_url, prompts)
        assert again == expected
        assert cached == [len(prompt) // 64 * 64 for prompt in prompts]


def test_two_clusters_side_by_side_never_meet(tmp_path: Path, model_folder: Path) -> None:
    """The second one has cached nothing of what the first one was asked, and outlives it."""
    prompts = reference.prompts(model_folder)[5:8]
    expected = reference.greedy_texts(model_folder, prompts, TOKENS)
    with Cluster([*SMALL, "--ssd-dir", str(tmp_path / "a")], tmp_path / "log a") as first:
        first.wait_ready(START_LIMIT_S)
        with Cluster([*SMALL, "--ssd-dir", str(tmp_path / "b")], tmp_path / "log b") as second:
            second.wait_ready(START_LIMIT_S)
            assert ask_all(first.base_url, prompts[:1])[0] == expected[:1]
            assert ask_all(second.base_url, prompts[:1]) == (expected[:1], [0])
            first.stop()
            assert ask_all(second.base_url, prompts)[0] == expected


def test_a_tier_folder_in_use_is_refused_in_one_line_and_its_cluster_goes_on(tmp_path: Path) -> None:
    flags = [*SMALL, "--ssd-dir", str(tmp_path / "tier")]
    with Cluster(flags, tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        command = [*machine.SERVE, *flags, "--port", str(free_port())]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert second.returncode == 2
        assert "in use" in second.stderr
        assert len(second.stderr.strip().splitlines()) == 1
        assert machine.healthy(cluster.base_url)


@pytest.mark.skipif(bool(two_nodes.problem()), reason=two_nodes.problem())
def test_a_cluster_over_two_nodes_gives_the_same_tokens(tmp_path: Path, model_folder: Path) -> None:
    """Conductor and prefill on one node, decode and store on the other: every byte of KV crosses MPI."""
    prompts = reference.prompts(model_folder)[:6]
    expected = reference.greedy_texts(model_folder, prompts, TOKENS)
    program = Path(__file__).parent / "programs" / "ask.py"
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with two_nodes.two_nodes(tmp_path) as nodes:
        line = [shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"]
        line += nodes.mpirun_args(2, 2)
        serve = [*nodes.on(0), *line, *machine.SERVE, *SMALL, "--port", str(port)]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(
                serve, stdout=log, stderr=subprocess.STDOUT, env=machine.environment(), start_new_session=True
            )
        try:
            ask = [*nodes.on(0), sys.executable, str(program), url, str(TOKENS)]
            answer = subprocess.run(
                ask, input=json.dumps(prompts), capture_output=True, text=True, timeout=START_LIMIT_S + 60
            )
            assert answer.returncode == 0, answer.stderr + (tmp_path / "log").read_text()
        finally:
            family = machine.family(process.pid)
            process.terminate()
            machine.wait_until(lambda: not machine.alive(family), 5.0)
            for left in family:
                if left.is_running():
                    left.kill()
            process.wait(5)
    texts, two_sided_bytes = json.loads(answer.stdout)
    assert texts == expected
    assert two_sided_bytes > 46_080 * sum(map(len, prompts))
