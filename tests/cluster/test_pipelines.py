"""Prefill ranks in pipelines: the tokens of one rank, and a death that takes the whole pipeline."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.tools.bench.faults import random_prompts
from mooncake_lite.tools.streams import play, process_of
from tests import emulation
from tests.cluster import asking, machine, reference, tiny
from tests.cluster.conftest import START_LIMIT_S
from tests.cluster.test_losses import AT_REST, samples, texts
from tests.patience import patient, wait_until

STAGES = ("--pipeline-parallel-size", "2", "--max-num-batched-tokens", "64")


def test_stages_answer_as_one_process_does_cold_and_from_the_pool(tmp_path: Path) -> None:
    folder = tiny.tiny_folder("qwen2", tmp_path / "model")
    prompts = tiny.prompts()
    expected = reference.greedy_texts(folder, prompts)
    flags = [
        str(folder),
        *tiny.FLAGS,
        "--prefill",
        "2",
        *STAGES,
        "--verify",
        "dram",
        "--trace",
        str(tmp_path / "trace"),
    ]
    with Cluster(flags, tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        assert asking.ask_all(cluster.base_url, prompts)[0] == expected
        assert asking.ask_all(cluster.base_url, prompts) == (
            expected,
            [len(prompt) // 64 * 64 for prompt in prompts],
        )
        assert wait_until(lambda: not sum(samples(cluster.base_url, *AT_REST).values()), patient(5.0))
        family = machine.family(cluster.pid)
    assert not machine.alive(family)
    assert "hidden states" in (tmp_path / "trace").read_text()


@pytest.mark.cluster
def test_a_pipeline_dies_as_a_whole_and_no_stream_changes(tmp_path: Path) -> None:
    flags = [*emulation.flags(tmp_path / "model"), "--prefill", "4", *STAGES, "--decode", "2"]
    prompts = random_prompts(emulation.VOCABULARY)
    with Cluster(flags, tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        undisturbed, began = play(cluster.base_url, prompts, salt="0")
        lasts_s = max(stream.times[-1] for stream in undisturbed) - began
        for number, (name, share) in enumerate({"2": 0.1, "conductor": 0.3}.items(), 1):
            victim = process_of(cluster.pid, name)
            streams, _ = play(cluster.base_url, prompts, victim.kill, share * lasts_s, str(number))
            assert texts(streams) == texts(undisturbed)
        first, stage = sorted(httpx.get(f"{cluster.base_url}/health").json()["degraded"])
        assert first.startswith("rank 1 (prefill) failed: rank 2 of its instance is lost")
        assert stage.startswith("rank 2 (stage) died")
        assert wait_until(lambda: not sum(samples(cluster.base_url, *AT_REST).values()), patient(5.0))
        up = [machine.samples(cluster.base_url, f'rank_up{{first="{first}".*}}') for first in (1, 3, 5, 6, 7)]
        assert up == [0, 2, 1, 1, 1], "also with the next conductor"
