"""What the model answers in one process, without MPI: the reference of every cluster test."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from mooncake_lite.demo.document import document_text
from mooncake_lite.engine.local import generate_tokens, use_threads
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


@cache
def _greedy(folder: Path, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    ends = frozenset(tokenizer(folder).eos_ids)
    return tuple(generate_tokens(model(folder), list(prompt), Sampling(0.0), max_tokens, ends))


def greedy_text(folder: Path, prompt: list[int], max_tokens: int) -> str:
    """The greedy answer's text."""
    return tokenizer(folder).decode(list(_greedy(folder, tuple(prompt), max_tokens)))
