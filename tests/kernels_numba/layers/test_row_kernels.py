"""Norm and SwiGLU against float64; no row depends on the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels_numba.errors import DtypeError, LayoutError, ShapeError
from kernels_numba.layers.row_kernels import rms_norm, rms_norm_v0, silu_multiply, silu_multiply_v0

SHAPES = [(1, 8), (3, 576), (5, 33), (200, 576), (0, 16)]


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) * scale).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_norm_agrees_with_float64_and_adds_first_where_it_is_asked_to(shape: tuple[int, int]) -> None:
    x, more, weight = normal(*shape, scale=3.0), normal(*shape), normal(shape[1])
    expected = rms_norm_v0(x, weight, 1e-5)
    np.testing.assert_allclose(rms_norm(x, weight, 1e-5), expected, rtol=3e-6, atol=1e-6)
    summed = x + more
    result = rms_norm(x, weight, 1e-5, add=more)
    np.testing.assert_array_equal(x, summed)
    np.testing.assert_allclose(result, rms_norm_v0(summed, weight, 1e-5), rtol=3e-6, atol=1e-6)


def test_a_norm_takes_torch_tensors_of_any_rank() -> None:
    x, weight = torch.randn(3, 4, 32), torch.randn(32)
    result = rms_norm(x, weight, 1e-6)
    assert isinstance(result, torch.Tensor)
    torch.testing.assert_close(result, torch.nn.functional.rms_norm(x, (32,), weight, 1e-6))


@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_agrees_with_float64(shape: tuple[int, int]) -> None:
    gate, up = normal(*shape, scale=20.0), normal(*shape)
    expected = silu_multiply_v0(gate, up)
    assert silu_multiply(gate, up) is gate
    # e**-x is as exact as x * log2(e), which is off by 2**-24 of itself: of 80 that is 5e-6.
    np.testing.assert_allclose(gate, expected, rtol=6e-6, atol=1e-30)


def test_swiglu_of_what_is_no_number_is_what_torch_makes_of_it() -> None:
    gate = torch.tensor([[np.nan, np.inf, -np.inf, 200.0, -200.0, 0.0, -0.0, 3e38]])
    expected = torch.nn.functional.silu(gate)
    torch.testing.assert_close(silu_multiply(gate.clone(), torch.ones(1, 8)), expected, equal_nan=True)


@pytest.mark.parametrize("width", [24, 100, 576])
def test_a_row_has_the_same_bits_alone_and_among_many(width: int) -> None:
    x, more, weight = normal(300, width), normal(300, width), normal(width)
    rows = [rms_norm(x[i : i + 1].copy(), weight, 1e-5, add=more[i : i + 1])[0] for i in range(300)]
    np.testing.assert_array_equal(rms_norm(x.copy(), weight, 1e-5, add=more), rows)
    rows = [silu_multiply(x[i : i + 1].copy(), more[i : i + 1])[0] for i in range(300)]
    np.testing.assert_array_equal(silu_multiply(x.copy(), more), rows)


def test_what_the_kernels_cannot_take_is_named() -> None:
    x, weight = normal(2, 8), normal(8)
    with pytest.raises(DtypeError, match=r"x\.dtype"):
        rms_norm(x.astype(np.float64), weight, 1e-5)
    with pytest.raises(ShapeError, match=r"weight\.shape"):
        rms_norm(x, normal(9), 1e-5)
    with pytest.raises(ShapeError, match=r"add\.shape"):
        rms_norm(x, weight, 1e-5, add=normal(3, 8))
    with pytest.raises(LayoutError, match="up"):
        silu_multiply(x, normal(8, 2).T)
    x.flags.writeable = False
    with pytest.raises(LayoutError, match="read-only"):
        silu_multiply(x, normal(2, 8))
