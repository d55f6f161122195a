"""Attention and block kernels on the CPU, beside torch in the same process.

Shapes are SmolLM2's: 9 query heads, 3 KV heads of 64, pages of 16 tokens. The peer reads contiguous KV,
which a paged cache is not: a ratio of 1 means that pages cost nothing.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from kernels_numba import gather_blocks, paged_attention_decode, paged_attention_prefill
from mooncake_lite.bench.result import Other, Row, against, median_seconds

HEADS, KV_HEADS, DIM, PAGE = 9, 3, 64, 16
SCALE = DIM**-0.5


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
    """Random KV of some sequences, in pages at random places, and the same contiguous for the peer."""

    def __init__(self, batch: int, tokens: int):
        pages = tokens // PAGE
        rng = np.random.default_rng(0)
        self.tables = rng.permutation(batch * pages).astype(np.int32).reshape(batch, pages)
        shape = (batch * pages, KV_HEADS, PAGE, DIM)
        self.keys, self.values = (rng.standard_normal(shape, np.float32) for _ in range(2))
        self.contiguous = [
            torch.from_numpy(np.concatenate(cache[self.tables].swapaxes(0, 1), axis=2).copy())
            for cache in (self.keys, self.values)
        ]

    @property
    def nbytes(self) -> int:
        """Of keys and values together."""
        return self.keys.nbytes + self.values.nbytes


def run(quick: bool) -> list[Row]:
    """Measure; in some seconds when quick."""
    runs = 7 if quick else 31
    rows = [decode(1, 2048, runs), decode(8, 2048, runs), prefill(512, 1536, max(3, runs // 3))]
    return rows if quick else [*rows, decode(4, 8192, runs), gather(runs)]


def decode(batch: int, tokens: int, runs: int) -> Row:
    """One new token for each of `batch` sequences of `tokens` tokens."""
    kv = PagedKV(batch, tokens)
    query = np.random.default_rng(1).standard_normal((batch, HEADS, DIM), np.float32)
    lens = np.full(batch, tokens, np.int32)
    theirs = torch.from_numpy(query)[:, :, None]

    def ours() -> np.ndarray:
        return paged_attention_decode(query, kv.keys, kv.values, kv.tables, lens, scale=SCALE)

    def peer() -> torch.Tensor:
        keys, values = kv.contiguous
        return torch.nn.functional.scaled_dot_product_attention(theirs, keys, values, enable_gqa=True)

    def read_once() -> None:
        read_all(kv.keys.reshape(-1).view(np.int64))
        read_all(kv.values.reshape(-1).view(np.int64))

    np.testing.assert_allclose(ours(), peer()[:, :, 0].numpy(), atol=1e-4)
    mine, torchs, reading = against(runs, ours, peer, read_once)
    return Row(
        f"decode attention, {batch} x {tokens} tokens",
        "ms",
        mine * 1e3,
        Other("torch SDPA on contiguous KV", torchs * 1e3),
        Other("reading the KV once, all threads", reading * 1e3),
        runs,
    )


def prefill(new: int, cached: int, runs: int) -> Row:
    """`new` tokens of one sequence after `cached` ones."""
    tokens = new + cached
    kv = PagedKV(1, tokens)
    query = np.random.default_rng(2).standard_normal((new, HEADS, DIM), np.float32)
    mask = torch.ones(new, tokens, dtype=torch.bool).tril(cached)
    theirs = torch.from_numpy(query).transpose(0, 1)[None].contiguous()
    query_lens, context_lens = np.array([new], np.int32), np.array([tokens], np.int32)

    def ours() -> np.ndarray:
        return paged_attention_prefill(
            query, kv.keys, kv.values, kv.tables, query_lens, context_lens, scale=SCALE
        )

    def peer() -> torch.Tensor:
        keys, values = kv.contiguous
        return torch.nn.functional.scaled_dot_product_attention(
            theirs, keys, values, attn_mask=mask, enable_gqa=True
        )

    np.testing.assert_allclose(ours(), peer()[0].transpose(0, 1).numpy(), atol=1e-4)
    mine, torchs = median_seconds(runs, ours, peer)
    name = f"prefill attention, {new} new after {cached} cached"
    return Row(name, "ms", mine * 1e3, Other("torch SDPA with a mask, contiguous", torchs * 1e3), None, runs)


def gather(runs: int) -> Row:
    """16 blocks of 64 tokens out of the pages of 30 layers."""
    layers, blocks, block = 30, 16, 64
    pages = blocks * block // PAGE * 2
    rng = np.random.default_rng(3)
    caches = rng.standard_normal((layers, 2, pages, KV_HEADS, PAGE, DIM), np.float32)
    ids = rng.permutation(pages)[: pages // 2].astype(np.int32).reshape(blocks, -1)
    out = np.empty((blocks, layers, 2, KV_HEADS, block, DIM), np.float32)
    plain = np.empty_like(out)

    def peer() -> None:
        for number in range(blocks):
            pieces = caches[:, :, ids[number]].transpose(0, 1, 3, 2, 4, 5)
            plain[number] = pieces.reshape(layers, 2, KV_HEADS, block, DIM)

    source = out.copy()
    theirs, target = torch.from_numpy(plain), torch.from_numpy(source)
    times = against(runs, lambda: gather_blocks(caches, ids, out), peer, lambda: target.copy_(theirs))
    np.testing.assert_array_equal(out, plain)
    mine, numpys, copying = (out.nbytes / 1e9 / seconds for seconds in times)
    return Row(
        f"gather {blocks} blocks of {block} tokens",
        "GB/s",
        mine,
        Other("NumPy indexing", numpys),
        Other("copy of contiguous memory, all threads", copying),
        runs,
    )
