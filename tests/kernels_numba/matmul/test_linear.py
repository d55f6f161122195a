"""Linear layers on the CPU against float64, in every format; gguf's own unpacking is the oracle of GGUF's"""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_numba.errors import ArgumentError, DtypeError, LayoutError, RangeError, ShapeError
from kernels_numba.matmul import linear_layers
from kernels_numba.matmul.linear_blocks import dequantize_v0
from kernels_numba.matmul.linear_layers import GgufRows, Int8Rows, Linears, linear, linear_v0, linear_v1
from tests.conftest import examples
from tests.kernels_numba.programs import run_python

GGUF = ("Q4_0", "Q4_1", "Q8_0")
FORMATS = ("float32", "int8", *GGUF)


def made(kind: str, rows: int, width: int, seed: int = 0) -> Any:
    """A random weight in a format."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, width), dtype=np.float32)
    if kind == "float32":
        return values
    if kind == "int8":
        return Int8Rows(
            random.integers(-128, 128, (rows, width), dtype=np.int8), random.random(rows, dtype=np.float32)
        )
    return GgufRows(kind, gguf.quantize(values, gguf.GGMLQuantizationType[kind]))


def assert_close(result: np.ndarray, x: np.ndarray, weight: Any) -> None:
    """Within what rounding allows: each of 8 or more lanes sums in / 8 products, then lanes are summed."""
    absolute = np.abs(x.astype(np.float64)) @ np.abs(dequantize_v0(weight).astype(np.float64)).T
    bound = np.finfo(np.float32).eps * (x.shape[1] / 8 + 10) * absolute
    assert (np.abs(result - linear_v0(x, weight)) <= bound).all()


@pytest.mark.parametrize("kind", GGUF)
def test_blocks_are_read_as_gguf_reads_them_to_the_last_bit(kind: str) -> None:
    weight = made(kind, 37, 96)
    expected = gguf.dequantize(weight.blocks, gguf.GGMLQuantizationType[kind])

    np.testing.assert_array_equal(dequantize_v0(weight), expected)
    unpacked = np.full((30, 96), np.nan, np.float32)
    Linears([weight]).dequantized(0, 7, unpacked)
    np.testing.assert_array_equal(unpacked, expected[7:])


@settings(max_examples=examples(60))
@given(
    kind=st.sampled_from(FORMATS),
    rows=st.integers(1, 70),
    steps=st.integers(1, 9),
    more=st.integers(0, 31),
    n=st.integers(1, 32),
    seed=st.integers(0, 9),
)
def test_a_product_agrees_with_float64_for_any_shape_and_format(kind, rows, steps, more, n, seed) -> None:
    width = 32 * steps + (more if kind in ("float32", "int8") else 0)
    weight = made(kind, rows, width, seed)
    x = np.random.default_rng(seed).standard_normal((n, width), dtype=np.float32)
    out = np.full((n, rows), np.nan, np.float32)

    assert linear(x, weight, out) is out
    assert_close(out, x, weight)


def test_the_plain_rung_agrees_as_well() -> None:
    weight, x = made("float32", 5, 40), np.random.default_rng(1).standard_normal((3, 40), dtype=np.float32)
    out = np.full((3, 5), np.nan, np.float32)
    linear_v1(x, weight, out)
    np.testing.assert_allclose(out, linear_v0(x, weight), atol=1e-4)


def test_a_width_below_one_step_is_summed_too() -> None:
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(linear(x, np.full((5, 3), 2, np.float32)), np.full((2, 5), 6))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("n", [1, 3, 8])
def test_two_threads_write_what_one_writes(kind: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = made(kind, 101, 544)
    x = np.random.default_rng(2).standard_normal((n, 544), dtype=np.float32)
    group = Linears([weight, weight])
    monkeypatch.setattr("kernels_numba.matmul.linear_layers.region_us", lambda workers: 1e9)
    alone = group(x)
    monkeypatch.setattr("kernels_numba.matmul.linear_layers.region_us", lambda workers: 0)
    for one, two in zip(alone, group(x)):
        np.testing.assert_array_equal(one, two)


def test_several_weights_of_one_x_are_multiplied_in_one_call() -> None:
    weights = [made("float32", 12, 64), made("Q8_0", 7, 64), made("int8", 5, 64)]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))

    results = Linears([torch.from_numpy(weights[0]), *weights[1:]])(x)

    for result, weight in zip(results, weights):
        assert result.is_contiguous()
        assert_close(result.numpy(), x.numpy(), weight)


def test_a_nan_stays_in_its_row_of_x() -> None:
    x = np.ones((5, 64), np.float32)
    x[3, 10] = np.nan
    result = linear(x, np.ones((9, 64), np.float32))
    assert np.isnan(result[3]).all()
    np.testing.assert_array_equal(np.delete(result, 3, axis=0), np.full((4, 9), 64))


def test_threads_may_call_at_once() -> None:
    group, x = Linears([made("Q8_0", 4096, 512)]), np.ones((1, 512), np.float32)
    expected = group(x)[0].copy()

    def work(_: int) -> bool:
        return all(np.array_equal(group(x)[0], expected) for _ in range(50))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(3)))


def test_waiting_for_another_thread_s_kernel_is_no_cost_of_a_parallel_region(monkeypatch) -> None:
    now = [0.0]

    class Busy:
        def __enter__(self) -> None:
            now[0] += 1.0

        def __exit__(self, *_: object) -> None:
            """Free again."""

    def perf_counter() -> float:
        now[0] += 1e-6
        return now[0]

    monkeypatch.setattr(linear_layers, "PARALLEL_CALL", Busy())
    monkeypatch.setattr(
        linear_layers, "time", SimpleNamespace(perf_counter=perf_counter, sleep=lambda s: None)
    )
    assert linear_layers.measured_region_us(2) == pytest.approx(1.0, rel=1e-3)


def test_a_region_costs_what_another_process_of_this_machine_has_measured(monkeypatch) -> None:
    monkeypatch.setattr(linear_layers, "_region_us", {})
    group = Linears([made("Q8_0", 4096, 512)])
    linear_layers.use_region_us(linear_layers.get_num_threads(), 1e9)
    assert not group.shared(32)
    linear_layers.use_region_us(linear_layers.get_num_threads(), 0.0)
    assert group.shared(1) == (linear_layers.get_num_threads() > 1)


def test_it_runs_where_vectors_are_narrower() -> None:
    """An older x86 has 8 lanes and 16 registers: other tiles."""
    if platform.machine() != "x86_64":
        pytest.skip("needs an x86 processor")
    program = """
