"""Paged attention on the CPU, beside torch's SDPA on contiguous KV, gathering and SDPA, and reading the KV.

Run by `bench.kernels`. A peer on contiguous KV has what a paged cache has not: a ratio of 1 to it means that
pages cost nothing. Gathering the pages first is what one would do without a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels_numba import paged_attention_decode, paged_attention_prefill
from mooncake_lite.bench.result import Action, Row, compare, milliseconds

PAGE = 16


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a model."""

    query: int
    kv: int
    dim: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} x {self.dim}"


SMOLLM2 = Heads(9, 3, 64)
LLAMA3_8B = Heads(32, 8, 128)


@numba.njit(parallel=True)
def read_all(words: np.ndarray) -> int:
    """Read every word once with all threads, and do as little as possible with it: the bound of attention.

    words   (n,) int64; integers, because adding floats one by one would wait for the adder, not for memory
    """
    total = 0
    for i in numba.prange(words.size):
        total += words[i]
    return total


class PagedKV:
    """Random KV of some sequences in pages at random places, and the same contiguous, for torch."""

    def __init__(self, heads: Heads, batch: int, tokens: int):
        pages = tokens // PAGE
        rng = np.random.default_rng(0)
        self.tables = rng.permutation(batch * pages).astype(np.int32).reshape(batch, pages)
        shape = (batch * pages, heads.kv, PAGE, heads.dim)
        self.keys, self.values = (rng.standard_normal(shape, np.float32) for _ in range(2))
        self._torch_tables = torch.from_numpy(self.tables).long()
        self.contiguous = self.gathered()

    def gathered(self) -> list[torch.Tensor]:
        """Keys and values as (batch, kv_heads, tokens, head_dim), copied out of the pages."""
        return [
            torch.from_numpy(cache)[self._torch_tables].transpose(1, 2).flatten(2, 3)
            for cache in (self.keys, self.values)
        ]

    def read_once(self) -> None:
        """All keys and values."""
        read_all(self.keys.reshape(-1).view(np.int64))
        read_all(self.values.reshape(-1).view(np.int64))


def run(quick: bool) -> list[Row]:
    """Measure; in some seconds when quick."""
    runs = 7 if quick else 21
    rows = decode(SMOLLM2, 8, 2048, runs) + prefill(512, 1536, runs)
    if not quick:
        rows += decode(SMOLLM2, 1, 2048, runs) + decode(LLAMA3_8B, 4, 4096, runs)
        rows += prefill(64, 1536, runs) + prefill(512, 0, runs)
    return rows


def decode(heads: Heads, batch: int, tokens: int, runs: int) -> list[Row]:
    """One new token for each of `batch` sequences of `tokens` tokens."""
    kv = PagedKV(heads, batch, tokens)
    query = np.random.default_rng(1).standard_normal((batch, heads.query, heads.dim), np.float32)
    lens = np.full(batch, tokens, np.int32)
    theirs = torch.from_numpy(query)[:, :, None]
    scale = heads.dim**-0.5

    def ours() -> np.ndarray:
        return paged_attention_decode(query, kv.keys, kv.values, kv.tables, lens, scale=scale)

    def attend(contiguous: list[torch.Tensor]) -> torch.Tensor:
        keys, values = contiguous
        return scaled_dot_product_attention(theirs, keys, values, enable_gqa=True)

    np.testing.assert_allclose(ours(), attend(kv.contiguous)[:, :, 0].numpy(), atol=1e-4)
    peers = [
        Action("torch SDPA on contiguous KV", lambda: attend(kv.contiguous)),
        Action("gather, then torch SDPA", lambda: attend(kv.gathered())),
    ]
    limit = Action("reading the KV once, all threads", kv.read_once)
    return compare(f"decode {batch} x {tokens}, {heads}", "ms", milliseconds, runs, ours, peers, limit)


def prefill(new: int, cached: int, runs: int) -> list[Row]:
    """`new` tokens of one sequence after `cached` ones. The limit: its two matrix products, contiguous."""
    heads, tokens = SMOLLM2, new + cached
    kv = PagedKV(heads, 1, tokens)
    query = np.random.default_rng(2).standard_normal((new, heads.query, heads.dim), np.float32)
    mask = torch.ones(new, tokens, dtype=torch.bool).tril(cached)
    theirs = torch.from_numpy(query).transpose(0, 1)[None].contiguous()
    query_lens, context_lens = np.array([new], np.int32), np.array([tokens], np.int32)
    left = torch.rand(new * heads.query, heads.dim)
    right = torch.rand(heads.dim, (tokens + cached) // 2)  # what a new token sees on the average

    def ours() -> np.ndarray:
        return paged_attention_prefill(
            query, kv.keys, kv.values, kv.tables, query_lens, context_lens, scale=heads.dim**-0.5
        )

    def attend(contiguous: list[torch.Tensor]) -> torch.Tensor:
        keys, values = contiguous
        return scaled_dot_product_attention(theirs, keys, values, attn_mask=mask, enable_gqa=True)

    def products() -> torch.Tensor:
        return (left @ right) @ right.T

    np.testing.assert_allclose(ours(), attend(kv.contiguous)[0].transpose(0, 1).numpy(), atol=1e-4)
    peers = [
        Action("torch SDPA with a mask, contiguous KV", lambda: attend(kv.contiguous)),
        Action("gather, then torch SDPA with a mask", lambda: attend(kv.gathered())),
    ]
    limit = Action("its two matrix products in torch, unmasked", products)
    name = f"prefill {new} after {cached}, {heads}"
    return compare(name, "ms", milliseconds, runs, ours, peers, limit)
