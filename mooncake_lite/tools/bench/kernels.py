"""Kernels on the CPU beside torch in the same process: attention, movers, codecs, linear layers.

Run by `bench.command`. On a GPU the same comparison is made by `python -m kernels_numba.gpu_report`, which
needs torch and numba-cuda alone.

Paged attention has torch's SDPA beside it, on contiguous KV and after gathering. A peer on contiguous KV has
what a paged cache has not: a ratio of 1 to it means that pages cost nothing. Gathering the pages first is
what one would do without a kernel. The bytes of movers are those of the uncompressed KV, whatever a codec
makes of them. Linear layers have SmolLM2's shapes: its output layer, and the gate of its MLP; the gate once
alone, which then stays in the caches, and once in turn with those of all 30 layers, as in a decode step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numba
import numpy as np
import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import scaled_dot_product_attention

from kernels_numba import gather_blocks, paged_attention_decode, paged_attention_prefill, scatter_blocks
from kernels_numba.codecs import CODECS
from kernels_numba.matmul.linear_blocks import BLOCK_BYTES, GGUF_FORMATS
from kernels_numba.matmul.linear_layers import GgufRows, Int8Rows, Linears
from mooncake_lite.tools.bench.result import Row, Side, compare, timed

LAYERS, KV_HEADS, PAGE, BLOCK, DIM = 30, 3, 16, 64, 64
"""SmolLM2's KV: a block has 2.9 MB."""

HEAD, GATE = (49152, 576), (1536, 576)


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
    """Measure; within a minute when quick."""
    runs, more = (7, 7) if quick else (21, 31)
    rows = decode(SMOLLM2, 8, 2048, runs) + prefill(512, 1536, runs)
    if not quick:
        rows += decode(SMOLLM2, 1, 2048, runs) + decode(LLAMA3_8B, 4, 4096, runs)
        rows += prefill(64, 1536, runs) + prefill(512, 0, runs)
    rows += movers(24, runs, "none") + movers(24, runs, "int8")
    rows += linear(HEAD, "float32", more) + linear(HEAD, "Q8_0", more)
    rows += linear(GATE, "Q4_1", 20 * more) + linear(GATE, "Q4_1", more, LAYERS)
    if not quick:
        rows += linear(HEAD, "int8", more) + linear(GATE, "float32", 20 * more)
        rows += linear_batch(8, more) + linear_batch(16, more)
    return rows


Action = Callable[[], object]


def against(
    name: str,
    runs: int,
    ours: Action,
    peers: Mapping[str, Action],
    limit: tuple[str, Action],
    unit: str = "ms",
    figure: Callable[[float], float] = lambda seconds: seconds * 1e3,
) -> list[Row]:
    """Time ours, each peer and the limit. figure: of some seconds, in `unit`."""

    def figure_of(action: Action) -> Callable[[], float]:
        seconds = timed(action)
        return lambda: figure(seconds())

    sides = [Side(peer, figure_of(action)) for peer, action in peers.items()]
    return compare(name, unit, runs, figure_of(ours), sides, Side(limit[0], figure_of(limit[1])))


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
    peers = {
        "torch SDPA on contiguous KV": lambda: attend(kv.contiguous),
        "gather, then torch SDPA": lambda: attend(kv.gathered()),
    }
    limit = ("reading the KV once, all threads", kv.read_once)
    return against(f"decode {batch} x {tokens}, {heads}", runs, ours, peers, limit)


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
    peers = {
        "torch SDPA with a mask, contiguous KV": lambda: attend(kv.contiguous),
        "gather, then torch SDPA with a mask": lambda: attend(kv.gathered()),
    }
    limit = ("its two matrix products in torch, unmasked", products)
    return against(f"prefill {new} after {cached}, {heads}", runs, ours, peers, limit)


