"""Clusters of every mode, and with too few pages: the tokens are those of one engine."""

from __future__ import annotations

import functools
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from mooncake_lite.conductor.recording import Recording
from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.tools.replay_events import replay_events
from tests import emulation
from tests.cluster import asking, machine, tiny
from tests.cluster.conftest import START_LIMIT_S
from tests.cluster.test_endings import LONG, assert_loss_of_steward_ends_everything
from tests.cluster.test_recording import kinds
from tests.patience import wait_until

STORE = [sys.executable, "-m", "mooncake_lite", "store"]
BLOCK_NBYTES = 64 * tiny.TOKEN_NBYTES
FEW_PAGES = ["--kv-cache-bytes", str(1024 * tiny.TOKEN_NBYTES), "--max-model-len", str(tiny.CONTEXT)]
"""Two of the longest requests fill a rank, so some are preempted."""


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    return emulation.flags(tmp_path / "model")


def replayed(record: Path) -> int:
    """Requests that finished in a recording, which replays to the same effects."""
    recording = Recording(record)
    outcome = replay_events(recording)
    recording.close()
    assert outcome.difference is None
    return outcome.ended["finished"]


def same_answers(url: str, prompt: list[int], n: int) -> list[str]:
    """Several greedy answers to one prompt, which are equal."""
    body = {"prompt": prompt, "max_tokens": asking.ANSWER_TOKENS, "temperature": 0, "n": n}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
    return [choice["text"] for choice in answer["choices"]]


def test_colocated_ranks_answer_as_one_process_does_although_some_lose_their_pages(
    model: list[str], tmp_path: Path
) -> None:
    """Preemption in a cluster with a pool: test_many_requests.py, and by swapping test_tracing.py."""
    prompts = tiny.prompts()
    long = (prompts[0] * 5)[:300]
    pages = ["--kv-cache-bytes", str(tiny.CONTEXT * tiny.TOKEN_NBYTES)]  # 6 answers need more of them
    flags = [*model, *FEW_PAGES[2:], *pages, "--mode", "colocated", "--preemption", "recompute"]
    with Cluster([*flags, "--record", str(tmp_path / "record")], tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        url = cluster.base_url
        expected = asking.emulated_texts(prompts)
        assert asking.ask_all(url, prompts)[0] == expected
        assert same_answers(url, long, 6) == asking.emulated_texts([long]) * 6
        served = [rf'decode_tokens_total{{rank="{rank}",role="compute"}} [1-9]' for rank in (1, 2)]
        text = lambda: httpx.get(f"{url}/metrics").text  # noqa: E731
        assert wait_until(lambda: all(re.search(one, text()) for one in served), 10.0)
        assert not re.search("moved_bytes_total{|pool_segment_bytes{", machine.scraped(url))
    assert replayed(tmp_path / "record") > len(prompts)
    assert kinds(tmp_path / "record")["Preempted"] > 0


def test_colocated_ranks_share_through_the_pool_and_end_with_a_dead_steward_which_is_named(
    model: list[str], tmp_path: Path
) -> None:
    prompts = tiny.prompts()
    expected, full = asking.emulated_texts(prompts), asking.full_blocks(prompts)
    flags = [*model, *tiny.SIZES[:-1], str(LONG), "--mode", "colocated", "--store", "1"]
    with Cluster([*flags, "--prefix-sharing", "off"], tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        url = cluster.base_url
        assert asking.ask_all(url, prompts)[0] == expected
        blocks = len({tuple(prompt[:end]) for prompt in prompts for end in range(64, len(prompt) + 1, 64)})
        offered = functools.partial(machine.metric, url, "pool_keys_dram")
        assert wait_until(lambda: offered() >= blocks, 10.0)
        assert asking.ask_all(url, prompts) == (expected, full)
        assert_loss_of_steward_ends_everything(cluster, signal.SIGKILL, "rank 0 (steward) died")


def test_split_ranks_answer_as_one_process_does_and_keep_nothing(model: list[str], tmp_path: Path) -> None:
    prompts = tiny.prompts()
    flags = [*model, *FEW_PAGES, "--mode", "split", "--prefix-sharing", "off"]
    flags += ["--decode", "2", "--lend-bytes", str(9 * BLOCK_NBYTES)]
    with Cluster([*flags, "--record", str(tmp_path / "record")], tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        url, expected = cluster.base_url, asking.emulated_texts(prompts)
        assert asking.ask_all(url, prompts) == (expected, [0] * len(prompts))
        assert asking.ask_all(url, prompts) == (expected, [0] * len(prompts))
        assert same_answers(url, prompts[3], 2) == expected[3:4] * 2
        written = r'moved_bytes_total{op="write",peer="decode",rank="1",role="prefill"}'
        assert machine.samples(url, written) > 0
        reset = httpx.post(f"{url}/reset_prefix_cache", timeout=60)
        assert (reset.status_code, reset.json()["removed_blocks"]) == (200, 0)
        where = machine.run_dir(machine.family(cluster.pid))
        refused = subprocess.run([*STORE, "ls", where], capture_output=True, text=True, timeout=60)
        assert refused.returncode == 2
        assert refused.stderr.splitlines() == [
            "mooncake-lite: error: mode=split has no pool; use --mode pooled"
        ]
    assert replayed(tmp_path / "record") == 2 * len(prompts) + 1