import numpy as np
from kernels_numba.matmul.linear_layers import linear
from kernels_numba.intrinsics.linear_vectors import LANES
x = np.arange(3 * 70, dtype=np.float32).reshape(3, 70) / 100
w = np.arange(5 * 70, dtype=np.float32).reshape(5, 70) / 100
print(LANES, np.allclose(linear(x, w), x @ w.T))
"""
    features = "+avx,+avx2,+fma,+f16c"
    assert run_python(program, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=features) == "8 True"


X = np.ones((2, 64), np.float32)
W = np.ones((4, 64), np.float32)


@pytest.mark.parametrize(
    ("x", "weight", "error", "argument"),
    [
        (X[:, :32].copy(), W, ShapeError, "x.shape"),
        (X[0], W, ShapeError, "x.shape"),
        (np.ones((33, 64), np.float32), W, RangeError, "x.shape[0]"),
        (X.astype(np.float64), W, DtypeError, "x.dtype"),
        (np.ones((64, 2), np.float32).T, W, LayoutError, "x"),
        (X, W.astype(np.float16), DtypeError, "weights[0].dtype"),
        (X, np.ones((64, 4), np.float32).T, LayoutError, "weights[0]"),
        (X, Int8Rows(W.astype(np.int8), np.ones(3, np.float32)), ShapeError, "weights[0].scales.shape"),
        (X, GgufRows("Q5_K", np.ones((4, 68), np.uint8)), RangeError, "weights[0].format"),
        (X, GgufRows("Q8_0", np.ones((4, 67), np.uint8)), ShapeError, "weights[0].blocks.shape[1]"),
        (X, GgufRows("Q8_0", np.ones((4, 34), np.uint8)), ShapeError, "x.shape"),
    ],
)
def test_a_wrong_argument_is_named(x: Any, weight: Any, error: type[ArgumentError], argument: str) -> None:
    with pytest.raises(error) as raised:
        linear(x, weight)
    assert raised.value.argument == argument


def test_a_wrong_output_and_a_group_of_other_widths_are_named() -> None:
    with pytest.raises(ShapeError, match=r"out\.shape"):
        linear(X, W, np.empty((2, 5), np.float32))
    with pytest.raises(ShapeError, match=r"weights\[1\]"):
        Linears([W, np.ones((4, 32), np.float32)])
    with pytest.raises(RangeError, match="first"):
        Linears([W]).dequantized(0, 3, np.empty((2, 64), np.float32))
