"""What the model answers in one process, without MPI: the reference of every cluster test."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from mooncake_lite.engine.local import generate_all, use_threads
from mooncake_lite.messages import Sampling
from mooncake_lite.model.config import DType
from mooncake_lite.model.forward import Model, load_model
from mooncake_lite.model.tokenizer import Tokenizer, load_tokenizer
from mooncake_lite.tools.demo.document import document_text
from scheduler.instance import Limits
from tests.cluster.asking import ANSWER_TOKENS


@cache
def model(folder: Path, dtype: DType) -> Model:
    use_threads(1)
    return load_model(folder, dtype, "cpu")


@cache
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def prompts(folder: Path, count: int = 20) -> list[list[int]]:
    """Prompts of 70 to 203 tokens that share prefixes of up to three blocks with each other, as ids."""
    ids = tokenizer(folder).encode(document_text())
    return [ids[(i % 4) * 300 : (i % 4) * 300 + 70 + 7 * i] for i in range(count)]


@cache
def oracle(folder: Path) -> Any:
    """The model as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """Logprobs of all tokens after each of the ids but the last, by transformers: (len(ids) - 1, vocab)."""
    with torch.inference_mode():
        return oracle(folder)(torch.tensor([ids])).logits[0, :-1].log_softmax(1)


def greedy_texts(
    folder: Path, prompts: list[list[int]], max_tokens: int = ANSWER_TOKENS, dtype: DType = "float32"
) -> list[str]:
    """The greedy answers' texts, of ANSWER_TOKENS tokens at most."""
    return [tokenizer(folder).decode(ids[:max_tokens]) for ids in greedy_ids(folder, prompts, dtype)]


def greedy_ids(folder: Path, prompts: list[list[int]], dtype: DType = "float32") -> list[list[int]]:
    """The greedy answers' tokens, ANSWER_TOKENS each or fewer; many tests ask for the same prompts."""
    known = _answers(folder, dtype)
    new = [prompt for prompt in prompts if tuple(prompt) not in known]
    known.update(zip(map(tuple, new), _generate(folder, dtype, new)))
    return [known[tuple(prompt)] for prompt in prompts]


@cache
def _answers(folder: Path, dtype: DType) -> dict[tuple[int, ...], list[int]]:
    """prompt -> answer, of this run of the tests."""
    return {}


def _generate(folder: Path, dtype: DType, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts in one running batch of one engine."""
    ends = frozenset(tokenizer(folder).eos_ids)
    answers: list[list[int]] = [[] for _ in prompts]
    longest = max((len(prompt) for prompt in prompts), default=1)
    whole = Limits(longest, chunked=False)
    tokens = generate_all(model(folder, dtype), prompts, Sampling(0.0), ANSWER_TOKENS, ends, whole)
    for number, token in tokens:
        answers[number].append(token)
    return answers
