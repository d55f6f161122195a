"""Linear layers at small batch on the CPU, beside torch's float32 ones in the same process.

Run by `bench.kernels`. Shapes are SmolLM2's: its output layer, and the gate of its MLP.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn.functional import linear as torch_linear

from kernels_numba.linear_layers import GgufRows, Int8Rows, Linears
from mooncake_lite.bench.kernels_attention import read_all
from mooncake_lite.bench.result import Action, Row, compare, milliseconds

HEAD, GATE = (49152, 576), (1536, 576)
Q4_1_BLOCK_BYTES, Q8_0_BLOCK_BYTES = 20, 34


def run(quick: bool) -> list[Row]:
    """Measure; in some seconds when quick."""
    runs = 7 if quick else 31
    rows = [*decode(HEAD, "float32", runs), *decode(HEAD, "Q8_0", runs), *decode(GATE, "Q4_1", 20 * runs)]
    if not quick:
        rows += decode(HEAD, "int8", runs) + decode(GATE, "float32", 20 * runs)
        rows += batch(8, runs) + batch(16, runs)
    return rows


def weight_of(shape: tuple[int, int], form: str) -> tuple[object, int]:
    """A random weight of this form, and its bytes."""
    rng = np.random.default_rng(4)
    if form == "float32":
        plain = rng.standard_normal(shape, np.float32)
        return plain, plain.nbytes
    if form == "int8":
        values = rng.integers(-127, 128, shape, np.int8)
        return Int8Rows(values, rng.random(shape[0], np.float32)), values.nbytes
    block = {"Q4_1": Q4_1_BLOCK_BYTES, "Q8_0": Q8_0_BLOCK_BYTES}[form]
    blocks = rng.integers(0, 120, (shape[0], shape[1] // 32 * block), np.uint8)  # no scale is a NaN
    return GgufRows(form, blocks), blocks.nbytes


def decode(shape: tuple[int, int], form: str, runs: int) -> list[Row]:
    """One row of x. The limit: reading the weight once with all threads, as far as caches hold it."""
    weight, nbytes = weight_of(shape, form)
    ours = Linears([weight])
    x = torch.randn(1, shape[1])
    theirs = torch.randn(shape)
    words = np.zeros(nbytes // 8, np.int64)
    name = f"linear {shape[0]} x {shape[1]}, batch 1, {form}"
    limit = Action("reading the weight once, all threads", lambda: read_all(words))
    peer = Action("torch linear, float32", lambda: torch_linear(x, theirs))
    return compare(name, "ms", milliseconds, runs, lambda: ours(x), [peer], limit)


def batch(n: int, runs: int) -> list[Row]:
    """n rows of x, float32, against each of torch's ways."""
    weight = torch.randn(HEAD)
    ours = Linears([weight])
    x = torch.randn(n, HEAD[1])
    transposed = x.T.contiguous()
    side = round((n * math.prod(HEAD)) ** (1 / 3))
    square = torch.randn(side, side)
    peers = [
        Action("torch linear, float32", lambda: torch_linear(x, weight)),
        Action("torch x @ W.T", lambda: x @ weight.T),
        Action("torch W @ x.T", lambda: weight @ transposed),
    ]
    limit = Action("as much arithmetic as a product of square matrices", lambda: square @ square)
    name = f"linear {HEAD[0]} x {HEAD[1]}, batch {n}, float32"
    return compare(name, "ms", milliseconds, runs, lambda: ours(x), peers, limit)
