"""Blocks that another node reads again and again: a copy comes, is read there, and goes when it is cold."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from mooncake_lite.tools.demo.cluster import Cluster
from mooncake_lite.tools.pool.live import LivePool, live_pool
from tests import emulation, two_nodes
from tests.cluster import asking, machine, tiny
from tests.cluster.conftest import START_LIMIT_S
from tests.patience import wait_until

BLOCK = 16
COLD_S = 1.0
PREFILL, FAR = 1, "two_sided|sockets"
"""The rank that prefills, and the paths between nodes."""

FLAGS = [
    *("--prefill", "1", "--decode", "1", "--store", "2", "--block-size", str(BLOCK), "--pool-bytes", "1MiB"),
    *("--kv-cache-bytes", "16MiB", "--max-model-len", "256", "--copy-cold-s", str(COLD_S)),
]


@pytest.mark.skipif(bool(two_nodes.problem()), reason=two_nodes.problem())
def test_a_hot_block_is_copied_to_the_node_that_reads_it_and_goes_when_it_is_cold(tmp_path: Path) -> None:
    """Ranks 0, 2 (decode) and 4 (store) on one node, 1 (prefill) and 3 (store) on the other: what decode
    gives back lies far from prefill."""
    prompt, follow_up = conversation()
    with two_nodes.two_nodes(tmp_path) as nodes, two_nodes.inside(nodes.hosts[0]) as thread:
        spread = ["--mpi-arg", "--map-by node:OVERSUBSCRIBE"]
        serve = (*nodes.on(0), *machine.SERVE)
        with Cluster(
            [*emulation.flags(tmp_path / "model"), *FLAGS, *two_nodes.serve_args(nodes, 3, 2), *spread],
            tmp_path / "log",
            serve,
        ) as cluster:
            thread.submit(cluster.wait_ready, START_LIMIT_S).result()
            with live_pool(machine.run_dir(machine.family(cluster.pid))) as pool:
                thread.submit(watch, pool, cluster.base_url, prompt, follow_up).result()


def conversation() -> tuple[list[int], list[int]]:
    """A prompt of less than a block, and the same with its answer behind it: decode fills two blocks."""
    prompt = [*range(3, 3 + BLOCK - 1)]
    answer = emulation.answer(prompt, asking.ANSWER_TOKENS)
    assert emulation.EOS not in answer
    return prompt, prompt + answer


def watch(pool: LivePool, url: str, prompt: list[int], follow_up: list[int]) -> None:
    """Runs in the network of the gateway's node. What the conductor counts it tells itself, at once."""

    def figures() -> dict[str, int]:
        return {row["figure"]: row["value"] for row in pool.figures()}

    def count(name: str) -> int:
        return figures()[name]

    def read_from_afar() -> float:
        labels = rf'(?=.*rank="{PREFILL}")(?=.*path="(?:{FAR})").*'
        pattern = rf"mpi_bytes_read_total{{{labels}}}"
        return machine.samples(url, pattern)

    def evicted() -> tuple[int, int]:
        """Of all blocks and of copies, at one moment: decode still gives blocks back behind an answer."""
        now = figures()
        return now["evictions"], now["copies_evicted"]

    expected = asking.emulated_texts([prompt, follow_up])
    assert asking.ask_all(url, [prompt]) == (expected[:1], [0])
    assert wait_until(lambda: count("keys_dram") == 2, 10.0)  # decode has given them back
    answer = (expected[1:], [2 * BLOCK])
    before = read_from_afar()
    for _ in range(2):
        assert asking.ask_all(url, [follow_up]) == answer
    assert wait_until(lambda: count("copies_stored") == 2, 10.0)
    assert count("copies_dram") == 4  # each block on both nodes
    assert count("copies_bad") == 0
    far = machine.settled(read_from_afar)
    assert far > before
    assert asking.ask_all(url, [follow_up]) == answer
    assert machine.settled(read_from_afar) == far

    time.sleep(1.2 * COLD_S)
    chosen = random.Random(2)
    until = time.monotonic() + 20.0
    while not evicted()[0]:
        assert time.monotonic() < until
        asking.ask_all(
            url, [[chosen.randrange(3, tiny.VOCABULARY) for _ in range(3 * BLOCK)] for _ in range(2)]
        )
    of_all, of_copies = evicted()
    assert of_all == of_copies, "something went before cold copies"
    while count("copies_dram"):
        assert time.monotonic() < until
        asking.ask_all(url, [[chosen.randrange(3, tiny.VOCABULARY) for _ in range(3 * BLOCK)]])
    assert asking.ask_all(url, [follow_up])[0] == answer[0]
