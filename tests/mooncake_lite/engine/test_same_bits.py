"""With batch_invariant the logits have the same bits, whatever way the scheduler and the pool take.

The reference computes each answer alone. Whatever keeps the chunks of a prompt must keep the bits: company in
a step, threads, another rank, places of pages, blocks that go out and come in again, forks, swaps, and shared
pages at equal hit length, the HDF5 tier.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from mooncake_lite.engine.local import BLOCK_TOKENS, use_threads
from mooncake_lite.messages import Sampling
from mooncake_lite.model.forward import Model, load_model
from scheduler.instance import Limits
from store.layout import BlockLayout
from store.tier import HDF5Tier
from tests.mooncake_lite.engine.byte_pool import BytePool
from tests.mooncake_lite.engine.one_rank import Knows, OneRank
from tests.mooncake_lite.model.conftest import tiny_model

WHOLE = Limits(1000, sequences=12, prefills=4, chunked=False)
ALONE = Limits(1000, sequences=1, chunked=False)
LENGTHS = (1, 70, 128, 129, 200, 64)
TOKENS = 40
N = 3
SAMPLING = Sampling(0.9, top_k=20, seed=3)
PREFIX = 2 * BLOCK_TOKENS

Logits = dict[tuple[tuple[str, int], int], torch.Tensor]
"""((name of the request, branch), number of the token within the answer) -> what it was drawn from."""


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", folder, num_hidden_layers=2)
    return load_model(folder, batch_invariant=True)


def prompts(lengths: tuple[int, ...], prefix: int = 0) -> list[list[int]]:
    chosen = random.Random(9)
    same = [chosen.randrange(3, 199) for _ in range(prefix)]
    return [[*same, *(chosen.randrange(3, 199) for _ in range(length))] for length in lengths]


def new_pool(model: Model) -> BytePool:
    config = model.config
    return BytePool(config.layers * 2 * config.kv_heads * BLOCK_TOKENS * config.head_dim * 4)


def assert_same_bits(found: Logits, expected: Logits) -> None:
    assert found.keys() == expected.keys()
    assert [where for where in found if not torch.equal(found[where], expected[where])] == []


@pytest.fixture(scope="module")
def alone(model: Model) -> OneRank:
    """A rank that has computed each answer alone."""
    before = numba.get_num_threads()
    use_threads(1)
    rank = OneRank(model, 40, ALONE, keep_logits=True)
    for number, prompt in enumerate(prompts(LENGTHS)):
        for branch in range(N):
            rank.ask(f"{number}.{branch}", prompt, SAMPLING, TOKENS, 1, branch)
    rank.settle()
    use_threads(before)
    return rank


@pytest.fixture(scope="module")
def expected(alone: OneRank) -> Logits:
    """Of each answer computed alone."""
    return {
        ((name.partition(".")[0], branch), index): row
        for ((name, branch), index), row in alone.logits.items()
    }


WAYS: dict[str, dict[str, Any]] = {
    "in one running batch, and forked": {"num_pages": 300},
    "on two threads": {"num_pages": 300},
    "in pages that are shared by hash": {"num_pages": 300, "sharing": "hash"},
    "in pages that are shared by radix": {"num_pages": 300, "sharing": "radix"},
    "on another rank, over the wire": {"num_pages": 300, "split": True},
    "on the stages of a pipeline": {"num_pages": 300, "split": True, "stages": 2},
    "through the pool and back, by swaps": {"num_pages": 40, "preemption": "swap"},
}


@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
@pytest.mark.parametrize("way", list(WAYS))
def test_the_logits_of_an_answer_have_the_same_bits(
    way: str, drafts: bool, model: Model, alone: OneRank, expected: Logits
) -> None:
    answers = {(name.partition(".")[0], branch): ids for (name, branch), ids in alone.answers.items()}
    use_threads(1 + ("threads" in way))
    options = dict(WAYS[way])
    pool = new_pool(model) if "split" in options or "preemption" in options else None
    limits = replace(WHOLE, late="stages" in options)
    rank = OneRank(model, options.pop("num_pages"), limits, pool=pool, keep_logits=True, **options,
                   new_drafter=partial(Knows, answers) if drafts else None)  # fmt: skip
    for number, prompt in reversed(list(enumerate(prompts(LENGTHS)))):
        rank.ask(str(number), prompt, SAMPLING, TOKENS, N)
    rank.settle()
    assert bool(rank.seen["drafts"] > rank.seen["accepted"] > 0) == drafts, rank.seen
    assert rank.seen["copied"], "no page was shared by branches"
    assert not rank.seen["preempted"]
    assert bool(rank.seen["swapped"]) == ("swaps" in way)
    assert_same_bits(rank.logits, expected)


def reusing(model: Model, source: str, tier: HDF5Tier | None = None) -> Logits:
    """Logits of answers to prompts whose first PREFIX tokens are reused. tier: through which they go."""
    in_pool = source == "DRAM"
    pool = new_pool(model) if in_pool else None
    rank = OneRank(
        model, 200, WHOLE, "off" if in_pool else source, pool=pool, reuses=in_pool, keep_logits=True
    )
    asked = prompts((1, 30, 64, 65), PREFIX)
    rank.ask("before", asked[0], SAMPLING, 1)
    rank.settle()
    rank.logits.clear()
    if pool is not None and tier is not None:
        pool.through(tier)
    for number, prompt in enumerate(asked):
        rank.ask(str(number), prompt, SAMPLING, 10)
    rank.settle()
    assert rank.seen["reused tokens"] == len(asked) * PREFIX
    return rank.logits


def test_pages_shared_by_hash_or_radix_and_blocks_of_the_pool_give_the_same_bits(
    model: Model, tmp_path: Path
) -> None:
    by_hash = reusing(model, "hash")
    assert_same_bits(reusing(model, "radix"), by_hash)
    assert_same_bits(reusing(model, "DRAM"), by_hash)
    config = model.config
    layout = BlockLayout(config.layers, config.kv_heads, BLOCK_TOKENS, config.head_dim, itemsize=4)
    tier = HDF5Tier(tmp_path, 1 << 24, layout, "ab" * 16)
    assert_same_bits(reusing(model, "DRAM", tier), by_hash)
    assert tier.counters["blocks_loaded"] >= PREFIX // BLOCK_TOKENS
    tier.close()