def movers(blocks: int, runs: int, codec: str) -> list[Row]:
    """`blocks` blocks out of the pages of all layers, and back. The peer does it with NumPy's indexing."""
    pages = blocks * BLOCK // PAGE * 2
    rng = np.random.default_rng(3)
    caches = rng.standard_normal((LAYERS, 2, pages, KV_HEADS, PAGE, DIM), np.float32)
    ids = rng.permutation(pages)[: pages // 2].astype(np.int32).reshape(blocks, -1)
    shape = (LAYERS, 2, KV_HEADS, BLOCK, DIM)
    plain = np.empty((blocks, *shape), np.float32)
    how = None if codec == "none" else CODECS[codec]
    ours = plain
    if how is not None:
        ours = np.zeros((blocks, LAYERS, 2, KV_HEADS, how.unit_nbytes(BLOCK, DIM)), np.uint8)
    source, target = torch.from_numpy(plain.copy()), torch.from_numpy(plain.copy())

    def index() -> None:
        for number in range(blocks):
            pieces = caches[:, :, ids[number]].transpose(0, 1, 3, 2, 4, 5)
            plain[number] = pieces.reshape(shape)

    def index_back() -> None:
        for number in range(blocks):
            pieces = plain[number].reshape(LAYERS, 2, KV_HEADS, -1, PAGE, DIM)
            caches[:, :, ids[number]] = pieces.transpose(0, 1, 3, 2, 4, 5)

    def rates(verb: str, action: Action, peer: Action) -> list[Row]:
        copy = ("copy of contiguous memory, all threads", lambda: target.copy_(source))
        name, nbytes = f"{verb} {plain.nbytes / 1e6:.0f} MB, codec {codec}", plain.nbytes
        return against(name, runs, action, {"NumPy indexing": peer}, copy, "GB/s", lambda s: nbytes / 1e9 / s)

    gather = rates("gather", lambda: gather_blocks(caches, ids, ours, codec=how), index)
    return gather + rates("scatter", lambda: scatter_blocks(ours, caches, ids, codec=how), index_back)


def weight_of(shape: tuple[int, int], form: str) -> tuple[object, np.ndarray]:
    """A random weight of this form, and the array of its values."""
    rng = np.random.default_rng(4)
    if form == "float32":
        plain = rng.standard_normal(shape, np.float32)
        return plain, plain
    if form == "int8":
        values = rng.integers(-127, 128, shape, np.int8)
        return Int8Rows(values, rng.random(shape[0], np.float32)), values
    width = shape[1] // 32 * BLOCK_BYTES[GGUF_FORMATS[form]]
    blocks = rng.integers(0, 120, (shape[0], width), np.uint8)  # no scale is a NaN
    return GgufRows(form, blocks), blocks


def linear(shape: tuple[int, int], form: str, runs: int, layers: int = 1) -> list[Row]:
    """One row of x, the mean of some layers in turn. The limit: reading the weights once with all threads.

    What is read are the weights themselves: memory that nobody has written to is one page of zeros, which any
    cache holds.
    """
    weights = [weight_of(shape, form) for _ in range(layers)]
    ours = [Linears([weight]) for weight, _ in weights]
    words = [values.reshape(-1).view(np.int64) for _, values in weights]
    theirs = [torch.randn(shape) for _ in range(layers)]
    x = torch.randn(1, shape[1])
    name = f"linear {shape[0]} x {shape[1]}, batch 1, {form}" + (f", {layers} in turn" if layers > 1 else "")
    limit = ("reading the weight once, all threads", lambda: [read_all(each) for each in words])
    peer = {"torch linear, float32": lambda: [torch_linear(x, each) for each in theirs]}
    ms = 1e3 / layers
    return against(name, runs, lambda: [each(x) for each in ours], peer, limit, "ms", lambda s: ms * s)


def linear_batch(n: int, runs: int) -> list[Row]:
    """n rows of x, float32, against each of torch's ways."""
    weight = torch.randn(HEAD)
    ours = Linears([weight])
    x = torch.randn(n, HEAD[1])
    transposed = x.T.contiguous()
    side = round((n * math.prod(HEAD)) ** (1 / 3))
    square = torch.randn(side, side)
    peers = {
        "torch linear, float32": lambda: torch_linear(x, weight),
        "torch x @ W.T": lambda: x @ weight.T,
        "torch W @ x.T": lambda: weight @ transposed,
    }
    limit = ("as much arithmetic as a product of square matrices", lambda: square @ square)
    return against(f"linear {HEAD[0]} x {HEAD[1]}, batch {n}, float32", runs, lambda: ours(x), peers, limit)
