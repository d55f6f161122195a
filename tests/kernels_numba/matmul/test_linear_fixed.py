"""Linear layers in fixed point: the bound that linear_tiles_fixed.py states, and what is left to float32"""

from __future__ import annotations

from typing import Any

import gguf
import llvmlite.binding
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_numba.intrinsics.vectors_codes import WIDTH_BYTES
from kernels_numba.matmul import linear_layers
from kernels_numba.matmul.linear_blocks import dequantize_v0
from kernels_numba.matmul.linear_layers import GgufRows, Int8Rows, Linears, linear_v0
from tests.conftest import examples
from tests.kernels_numba.programs import run_python

FORMATS = ("int8", "Q4_0", "Q4_1", "Q8_0")
BLOCK = 32

needs_instruction = pytest.mark.skipif(not WIDTH_BYTES, reason="this processor multiplies no bytes")


def made(kind: str, rows: int, width: int, seed: int) -> Any:
    """A random weight in a format."""
    random = np.random.default_rng(seed)
    if kind == "int8":
        values = random.integers(-128, 128, (rows, width), dtype=np.int8)
        return Int8Rows(values, random.random(rows, dtype=np.float32))
    values = random.standard_normal((rows, width), dtype=np.float32)
    return GgufRows(kind, gguf.quantize(values, gguf.GGMLQuantizationType[kind]))


