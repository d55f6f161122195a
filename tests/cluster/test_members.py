"""Instances of two ranks that share the heads of each layer: one dies as a whole, and no stream changes."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from mooncake_lite.engine.local import generate_all
from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.messages import Sampling
from mooncake_lite.model.forward import load_model
from mooncake_lite.tools.streams import Prompt, play, process_of
from tests.cluster import machine, reference, tiny
from tests.cluster.conftest import START_LIMIT_S
from tests.cluster.test_losses import AT_REST, DEAD_AFTER_S, samples, texts
from tests.patience import patient, wait_until

pytestmark = pytest.mark.cluster

TOKENS = 120
RANKS = ("--prefill", "4", "--decode", "4", "--tensor-parallel-size", "2")
"""Ranks 1 and 2, 3 and 4 compute prompts, 5 and 6, 7 and 8 decode; 9 is a store rank."""


def texts_of_one_rank(folder: Path, prompts: list[list[int]]) -> list[str]:
    model, answers = load_model(folder, batch_invariant=True), [list[int]() for _ in prompts]
    for number, token in generate_all(model, prompts, Sampling(0.0), TOKENS, frozenset()):
        answers[number].append(token)
    return [reference.tokenizer(folder).decode(ids) for ids in answers]


def test_an_instance_dies_with_any_of_its_members_and_a_stop_ends_all_in_time(tmp_path: Path) -> None:
    folder = tiny.tiny_folder("qwen3", tmp_path / "model")
    prompts = tiny.prompts()
    expected = texts_of_one_rank(folder, prompts)
    asked = [Prompt(ids, TOKENS) for ids in prompts]
    flags = [str(folder), *tiny.FLAGS, *RANKS, "--batch-invariant", "--dead-after-s", str(DEAD_AFTER_S)]
    with Cluster(flags, tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        family = machine.family(cluster.pid)
        run_dir = machine.run_dir(family)
        segments = machine.shared_memory_of(run_dir)
        assert segments
        undisturbed, began = play(cluster.base_url, asked, salt="0")
        assert texts(undisturbed) == expected
        lasts_s = max(stream.times[-1] for stream in undisturbed) - began
        for number, (rank, share) in enumerate({"6": 0.5, "1": 0.05}.items(), 1):
            victim = process_of(cluster.pid, rank)
            streams, _ = play(cluster.base_url, asked, victim.kill, share * lasts_s, str(number))
            assert texts(streams) == expected, f"rank {rank}"
        degraded = sorted(httpx.get(f"{cluster.base_url}/health").json()["degraded"])
        assert [line.split(":")[0] for line in degraded] == [
            "rank 1 (prefill) died",
            "rank 2 (member) failed",
            "rank 5 (decode) failed",
            "rank 6 (member) died",
        ]
        assert "rank 1 of its instance is lost" in degraded[1]
        assert "rank 6 of its instance is lost" in degraded[2]
        assert not machine.alive([one for one in family if machine.name_of(one) in ("1", "2", "5", "6")])
        assert wait_until(lambda: not sum(samples(cluster.base_url, *AT_REST).values()), patient(5.0))
        process = cluster._process
        assert process is not None
        streams, _ = play(cluster.base_url, asked, process.terminate, 0.4 * lasts_s, "stop")
        assert any(stream.error or stream.text != wanted for stream, wanted in zip(streams, expected))
        assert process.wait(patient(8.0)) == 0
        assert wait_until(lambda: not machine.alive(family), patient(2.0)), machine.alive(family)
    assert not run_dir.exists()
    assert not any(segment.exists() for segment in segments)
    assert "Traceback" not in (tmp_path / "log").read_text()
