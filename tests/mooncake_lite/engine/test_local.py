"""Many prompts in one process: whatever shares a forward pass, each answer is that of its prompt alone."""

from __future__ import annotations

import random

import pytest

from mooncake_lite.engine.local import generate_all
from mooncake_lite.messages import Sampling
from mooncake_lite.model.forward import Model, load_model
from scheduler.instance import Limits
from tests.mooncake_lite.engine.one_rank import OneRank
from tests.mooncake_lite.model.conftest import tiny_model

LENGTHS = (1, 150, 7, 64, 33)
WAYS = {
    "one prompt at a time, whole": Limits(1000, sequences=1, chunked=False),
    "whole prompts beside decodes": Limits(1000, prefills=4, chunked=False),
    "small chunks beside decodes": Limits(16, prefills=1),
    "several prompts in one pass": Limits(64, prefills=3),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, device: str) -> Model:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", folder)
    return load_model(folder, device=device)


def answers(model: Model, prompts: list[list[int]], sampling: Sampling, limits: Limits) -> list[list[int]]:
    """The answers of 12 tokens."""
    said: list[list[int]] = [[] for _ in prompts]
    for number, token in generate_all(model, prompts, sampling, 12, frozenset(), limits):
        said[number].append(token)
    return said


@pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(0.8, top_k=20, seed=4)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_answers_do_not_depend_on_what_shares_a_forward_pass(
    way: str, sampling: Sampling, model: Model
) -> None:
    chosen = random.Random(11)
    prompts = [[chosen.randrange(3, model.config.vocab_size) for _ in range(length)] for length in LENGTHS]
    alone = answers(model, prompts, sampling, WAYS["one prompt at a time, whole"])
    assert answers(model, prompts, sampling, WAYS[way]) == alone


@pytest.mark.parametrize("sharing", ["off", "hash", "radix"])
def test_the_answers_to_one_prompt_are_those_of_consecutive_seeds(sharing: str, model: Model) -> None:
    chosen = random.Random(5)
    prompt = [chosen.randrange(3, model.config.vocab_size) for _ in range(77)]
    alone = [
        answers(model, [prompt], Sampling(0.9, seed=20 + branch), WAYS["small chunks beside decodes"])[0]
        for branch in range(4)
    ]
    assert len({tuple(answer) for answer in alone}) > 1
    assert branches(model, prompt, Sampling(0.9, seed=20), 4, sharing) == alone


def branches(model: Model, prompt: list[int], sampling: Sampling, n: int, sharing: str) -> list[list[int]]:
    """The n answers of 12 tokens to one prompt, which is computed once."""
    rank = OneRank(model, 40, Limits(16), sharing)
    rank.ask("a", prompt, sampling, 12, n)
    rank.settle()
    rank.assert_at_rest()
    assert rank.seen["computed tokens"] == len(prompt)
    return [rank.answers["a", branch] for branch in range(n)]
