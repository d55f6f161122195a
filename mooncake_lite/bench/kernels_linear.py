"""Linear layers at small batch on the CPU, beside torch's float32 ones in the same process.

Run by `bench.kernels`. Shapes are SmolLM2's: its output layer, and the gate of its MLP; the gate once alone,
which then stays in the caches, and once in turn with those of all 30 layers, as a decode step finds it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn.functional import linear as torch_linear

from kernels_numba.linear_layers import GgufRows, Int8Rows, Linears
from mooncake_lite.bench.kernels_attention import read_all
from mooncake_lite.bench.result import Action, Row, compare, milliseconds

HEAD, GATE, LAYERS = (49152, 576), (1536, 576), 30
BLOCK_BYTES = {"Q4_1": 20, "Q8_0": 34}


def run(quick: bool) -> list[Row]:
    """Measure; in some seconds when quick."""
    runs = 7 if quick else 31
    rows = [*decode(HEAD, "float32", runs), *decode(HEAD, "Q8_0", runs)]
    rows += decode(GATE, "Q4_1", 20 * runs) + decode(GATE, "Q4_1", runs, LAYERS)
    if not quick:
        rows += decode(HEAD, "int8", runs) + decode(GATE, "float32", 20 * runs)
        rows += batch(8, runs) + batch(16, runs)
    return rows


def weight_of(shape: tuple[int, int], form: str) -> tuple[object, np.ndarray]:
    """A random weight of this form, and the array of its values."""
    rng = np.random.default_rng(4)
    if form == "float32":
        plain = rng.standard_normal(shape, np.float32)
        return plain, plain
    if form == "int8":
        values = rng.integers(-127, 128, shape, np.int8)
        return Int8Rows(values, rng.random(shape[0], np.float32)), values
    blocks = rng.integers(
        0, 120, (shape[0], shape[1] // 32 * BLOCK_BYTES[form]), np.uint8
    )  # no scale is a NaN
    return GgufRows(form, blocks), blocks


def decode(shape: tuple[int, int], form: str, runs: int, layers: int = 1) -> list[Row]:
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
    limit = Action("reading the weight once, all threads", lambda: [read_all(each) for each in words])
    peer = Action("torch linear, float32", lambda: [torch_linear(x, each) for each in theirs])
    return compare(
        *(name, "ms", lambda seconds: milliseconds(seconds / layers), runs),
        *(lambda: [each(x) for each in ours], [peer], limit),
    )


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
