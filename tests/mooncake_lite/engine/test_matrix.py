"""Answers in every cell of the matrix are those of transformers, up to rounding.

`make test` runs cells that have all pairs of values between them, `make soak` all cells and other prompts.
docs/reference/equality.md tells which.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest

from mooncake_lite.engine.local import BLOCK_TOKENS
from mooncake_lite.messages import Sampling
from mooncake_lite.model.forward import Model
from scheduler.instance import Limits
from tests.mooncake_lite.engine.byte_pool import BytePool
from tests.mooncake_lite.engine.exact import Case, assert_answers
from tests.mooncake_lite.engine.examples import a_random
from tests.mooncake_lite.engine.matrix import CHOSEN, DIMENSIONS, IN_PROCESS, Cell, cells
from tests.mooncake_lite.engine.one_rank import Branch, Knows, OneRank, go_on

NUM_PAGES = 40
DEALT_PAGES = 30
"""The same of each of two members that hold contexts together."""
FEWER_WITH_DRAFTS = 10
"""Sequences with drafts end sooner: pages have to run out all the same."""
REQUESTS = 8
PREFIX = 2 * BLOCK_TOKENS
"""Tokens that each two prompts share."""
LONGER = 3 * BLOCK_TOKENS
"""The same where contexts are dealt out: answers go on into the second unit, and take new pages before."""

SAMPLINGS = {
    "greedy": Sampling(0.0),
    "sampled": Sampling(0.9, seed=5),
    "nucleus": Sampling(0.8, top_p=0.9, top_k=40, seed=6),
    "n=3": Sampling(0.9, top_k=20, seed=7),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        some = IN_PROCESS if metafunc.config.getoption("--soak", default=0) else CHOSEN
        metafunc.parametrize("cell", some, ids=lambda cell: cell.name)


def ranks(cell: Cell, model: Model, folder: Path | None = None) -> OneRank:
    config = model.config
    block_nbytes = config.layers * 2 * config.kv_heads * BLOCK_TOKENS * config.head_dim * 4
    whole, tokens = cell.chunk == "whole", 256 if cell.chunk == "whole" else int(cell.chunk)
    num_pages = NUM_PAGES - FEWER_WITH_DRAFTS * (cell.drafts == "on")
    return OneRank(
        model,
        (num_pages, DEALT_PAGES) if cell.moves == "turns" else num_pages,
        Limits(
            tokens,
            sequences=12,
            prefills=3,
            chunked=not whole,
            layers=config.layers if cell.moves == "layers" else 0,
            late=cell.moves == "stages",
            even=2000 if cell.moves == "stages" else 0,
        ),
        cell.sharing,
        split=cell.mode != "colocated",
        pool=BytePool(block_nbytes) if needs_pool(cell) else None,
        reuses=cell.source == "DRAM",
        preemption="swap" if cell.preemption == "swap" else "recompute",
        stages=2 if cell.moves == "stages" else 1,
        members=(2, 2) if cell.moves == "heads" else (1, 1),
        turns=2 if cell.moves == "turns" else 1,
        folder=folder,
    )


def needs_pool(cell: Cell) -> bool:
    return (
        cell.mode != "colocated"
        or cell.source == "DRAM"
        or cell.preemption == "swap"
        or cell.moves == "heads"
    )


def prompts(chosen: random.Random, vocabulary: int, prefix: int = PREFIX) -> list[list[int]]:
    """Pairs that share their first tokens, `prefix` of them, of up to 60 tokens more."""
    bodies = [[chosen.randrange(3, vocabulary) for _ in range(prefix)] for _ in range(REQUESTS // 2)]
    ends = [chosen.choice([1, 15, 16, 17, 60]) for _ in range(REQUESTS)]
    return [
        [*bodies[i // 2], *(chosen.randrange(3, vocabulary) for _ in range(end))]
        for i, end in enumerate(ends)
    ]


def known(model: Model, asked: list[list[int]], lengths: list[int], sampling: str) -> dict[Branch, list[int]]:
    """Answers, each computed alone, by the names of their requests."""
    n = 3 if sampling == "n=3" else 1
    names = [(str(number), branch) for number in range(len(asked)) for branch in range(n)]
    cases = [
        Case(tuple(asked[int(name)]), SAMPLINGS[sampling], (0,) * lengths[int(name)], branch, 0)
        for name, branch in names
    ]
    return dict(zip(names, map(list, go_on(model, cases))))


def test_an_answer_is_the_oracles_in(
    cell: Cell, model: Model, oracle_and_folder: tuple[Any, Path], soak: int
) -> None:
    chosen = a_random(soak)
    prefix = LONGER if cell.moves == "turns" else PREFIX
    asked = prompts(chosen, model.config.vocab_size, prefix)
    rank = ranks(cell, model, oracle_and_folder[1])
    if cell.source == "none" and cell.moves == "turns":
        asked = [[3 + number, *prompt[1:]] for number, prompt in enumerate(asked)]  # all of them stay long
    elif cell.source == "none":
        asked = [prompt[number % 2 * prefix :] for number, prompt in enumerate(asked)]
    else:
        for number in range(0, REQUESTS, 2):
            rank.ask(f"before {number}", asked[number][: prefix + 1], Sampling(0.0), 2)
            rank.settle()
        if cell.source == "DRAM":
            rank.forget()
    lengths = [chosen.randint(50, 70) for _ in asked]
    if cell.drafts == "on":
        answers = known(model, asked, lengths, cell.sampling)
        rank.draft_with(functools.partial(Knows, answers))
    for number, prompt in enumerate(asked):
        n = 3 if cell.sampling == "n=3" else 1
        rank.ask(str(number), prompt, SAMPLINGS[cell.sampling], lengths[number], n)
    rank.settle()
    rank.assert_at_rest()
    rank.close()
    assert bool(rank.seen["accepted"]) == (cell.drafts == "on")
    kinds = {"rank": "shared", "DRAM": "blocks read", "recompute": "preempted", "swap": "swapped"}
    if cell.moves == "layers":
        kinds["DRAM"] = "came by layers"
        assert rank.seen["left by layers"] or cell.mode == "colocated"
    for value in (cell.source, cell.preemption) if soak == 1 else (cell.source,):
        assert value not in kinds or rank.seen[kinds[value]], f"no {kinds[value]}: {rank.seen}"
    assert_answers(oracle_and_folder[0], rank.cases(), functools.partial(go_on, model))


@pytest.mark.quick
def test_the_chosen_cells_have_every_pair_of_values_that_is_possible_without_files() -> None:
    def pairs_of(some: list[Cell]) -> set[Any]:
        return {pair for cell in some for pair in cell.pairs()}

    assert pairs_of(CHOSEN) == pairs_of(IN_PROCESS)
    assert len(CHOSEN) < 30
    values = {(name, value) for name, some in DIMENSIONS.items() for value in some}
    assert {value for pair in pairs_of(cells()) for value in pair} == values