def both_ways(weight: Any, x: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """In fixed point where that can be, and in float32."""
    layers = Linears([weight])
    monkeypatch.setattr(linear_layers, "MAX_FIXED_ROWS_OF_X", 32)
    fixed = layers(x)[0]
    monkeypatch.setattr(linear_layers, "MAX_FIXED_ROWS_OF_X", 0)
    return fixed, layers(x)[0]


def parts_of(weight: Any) -> np.ndarray:
    """|w|, or the sum of the absolute parts of which w is made, float64."""
    whole = np.abs(dequantize_v0(weight).astype(np.float64))
    if not isinstance(weight, GgufRows) or weight.format == "Q8_0":
        return whole
    step = {"Q4_0": 18, "Q4_1": 20}[weight.format]
    blocks = np.asarray(weight.blocks).reshape(-1, step)
    halves = blocks[:, :4].copy().view(np.float16).astype(np.float64)
    offset = 8 * np.abs(halves[:, 0]) if weight.format == "Q4_0" else np.abs(halves[:, 1])
    return whole + 2 * np.repeat(offset, BLOCK).reshape(whole.shape)


def bound(weight: Any, x: np.ndarray) -> np.ndarray:
    """Of the error, as stated; of float32 what each of 8 or more lanes costs that sums in / 8 products."""
    width = x.shape[1]
    padded = np.zeros((x.shape[0], -(-width // BLOCK) * BLOCK))
    padded[:, :width] = np.abs(x)
    largest = np.repeat(padded.reshape(x.shape[0], -1, BLOCK).max(axis=2), BLOCK, axis=1)[:, :width]
    if isinstance(weight, Int8Rows):  # the last blocks of a row may be cut elsewhere
        largest[:, -4 * BLOCK :] = padded[:, -5 * BLOCK :].max(axis=1, keepdims=True)
    each = 2**-22.99 * largest + np.finfo(np.float32).eps * (width / 8 + 10) * np.abs(x.astype(np.float64))
    return each @ parts_of(weight).T


X_KINDS = ("normal", "outliers", "sparse", "equal", "tiny", "huge", "denormal", "wide")


def activations(kind: str, n: int, width: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    x = random.standard_normal((n, width), dtype=np.float32)
    if kind == "outliers":
        x[:, random.integers(0, width, 3)] *= np.float32(1e4)
    elif kind == "sparse":
        x *= random.random((n, width)) < 0.02
    elif kind == "equal":
        x[:] = x[0, 0]
    elif kind in ("tiny", "huge", "denormal"):
        x *= np.float32({"tiny": 1e-17, "huge": 1e25, "denormal": 1e-42}[kind])
    elif kind == "wide":
        x *= np.exp2(random.integers(-60, 60, (n, width))).astype(np.float32)
    return x


@settings(max_examples=examples(80))
@given(
    kind=st.sampled_from(FORMATS),
    x_kind=st.sampled_from(X_KINDS),
    rows=st.integers(1, 21),
    blocks=st.integers(16, 53),
    more=st.integers(0, 31),
    n=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_the_error_stays_within_its_bound(kind, x_kind, rows, blocks, more, n, seed) -> None:
    width = BLOCK * blocks + (more if kind == "int8" else 0)
    weight, x = made(kind, rows, width, seed), activations(x_kind, n, width, seed)
    result = Linears([weight])(x)[0]
    assert (np.abs(result - linear_v0(x, weight)) <= bound(weight, x) + width * 2.0**-140).all()


HALF_UNIT = 2.0**-22.99
EDGES = np.array([0x3F7EFEFE, 0x3F7EFEFF, 0x3F7F7F7F, 0x3F7FFFFF, 0x3F800000, 0x3F800001], np.uint32)
"""Bits around the largest integer of three signed bytes, at an exponent where all of them are used."""


@needs_instruction
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("width", [512, 517, 640, 700])
def test_every_value_is_kept_to_half_a_unit_of_its_block(width: int, sign: int) -> None:
    """Times the identity, what comes back is what the fixed point holds."""
    x = np.random.default_rng(width).uniform(-1, 1, (1, width)).astype(np.float32)
    x[0, : 6 * BLOCK : BLOCK] = sign * EDGES.view(np.float32)
    x[0, 1 : 6 * BLOCK : BLOCK] = -x[0, : 6 * BLOCK : BLOCK]
    kept = Linears([Int8Rows(np.eye(width, dtype=np.int8), np.ones(width, np.float32))])(x)[0]
    assert (np.abs(kept - x) <= HALF_UNIT * np.abs(x).max() + np.finfo(np.float32).eps * np.abs(x)).all()
    assert (kept != x).any()  # it was fixed point that we looked at


@needs_instruction
@pytest.mark.parametrize("x_value", [np.float32(1) - np.float32(2**-24), np.float32(0.99609), np.float32(1)])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("kind", "code"), [("int8", 128), ("int8", 127), ("Q8_0", 128), ("Q8_0", 127)])
def test_the_largest_sums_of_bytes_do_not_overflow(kind: str, code: int, x_value: Any, sign: int) -> None:
    width, rows = 8192, 4
    x = np.full((1, width), sign * x_value, np.float32)
    if kind == "int8":
        codes = np.full((rows, width), code, np.uint8).view(np.int8)
        weight: Any = Int8Rows(codes, np.ones(rows, np.float32))
    else:
        block = np.frombuffer(np.float16(1).tobytes() + bytes([code] * 32), np.uint8)
        weight = GgufRows("Q8_0", np.tile(block, (rows, width // BLOCK)))
    result = Linears([weight])(x)[0]
    assert (np.abs(result - linear_v0(x, weight)) <= bound(weight, x)).all()


@needs_instruction
@pytest.mark.parametrize("x_value", [np.float32(1) - np.float32(2**-24), np.float32(-0.99609)])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_the_largest_sums_of_nibbles_do_not_overflow(kind: str, x_value: Any) -> None:
    width, head = 8192, np.float16(1).tobytes() * (2 if kind == "Q4_1" else 1)
    weight = GgufRows(kind, np.tile(np.frombuffer(head + b"\xff" * 16, np.uint8), (5, width // BLOCK)))
    x = np.full((1, width), x_value, np.float32)
    result = Linears([weight])(x)[0]
    assert (np.abs(result - linear_v0(x, weight)) <= bound(weight, x)).all()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, 1e-45, 1e-30])
def test_what_fixed_point_cannot_hold_is_multiplied_in_float32(
    kind: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = made(kind, 9, 544, 3), np.zeros((2, 544), np.float32)
    x[1] = np.random.default_rng(4).standard_normal(544)
    x[0, 100] = value  # alone in its block
    fixed, floating = both_ways(weight, x, monkeypatch)
    np.testing.assert_array_equal(fixed, floating)
    assert not np.isfinite(floating[0]).all() or np.isfinite(value)


@needs_instruction
@pytest.mark.parametrize("kind", FORMATS)
def test_both_ways_are_taken_and_agree(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = made(kind, 33, 576, 5), activations("normal", 2, 576, 6)
    fixed, floating = both_ways(weight, x, monkeypatch)
    assert (fixed != floating).any()
    assert (np.abs(fixed.astype(np.float64) - floating) <= bound(weight, x)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_scale_that_is_no_number_spoils_its_row_only(kind: str, value: float) -> None:
    weight, x = made(kind, 6, 576, 7), activations("normal", 1, 576, 8)
    expected = Linears([weight])(x)[0]
    blocks = np.array(weight.blocks)
    blocks[2, -blocks.shape[1] // 18 : -blocks.shape[1] // 18 + 2] = np.frombuffer(
        np.float16(value).tobytes(), np.uint8
    )
    result = Linears([GgufRows(kind, blocks)])(x)[0]
    assert not np.isfinite(result[0, 2])
    np.testing.assert_array_equal(np.delete(result, 2, axis=1), np.delete(expected, 2, axis=1))


PROGRAM = """
import numpy as np
from kernels_numba.matmul.linear_layers import Int8Rows, linear, linear_v0
from kernels_numba.intrinsics.vectors_codes import WIDTH_BYTES
from tests.kernels_numba.matmul.test_linear_fixed import FORMATS, activations, bound, made
print(WIDTH_BYTES)
for kind in FORMATS:
    for width in (256, 608):
        weight, x = made(kind, 11, width, 1), activations("outliers", 1, width, 2)
        assert (np.abs(linear(x, weight) - linear_v0(x, weight)) <= bound(weight, x)).all(), (kind, width)
"""
COMMON = ("avx", "avx2", "fma", "f16c")


@pytest.mark.parametrize(("model", "more", "width"), [("haswell", (), 0), ("alderlake", ("avxvnni",), 32)])
def test_it_runs_on_processors_without_wide_vectors(
    model: str, more: tuple[str, ...], width: int, soak: int
) -> None:
    if more and soak == 1:
        pytest.skip("compiles for half a minute; run by make soak")
    features = llvmlite.binding.get_host_cpu_features()
    wanted = (*COMMON, *more)
    if not all(features.get(name) for name in wanted):
        pytest.skip(f"needs a processor with {', '.join(wanted)}")
    chosen = ",".join(f"+{name}" for name in wanted)
    assert run_python(PROGRAM, NUMBA_CPU_NAME=model, NUMBA_CPU_FEATURES=chosen) == str(width)
