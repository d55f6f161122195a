"""Members that compute each pass together give the answers of one rank; KV of one size is read at any other.

All members run their own loop, runner and engine in a thread, and exchange through common memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.messages import Sampling
from mooncake_lite.model.forward import Model, load_model
from scheduler.instance import Limits
from scheduler.instance.dealt_pages import pages_of_rows
from tests.mooncake_lite.engine.exact import assert_answers
from tests.mooncake_lite.engine.one_rank import UNIT, OneRank, go_on
from tests.mooncake_lite.engine.test_same_bits import assert_same_bits, new_pool
from tests.mooncake_lite.model.conftest import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

WHOLE = Limits(2000, sequences=12, prefills=4, chunked=False)
ALONE = Limits(2000, sequences=1, chunked=False)
SAMPLING = Sampling(0.9, top_k=20, seed=3)
LENGTHS = (1, 200, 250, 256, 505, 600, 1020)
"""Of prompts: some members have nothing of the short ones, and answers go on into the next unit."""
TOKENS, N = 50, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", folder, num_hidden_layers=2, max_position_embeddings=4200)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder, batch_invariant=True)


def prompts(*lengths: int) -> list[list[int]]:
    chosen = random.Random(9)
    return [[chosen.randrange(3, 199) for _ in range(length)] for length in lengths]


@contextmanager
def ranks(*args: Any, **options: Any) -> Iterator[OneRank]:
    """Ranks whose threads end."""
    found = OneRank(*args, **options)
    try:
        yield found
    finally:
        found.close()


def answered(rank: OneRank, *lengths: int, n: int = N, name: str = "") -> OneRank:
    """Have prompts answered. name: of all these requests, before their numbers."""
    for number, prompt in reversed(list(enumerate(prompts(*lengths)))):
        rank.ask(f"{name}{number}", prompt, SAMPLING, TOKENS, n)
    rank.settle()
    rank.assert_at_rest()
    return rank


@pytest.fixture(scope="module")
def alone(model: Model) -> OneRank:
    """A rank that has computed each prompt alone, and its answers one after the other."""
    return answered(OneRank(model, 80, ALONE, keep_logits=True), *LENGTHS)


# ------------------------------------------------------------------------------- contexts that are dealt out


@pytest.mark.parametrize(("turns", "way"), [(2, "all at once"), (4, "through the pool and back")])
def test_logits_over_dealt_contexts_have_the_bits_of_one_rank(
    turns: int, way: str, folder: Path, model: Model, alone: OneRank
) -> None:
    pages = (300, 300 if way == "all at once" else 36)
    options: dict[str, Any] = {"split": True, "reuses": True, "turns": turns, "folder": folder}
    options |= {"preemption": "swap", "keep_logits": True, "pool": new_pool(model)}
    with ranks(model, pages, WHOLE, **options) as rank:
        answered(rank, *LENGTHS)
        assert rank.seen["copied"], "no page was shared by branches"
        assert bool(rank.seen["swapped"]) == (way != "all at once"), rank.seen
        assert_same_bits(rank.logits, alone.logits)


def test_a_context_of_four_times_the_pages_of_a_member_is_decoded(folder: Path, model: Model) -> None:
    """The prompt comes from a rank with enough pages, of which each member has a quarter."""
    (prompt,) = prompts(4050)
    pages = pages_of_rows(4096, 16, UNIT, 4)
    assert pages * 4 == 4096 // 16
    with ranks(
        model, (300, pages), WHOLE, split=True, turns=4, folder=folder, pool=new_pool(model), keep_logits=True
    ) as rank:
        rank.ask("0", prompt, SAMPLING, 46)
        rank.settle()
        rank.assert_at_rest()
        alone = OneRank(model, 300, WHOLE, keep_logits=True)
        alone.ask("0", prompt, SAMPLING, 46)
        alone.settle()
        assert_same_bits(rank.logits, alone.logits)


# ------------------------------------------------------------------------------- heads that are shared

TINY = {"num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16}
SIZES: dict[str, dict[str, Any]] = {
    "three and two": {"members": (3, 2), "preemption": "swap"},
    "two and one": {"members": (2, 1), "preemption": "recompute"},
    "two, of two stages": {"members": (1, 2), "stages": 2, "preemption": "recompute"},
    "two with both duties": {"members": (1, 2), "split": False, "preemption": "swap"},
}
"""Of the instance that prefills, and of the one that decodes."""


@pytest.fixture(scope="module")
def nine_heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """An oracle in float64 and a folder: three KV heads, so that members have two and one."""
    folder = tmp_path_factory.mktemp("nine")
    return tiny_model("llama", folder, hidden_size=72, **TINY).double(), folder


@pytest.mark.parametrize("sizes", list(SIZES))
def test_instances_of_all_sizes_answer_as_the_oracle_and_read_what_others_wrote(
    sizes: str, nine_heads: tuple[Any, Path]
) -> None:
    oracle, folder = nine_heads
    model = load_model(folder, batch_invariant=True)
    options: dict[str, Any] = {"split": True, "reuses": True, "folder": folder} | SIZES[sizes]
    late = "stages" in options
    limits = Limits(64 if late else 2000, sequences=12, prefills=4, late=late)
    pages = (300, 30) if options["split"] else 30
    with ranks(model, pages, limits, pool=new_pool(model), **options) as rank:
        answered(rank, 1, 64, 100, 130, 200, n=1)
        assert rank.seen["preempted" if options["preemption"] == "recompute" else "swapped"], rank.seen
        answered(rank, 1, 64, 100, 130, 200, n=1, name="again ")
        assert rank.seen["reused tokens"] >= 3 * 64, "nothing came from the pool"
        assert_answers(oracle, rank.cases(), partial(go_on, model))
