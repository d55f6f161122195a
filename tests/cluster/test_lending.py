"""Pool DRAM lent by the ranks that compute, beside a store rank with next to none but with an SSD tier."""

from __future__ import annotations

import json
import random
from pathlib import Path

from mooncake_lite.launch.serve_child import Cluster
from tests import emulation
from tests.cluster import asking, machine, tiny
from tests.cluster.conftest import START_LIMIT_S
from tests.cluster.test_families import store_command
from tests.patience import patient, wait_until

PREFILL, DECODE, STORE = 1, 2, 3
BLOCK_NBYTES = 64 * tiny.TOKEN_NBYTES
FROM_SSD = "pool_hits_ssd_total"
FLAGS = [
    *("--pool-bytes", str(2 * BLOCK_NBYTES), "--lend-bytes", str(32 * BLOCK_NBYTES)),
    *("--kv-cache-bytes", "32MiB", "--max-model-len", str(tiny.CONTEXT)),
]


def test_compute_ranks_lend_dram_that_goes_to_ssd_and_comes_back_and_one_that_is_killed_is_named(
    tmp_path: Path,
) -> None:
    prompts = tiny.prompts()
    answers = asking.emulated_texts(prompts)
    full = [len(prompt) // 64 * 64 for prompt in prompts]
    flags = [*emulation.flags(tmp_path / "model"), *FLAGS, "--ssd-dir", str(tmp_path / "tier")]
    with Cluster(flags, tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        url = cluster.base_url
        assert asking.ask_all(url, prompts)[0] == answers
        assert asking.ask_all(url, prompts) == (answers, full)
        saved_with_all_others(url)
        processes = machine.family(cluster.pid)
        look_at_lent_blocks(machine.run_dir(processes))
        evict(url, prompts)
        before = machine.samples(url, FROM_SSD)
        assert asking.ask_all(url, prompts[-1:]) == (answers[-1:], full[-1:])
        blocks = machine.samples(url, FROM_SSD) - before
        assert blocks * 64 == full[-1] > 2 * 64  # more than the store rank has
        segments = machine.shared_memory_of(machine.run_dir(processes))
        assert segments
        (victim,) = [process for process in processes if machine.rank_of(process) == DECODE]
        victim.kill()
        assert wait_until(lambda: machine.metric(url, "ranks_lost_total") == 1, patient(5.0))
        assert f"rank {DECODE} (decode) died" in cluster.last_words()
    assert machine.alive(processes) == []
    assert not any(segment.exists() for segment in segments)


def saved_with_all_others(url: str) -> None:
    """Everything in DRAM has been written behind, by a store rank that has room for two blocks."""
    assert wait_until(lambda: machine.metric(url, "pool_saving") == 0, 20.0)
    metrics = machine.scraped(url)
    assert machine.summed(metrics, "pool_keys_ssd") == machine.summed(metrics, "pool_keys_dram") > 10
    for name in ("saves_dropped", "saves_skipped", "dram_bad_blocks"):
        assert machine.summed(metrics, f"pool_{name}_total") == 0, name


def evict(url: str, prompts: list[list[int]]) -> None:
    """Ask so many others that nothing of these is left in DRAM."""
    chosen = random.Random(6)
    asking.ask_all(url, [[chosen.randrange(3, tiny.VOCABULARY) for _ in range(450)] for _ in range(12)])
    assert machine.metric(url, "pool_evictions_total") >= sum(len(prompt) // 64 for prompt in prompts[1::2])


def look_at_lent_blocks(where: Path) -> None:
    """`mooncake-lite store` names the ranks that lend; what it asks of their blocks, the store rank does."""
    blocks = json.loads(store_command("ls", where, "--json"))
    by_rank = {rank: [row for row in blocks if row["rank"] == rank] for rank in (PREFILL, DECODE, STORE)}
    assert by_rank[PREFILL]
    assert by_rank[DECODE]
    assert len(by_rank[STORE]) <= 2
    figures = {row["figure"]: row["value"] for row in json.loads(store_command("stat", where, "--json"))}
    assert figures["capacity_bytes"] == 66 * BLOCK_NBYTES
    assert figures[f"rank {PREFILL} (prefill) capacity_bytes"] == 32 * BLOCK_NBYTES
    assert json.loads(store_command("verify", where, "--json")) == [{"blocks": len(blocks), "bad": 0}]
    assert len(store_command("get", where, by_rank[DECODE][0]["key"])) == BLOCK_NBYTES
