"""What the tests of lab 1 share: sequences in scattered pages, and how results are compared.

Numbers are eighths, so bfloat16 holds them exactly. What no sequence owns is poison: NaN in pages, and an
index out of range in tables.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from mooncake_lite.labs.judging import Judge

NO_PAGE = 2**31 - 1
THREADS = 64
"""Of a block, in each launch."""
EVERYTHING = 2**31 - 1
"""A window that hides nothing."""
TOLERANCE = {"float32": 2e-4, "bfloat16": 2e-2}
"""Of results, relative to the largest number that a result of the case could be, which is 2."""

Bits = list[Any]


def eighths(draw: random.Random, *shape: int) -> np.ndarray:
    """Return numbers from -2 to 2."""
    count = int(np.prod(shape))
    return np.array([draw.randint(-16, 16) / 8 for _ in range(count)]).reshape(shape)


def encoded(numbers: np.ndarray, dtype: str) -> Bits:
    """Return float32 numbers, or the bits of bfloat16, as the child gets them."""
    if dtype == "bfloat16":
        return (numbers.astype(np.float32).view(np.uint32) >> 16).tolist()
    return numbers.tolist()


def decoded(numbers: Sequence[float | None], dtype: str) -> np.ndarray:
    """Return the numbers of an answer."""
    if dtype == "bfloat16":
        bits = np.array([0x7FC0 if n is None else n for n in numbers]).astype(np.uint32)
        return (bits << 16).view(np.float32).astype(float)
    return np.array(numbers, float)


def softmax_mean(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the mean of values (tokens, head_dim) under the softmax of scores (tokens,); zeros without any
    tokens."""
    if not scores.size:
        return np.zeros(values.shape[-1])
    weights = np.exp(scores - scores.max())
    return (weights[:, None] * values).sum(axis=0) / weights.sum()


