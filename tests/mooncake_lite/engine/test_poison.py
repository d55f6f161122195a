"""Weights that are no numbers fail the requests that meet them, and change no token of any other request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mooncake_lite.engine.local import BLOCK_TOKENS, generate_all
from mooncake_lite.engine.logprobs import score
from mooncake_lite.errors import ClusterError
from mooncake_lite.messages import Sampling
from mooncake_lite.model.forward import Model, load_model
from scheduler.instance import Limits
from scheduler.instance.step import ENGINE_ERROR, LOGITS_NOT_FINITE
from tests.mooncake_lite.engine.matrix import Cell
from tests.mooncake_lite.engine.one_rank import OneRank
from tests.mooncake_lite.engine.test_matrix import ranks
from tests.mooncake_lite.model.conftest import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

NAN, INFINITE, PARTLY = 196, 197, 198
"""Tokens whose rows of the embedding are no numbers, or infinite, or have one such value."""

SOUND = dict.fromkeys((NAN, INFINITE, PARTLY), -100.0)
GREEDY, SAMPLED = Sampling(0.0, logit_bias=SOUND), Sampling(0.9, top_p=0.9, seed=5, logit_bias=SOUND)
TO_NAN = Sampling(0.9, seed=5, logit_bias={NAN: 100.0})
"""Draws the poison first, so that the pass after it has no numbers."""


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("poisoned")
    oracle = tiny_model("llama", folder, num_hidden_layers=2, tie_word_embeddings=False)
    with torch.no_grad():
        rows = oracle.model.embed_tokens.weight
        rows[NAN], rows[INFINITE], rows[PARTLY, 9] = torch.nan, torch.inf, -torch.inf
    oracle.save_pretrained(folder)
    return load_model(folder)


CELLS = [
    Cell("colocated", "rank", "64", "recompute", "hash", "greedy", "blocks"),
    Cell("colocated", "rank", "16", "recompute", "radix", "greedy", "blocks"),
    Cell("colocated", "DRAM", "16", "swap", "hash", "greedy", "blocks"),
    Cell("split", "none", "64", "recompute", "off", "greedy", "blocks"),
    Cell("pooled", "DRAM", "16", "recompute", "hash", "greedy", "blocks"),
    Cell("pooled", "DRAM", "whole", "recompute", "hash", "greedy", "layers"),
    Cell("pooled", "DRAM", "64", "swap", "radix", "greedy", "stages"),
]

TEXT = [3 + 7 * number % 190 for number in range(150)]
BLOCK = TEXT[:BLOCK_TOKENS]

PLAIN = [
    (BLOCK + TEXT[70:90], GREEDY, 1),
    (TEXT[5:22], SAMPLED, 1),
    (BLOCK + TEXT[90:91], SAMPLED, 3),
    (TEXT[40:140], GREEDY, 1),
]
POISONS = [
    ([*BLOCK, NAN, *TEXT[70:90]], GREEDY, 1),
    ([INFINITE, *TEXT[5:22]], SAMPLED, 1),
    ([*TEXT[5:40], PARTLY], SAMPLED, 3),
    ([*TEXT[40:140], NAN], GREEDY, 1),
    (TEXT[30:60], TO_NAN, 1),
    (BLOCK + TEXT[20:60], TO_NAN, 3),
]


def ask_plain(rank: OneRank, round_: str) -> Iterator[Callable[[], None]]:
    for number, (prompt, sampling, n) in enumerate(PLAIN):
        yield lambda number=number, prompt=prompt, sampling=sampling, n=n: rank.ask(
            f"{round_} {number}", prompt, sampling, 30, n
        )


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_poisoned_request_fails_alone_and_leaves_nothing_in_pages_and_blocks(
    cell: Cell, poisoned: Model
) -> None:
    alone = ranks(cell, poisoned)
    for ask in ask_plain(alone, "beside"):
        ask()
    alone.settle()
    assert not alone.faults

    rank = ranks(cell, poisoned)
    for number, (ask, poison) in enumerate(zip([*ask_plain(rank, "beside")], POISONS)):
        ask()
        prompt, sampling, n = poison
        rank.ask(f"poison {number}", prompt, sampling, 30, n)
        rank.step()
    for number, (prompt, sampling, n) in enumerate(POISONS[len(PLAIN) :], len(PLAIN)):
        rank.ask(f"poison {number}", prompt, sampling, 30, n)
    rank.settle()
    for ask in ask_plain(rank, "after"):
        ask()
    rank.settle()
    rank.assert_at_rest()

    assert rank.faults == {f"poison {number}": LOGITS_NOT_FINITE for number in range(len(POISONS))}
    for (name, branch), answer in alone.answers.items():
        assert rank.answers[name, branch] == answer
        assert rank.answers[name.replace("beside", "after"), branch] == answer
    for number in (4, 5):  # the token that leads to the poison was told
        assert rank.answers[f"poison {number}", 0] == [NAN]


class DraftsPoison:
    """Drafts tokens whose embedding is no number."""

    def __init__(self, job: object, branch: int) -> None:
        pass

    def after(self, sequence: object, most: int) -> tuple[list[int], bool]:
        return [NAN, INFINITE, PARTLY, 3, 4, 5, 6][:most], False


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_poison_that_is_a_draft_alone_changes_nothing(cell: Cell, poisoned: Model) -> None:
    plain, rank = ranks(cell, poisoned), ranks(cell, poisoned)
    rank.draft_with(DraftsPoison)
    for one in (plain, rank):
        for ask in (*ask_plain(one, "once"), *ask_plain(one, "twice")):
            ask()
        one.settle()
        one.assert_at_rest()
    assert rank.seen["drafts"] > 10 * len(PLAIN)
    assert not rank.faults
    assert rank.answers == plain.answers


def test_a_head_that_is_no_number_fails_every_request_whatever_it_asks_for(tmp_path: Path) -> None:
    oracle = tiny_model("llama", tmp_path, num_hidden_layers=2, tie_word_embeddings=False)
    with torch.no_grad():
        oracle.lm_head.weight[7] = torch.nan
    oracle.save_pretrained(tmp_path)
    rank = OneRank(load_model(tmp_path), 40, Limits(64))
    wishes = [GREEDY, SAMPLED, Sampling(0.0, logit_bias={7: -100.0}), Sampling(1.0, top_k=1), TO_NAN]
    for number, sampling in enumerate(wishes):
        rank.ask(str(number), TEXT[:20], sampling, 4)
    rank.settle()
    assert rank.faults == {str(number): LOGITS_NOT_FINITE for number in range(len(wishes))}


@pytest.mark.parametrize(("value", "found"), [(torch.nan, 0), (torch.inf, 0), (-torch.inf, 3), (1e38, 3)])
@pytest.mark.parametrize("place", [0, 17, 198])
def test_a_prompt_has_no_logprobs_if_a_row_of_its_logits_is_not_finite(
    value: float, found: int, place: int
) -> None:
    logits = torch.zeros(3, 199)
    logits[1, place] = value
    assert len(score(lambda states: logits, logits, [4, 5, 6], 2)) == found


@pytest.mark.parametrize("cell", CELLS[:-1], ids=lambda cell: cell.name)
def test_ids_beyond_the_embedding_fail_the_requests_that_have_them_alone(cell: Cell, poisoned: Model) -> None:
    """The gateway refuses such ids. Where one comes through all the same, torch and NumPy raise."""
    outside = poisoned.config.vocab_size
    alone, rank = ranks(cell, poisoned), ranks(cell, poisoned)
    poisons = [
        ([*BLOCK, outside, 5], GREEDY, 1),
        ([-outside - 1, *TEXT[5:22]], SAMPLED, 3),
        (TEXT[:20], Sampling(0.0, logit_bias={outside: 1.0}), 1),
        ([*TEXT[40:140], 1 << 31], Sampling(0.9, repetition_penalty=1.1), 1),
    ]
    for ask in ask_plain(alone, "beside"):
        ask()
    for number, (ask, poison) in enumerate(zip(ask_plain(rank, "beside"), poisons, strict=True)):
        ask()
        prompt, sampling, n = poison
        rank.ask(f"poison {number}", prompt, sampling, 30, n)
        rank.step()
    for one in (alone, rank):
        one.settle()
        one.assert_at_rest()
    assert rank.faults == {f"poison {number}": ENGINE_ERROR for number in range(len(poisons))}
    assert {name: answer for name, answer in rank.answers.items() if answer} == alone.answers


def test_generate_says_that_a_request_failed_and_does_not_end_in_silence(poisoned: Model) -> None:
    with pytest.raises(ClusterError, match="the logits of its next token are not finite numbers"):
        list(generate_all(poisoned, [TEXT[:9], [5, NAN]], GREEDY, 4, frozenset()))
