"""A cluster over two nodes: the same tokens, blocks that another node reads again and again, and a far death.

Blocks that are hot get a copy, which is read there, and goes when it is cold.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.tools.pool.live import LivePool, live_pool
from mooncake_lite.tools.streams import process_of
from tests import emulation, two_nodes
from tests.cluster import asking, machine, tiny
from tests.cluster.conftest import START_LIMIT_S
from tests.patience import patient, wait_until

BLOCK = 16
COLD_S = 1.0
PREFILL, FAR = 1, "two_sided|sockets"
"""The rank that prefills, and the paths between nodes."""

BETWEEN_NODES = rf"mpi_bytes_\w+{{.*path=\"(?:{FAR})\".*}}"

FLAGS = [
    *("--prefill", "1", "--decode", "1", "--store", "2", "--block-size", str(BLOCK), "--pool-bytes", "1MiB"),
    *("--kv-cache-bytes", "16MiB", "--max-model-len", str(tiny.CONTEXT), "--copy-cold-s", str(COLD_S)),
    *("--prefix-sharing", "off"),  # so that all KV moves
]


@pytest.mark.skipif(bool(two_nodes.problem()), reason=two_nodes.problem())
def test_a_cluster_over_two_nodes_copies_hot_blocks_gives_the_same_tokens_and_loses_a_far_rank_at_once(
    tmp_path: Path,
) -> None:
    """Ranks 0, 2 (decode) and 4 (store) on one node, 1 (prefill) and 3 (store) on the other: what decode
    gives back lies far from prefill, all KV crosses MPI, and messages the network, under CURVE. A rank that
    dies on the other node is lost long before it has been silent for 6 s."""
    with two_nodes.two_nodes(tmp_path) as nodes, two_nodes.inside(nodes.hosts[0]) as thread:
        spread = ["--mpi-arg", "--map-by node:OVERSUBSCRIBE"]
        flags = [*emulation.flags(tmp_path / "model"), *FLAGS, *two_nodes.serve_args(nodes, 3, 2), *spread]
        with Cluster(flags, tmp_path / "log", (*nodes.on(0), *machine.SERVE)) as cluster:
            thread.submit(cluster.wait_ready, START_LIMIT_S).result()
            family = machine.family(cluster.pid)
            try:
                with live_pool(machine.run_dir(family)) as pool:
                    thread.submit(watch, pool, cluster.base_url, *conversation()).result()
                thread.submit(ask_others, cluster.base_url).result()
                process_of(cluster.pid, "3").kill()
                told = "rank 3 (store) died: MPI reports that it failed"
                assert wait_until(lambda: told in (tmp_path / "log").read_text(), patient(2.0))
                cluster.stop()
                wait_until(lambda: not machine.alive(family), patient(5.0))
                assert machine.alive(family) == []
            finally:
                for member in family:
                    if member.is_running():
                        member.kill()


def ask_others(url: str) -> None:
    """The tokens of one process, although each byte of KV moves from node to node once at least."""
    prompts = tiny.prompts(6)
    before = machine.samples(url, BETWEEN_NODES)
    assert asking.ask_all(url, prompts)[0] == asking.emulated_texts(prompts)
    blocks = {tuple(prompt[:end]) for prompt in prompts for end in range(BLOCK, len(prompt) + 1, BLOCK)}
    tails = sum(len(prompt) % BLOCK for prompt in prompts)
    kv_bytes = tiny.TOKEN_NBYTES * (BLOCK * len(blocks) + tails)  # blocks that are shared move once
    assert wait_until(lambda: machine.samples(url, BETWEEN_NODES) - before > kv_bytes, 10.0)


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