class Paged:
    """Sequences whose keys and values lie in pages in a random order.

    keys, values   [sequence] -> (tokens, kv_heads, head_dim)
    caches         the same in pages: (2, pages, kv_heads, page_tokens, head_dim)
    tables         (sequences, columns) with NO_PAGE where a sequence has none
    """

    def __init__(
        self,
        draw: random.Random,
        contexts: Sequence[int],
        page_tokens: int,
        kv_heads: int,
        head_dim: int,
        *,
        rising: bool = False,
    ) -> None:
        self.page_tokens = page_tokens
        needed = [-(-tokens // page_tokens) for tokens in contexts]
        free = draw.sample(range(sum(needed) + 2), sum(needed) + 2)
        self.keys = [eighths(draw, tokens, kv_heads, head_dim) for tokens in contexts]
        if rising:
            self.keys = [keys + np.arange(len(keys))[:, None, None] / 32 for keys in self.keys]
        self.values = [eighths(draw, tokens, kv_heads, head_dim) for tokens in contexts]
        self.caches = np.full((2, len(free), kv_heads, page_tokens, head_dim), np.nan)
        self.tables = np.full((len(contexts), max(needed) + 1), NO_PAGE)
        for b, tokens in enumerate(contexts):
            for t in range(tokens):
                logical, row = divmod(t, page_tokens)
                if row == 0:
                    self.tables[b, logical] = free.pop()
                self.caches[0, self.tables[b, logical], :, row] = self.keys[b][t]
                self.caches[1, self.tables[b, logical], :, row] = self.values[b][t]


def wrong(found: np.ndarray, wanted: np.ndarray, dtype: str = "float32") -> dict[str, tuple[Any, Any]]:
    """Return up to three places with (what is there, what should be); empty when all is near enough."""
    if found.size != wanted.size:
        return {"numbers": (found.size, wanted.size)}
    found = found.reshape(wanted.shape)
    far = ~(np.abs(found - wanted) <= TOLERANCE[dtype])
    places = [tuple(int(i) for i in place) for place in np.argwhere(far)[:3]]
    return {
        str(list(place)): (round(float(found[place]), 5), round(float(wanted[place]), 5)) for place in places
    }


def expect_near(
    lab: Judge, found: np.ndarray, wanted: np.ndarray, called: str, breaks: str, dtype: str = "float32"
) -> None:
    """Fail the test unless two arrays are near; show the first places where they are not."""
    far = wrong(found, wanted, dtype)
    if any(np.isnan(pair[0]) for pair in far.values()):
        breaks += "; NaN comes from what nobody has written, from slots that hold no token, or from infinity"
    lab.expect(
        {place: pair[0] for place, pair in far.items()},
        {place: pair[1] for place, pair in far.items()} if far else {},
        called,
        breaks,
    )


# ----------------------------------------------------------------------------------------- kernels


RULES = {
    "race": "a barrier lies between uses of a shared cell",
    "unwritten": "a cell of shared memory is written before it is read",
    "barrier": "every thread of a block comes to the same cuda.syncthreads()",
}
"""What a finding of the race checker breaks, by its kind."""


class Found(msgspec.Struct):
    """A finding of the race checker."""

    kind: str
    text: str


class Reads(msgspec.Struct):
    """Elements that all threads have read; of keys also those that the busiest thread has read."""

    keys: int
    values: int
    keys_of_busiest: int


class Launched(msgspec.Struct):
    """What a launch has shown: its numbers, the findings of the race checker, and what was read.

    drawn   an access map for `labs show`
    reads   None on a GPU, where nothing is recorded
    """

    out: list[float | None]
    findings: list[Found]
    reads: Reads | None
    drawn: Any


class Batch:
    """New tokens of several sequences, and what attention must make of them.

    contexts, new   tokens and new tokens of each sequence
    rising          whether later tokens have higher scores
    """

    def __init__(
        self,
        lab: Judge,
        contexts: Sequence[int],
        new: Sequence[int],
        *,
        heads: int = 1,
        kv_heads: int = 1,
        head_dim: int = 4,
        window: int = EVERYTHING,
        scale: float = 0.5,
        dtype: str = "float32",
        rising: bool = False,
    ) -> None:
        self.paged = Paged(lab.random, contexts, lab.size.page_tokens, kv_heads, head_dim, rising=rising)
        self.query = eighths(lab.random, sum(new), heads, head_dim)
        if rising:
            self.query = np.abs(self.query) + 1 / 8
        self.contexts, self.new, self.window, self.scale, self.dtype = contexts, new, window, scale, dtype
        self.kv_heads = kv_heads

    def wanted(self) -> np.ndarray:
        """Return the right result, in float64."""
        heads = self.query.shape[1]
        group, rows = heads // self.kv_heads, []
        for b, (context, new) in enumerate(zip(self.contexts, self.new)):
            for position in range(context - new, context):
                seen = slice(max(0, position - self.window + 1), position + 1 if context else 0)
                for head in range(heads):
                    keys = self.paged.keys[b][seen, head // group]
                    scores = keys @ self.query[len(rows) // heads, head] * self.scale
                    rows.append(softmax_mean(scores, self.paged.values[b][seen, head // group]))
        return np.array(rows).reshape(self.query.shape)

    def visible(self) -> list[int]:
        """Return how many tokens each new token sees."""
        return [
            min(position + 1, self.window)
            for context, new in zip(self.contexts, self.new)
            for position in range(context - new, context)
        ]

    def called(self, kernel: str) -> str:
        """Return the launch in words."""
        rows, heads, head_dim = self.query.shape
        said = (
            f"{kernel} on {rows} rows x {heads} heads x {head_dim}, query_lens {list(self.new)}, "
            f"context_lens {list(self.contexts)}, pages of {self.paged.page_tokens}, {self.dtype}"
        )
        return said if self.window == EVERYTHING else f"{said}, window {self.window}"


def launch(lab: Judge, kernel: str, batch: Batch, rule: str) -> Launched:
    """Launch a kernel, and expect the right numbers and no finding of the race checker."""
    inputs = {
        "kernel": kernel,
        "dtype": batch.dtype,
        "query": encoded(batch.query, batch.dtype),
        "key_cache": encoded(batch.paged.caches[0], batch.dtype),
        "value_cache": encoded(batch.paged.caches[1], batch.dtype),
        "block_tables": batch.paged.tables.tolist(),
        "query_lens": batch.new,
        "context_lens": batch.contexts,
        "scale": batch.scale,
        "window": batch.window,
        "block": (0, 0, 0),
    }
    called = batch.called(kernel)
    seen = lab.ask("launch", inputs, Launched, called)
    lab.trace(seen.drawn)
    for finding in seen.findings:
        lab.expect(finding.text, "no finding", f"{called} (race checker)", RULES[finding.kind])
    found, wanted = decoded(seen.out, batch.dtype), batch.wanted()
    if (block := block_of(kernel, found, wanted, batch.dtype)) != (0, 0, 0):
        lab.trace(lab.ask("launch", inputs | {"block": block}, Launched, called).drawn)
    expect_near(lab, found, wanted, f"{called} (out[row, head, channel])", rule, batch.dtype)
    return seen


def block_of(kernel: str, found: np.ndarray, wanted: np.ndarray, dtype: str) -> tuple[int, int, int]:
    """Return the block that computes the first wrong number."""
    if found.size != wanted.size or not (far := wrong(found, wanted, dtype)):
        return (0, 0, 0)
    place = json.loads(next(iter(far)))
    if kernel == "attention_v1_shared":
        return (place[0], place[1], 0)
    return (int(np.ravel_multi_index(place, wanted.shape)) // THREADS, 0, 0)


def launch_with_16_bits(lab: Judge, kernel: str, batch: Batch) -> None:
    """Launch a kernel with float32, then with bfloat16, so that only the latter's own faults are named so."""
    launch(lab, kernel, batch, "out = softmax(query . keys * scale) . values, of float32 first")
    batch.dtype = "bfloat16"
    launch(lab, kernel, batch, "elements are read through widen and written through narrow")


def counted_batch(lab: Judge) -> Batch:
    """Return the case of the costs of 1d and 1e."""
    size = lab.size
    return Batch(lab, [size.kernel_context], [size.new_tokens], heads=2, head_dim=size.head_dim)
