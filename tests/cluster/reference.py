"""What the model answers in one process, without MPI: the reference of every cluster test."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from mooncake_lite.demo.document import document_text
from mooncake_lite.engine import Engine, Sequence, pages_for
from mooncake_lite.engine.local import BLOCK_TOKENS, use_threads
from mooncake_lite.messages import Sampling
from mooncake_lite.model import Model, Tokenizer, load_model, load_tokenizer


@cache
def model(folder: Path) -> Model:
    use_threads(2)
    return load_model(folder, "float32", "cpu")


@cache
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def prompts(folder: Path, count: int = 20) -> list[list[int]]:
    """Prompts of 70 to 336 tokens that share prefixes of several blocks with each other, as ids."""
    ids = tokenizer(folder).encode(document_text())
    return [ids[(i % 4) * 300 : (i % 4) * 300 + 70 + 14 * i] for i in range(count)]


def greedy_texts(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[str]:
    """The greedy answers' texts."""
    return [tokenizer(folder).decode(ids) for ids in greedy_ids(folder, prompts, max_tokens)]


def greedy_ids(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """The greedy answers' tokens, all prompts in one running batch of one engine."""
    ends = frozenset(tokenizer(folder).eos_ids)
    pages = sum(pages_for(len(prompt) + max_tokens) for prompt in prompts)
    engine = Engine(model(folder), pages, BLOCK_TOKENS)
    answers = [_prefilled(engine, prompt, max_tokens, ends) for prompt in prompts]
    running = [sequence for sequence, finish in answers if finish is None]
    while running:
        finished = [s.append(token) for s, token in zip(running, engine.decode_step(running))]
        running = [sequence for sequence, finish in zip(running, finished) if finish is None]
    return [sequence.token_ids[len(prompt) :] for (sequence, _), prompt in zip(answers, prompts)]


def _prefilled(
    engine: Engine, prompt: list[int], max_tokens: int, ends: frozenset[int]
) -> tuple[Sequence, str | None]:
    sequence = Sequence("reference", list(prompt), Sampling(0.0), max_tokens, ends, len(prompt) + max_tokens)
    engine.reserve(sequence, len(prompt) + max_tokens)
    token = engine.prefill_chunk(sequence, len(prompt))
    assert token is not None
    return sequence, sequence.append(token)
