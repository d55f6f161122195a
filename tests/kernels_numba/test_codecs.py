"""Codecs: gathered is what v0 encodes, scattered what v0 decodes, and no error exceeds the stated one."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_numba import codec, gather_blocks, scatter_blocks
from kernels_numba.codecs import CODECS, Codec
from kernels_numba.errors import DtypeError, RangeError, ShapeError
from kernels_numba.movers.block_kernels import gather_blocks_v0
from kernels_numba.movers.blocks import PARALLEL_BYTES
from kernels_numba.runtime import PARALLEL_CALL
from tests.conftest import examples

BITS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
NAMES = tuple(CODECS)
LOSSY = NAMES[1:]
SCALED = ("int8", "int4", "fp8")
RANDOM = np.random.default_rng(0)
LEAST_SCALE = 2.0**-126
SLACK = 1 + 2**-20
"""For the rounding of a number times the reciprocal of a scale, which the bounds leave out."""


def encoded_shape(of: Codec, ids: np.ndarray, layers: int, heads: int, caches: np.ndarray) -> tuple[int, ...]:
    tokens, head_dim = ids.shape[1] * caches.shape[4], caches.shape[5]
    return (len(ids), layers, 2, heads, of.unit_nbytes(tokens, head_dim, caches.itemsize))


def through(of: Codec, rows: np.ndarray) -> np.ndarray:
    """Rows (tokens, head_dim) float32, in pages of 8, gathered and scattered with a codec."""
    tokens, head_dim = rows.shape
    caches = np.zeros((1, 2, tokens // 8, 1, 8, head_dim), np.float32)
    caches[0, 0, :, 0] = rows.reshape(-1, 8, head_dim)
    ids = np.arange(tokens // 8, dtype=np.int32)[None]
    out = np.zeros(encoded_shape(of, ids, 1, 1, caches), np.uint8)
    gather_blocks(caches, ids, out, codec=of)
    back = np.full_like(caches, np.nan)
    scatter_blocks(out, back, ids, codec=of)
    return back[0, 0, :, 0].reshape(rows.shape)


def allowed(name: str, rows: np.ndarray) -> np.ndarray:
    """Largest error of each number: what the formats' docstrings say, derived from their digits."""
    size, head_dim = np.abs(rows).astype(np.float64), rows.shape[1]
    if name == "bfloat16":  # 8 digits: half a unit of the last is 2**-8 of the first
        return np.maximum(size * 2**-8, 2.0**-134)
    groups = CODECS[name].groups(head_dim)
    largest = size.reshape(-1, groups, head_dim // groups).max(-1).repeat(head_dim // groups, -1)
    up = 1 + 2**-7  # a scale's last digit
    if name == "int8":
        return np.maximum(largest / 127 * up, LEAST_SCALE) / 2
    if name == "int4":
        return np.maximum(largest / 8 * up, LEAST_SCALE)
    scale = np.maximum(largest / 448 * up, LEAST_SCALE)
    return np.maximum(size * 2**-4, scale * 2**-10)


@settings(max_examples=examples(60))
@given(st.data())
def test_a_codec_in_the_move_does_what_it_does_beside_it(data) -> None:
    own = CODECS[data.draw(st.sampled_from(NAMES))]
    dtype = data.draw(st.sampled_from(list(BITS)))
    layers, heads, page_size = (data.draw(st.integers(1, 3)) for _ in range(3))
    head_dim = data.draw(st.sampled_from([2, 8, 20, 32, 64, 96]))
    per_block, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    pages = per_block * count + data.draw(st.integers(0, 2))
    random = np.random.default_rng(data.draw(st.integers(0, 9)))
    exponent = data.draw(st.sampled_from([0, -4, 3] if dtype == "float16" else [0, -44, -38, 20, 37]))
    caches = random.standard_normal((layers, 2, pages, heads, page_size, head_dim)) * 10.0**exponent
    with np.errstate(over="ignore"):
        caches = caches.astype(np.float32).astype(BITS[dtype])
    for value in data.draw(st.lists(st.sampled_from([np.nan, np.inf, -np.inf, 0, -0.0]), max_size=3)):
        caches.reshape(-1)[random.integers(caches.size)] = value
    ids = random.permutation(pages)[: per_block * count].reshape(count, per_block).astype(np.int32)
    first_layer, first_head = data.draw(st.integers(0, layers - 1)), data.draw(st.integers(0, heads - 1))
    part = {"layers": slice(first_layer, None), "heads": range(first_head, heads)}
    plain = gather_blocks_v0(caches, ids, slice(first_layer, None), slice(first_head, None))
    shape = encoded_shape(own, ids, layers - first_layer, heads - first_head, caches)

    out = np.full(shape, 0xA5, np.uint8)
    gather_blocks(caches, ids, out, codec=own, **part)
    target = np.full_like(caches, np.nan)
    scatter_blocks(out, target, ids, codec=own, **part)

    if own.name == "none":
        np.testing.assert_array_equal(out, plain.reshape(*shape[:4], -1).view(np.uint8))
        want = plain
    else:
        np.testing.assert_array_equal(out, own.encode(plain.astype(np.float32)))
        with np.errstate(over="ignore"):
            want = own.decode(out, *plain.shape[-2:]).astype(BITS[dtype])
    expected = np.full_like(caches, np.nan)
    scatter_blocks(want, expected, ids, **part)
    np.testing.assert_array_equal(target.astype(np.float32), expected.astype(np.float32))


@settings(max_examples=examples(60))
@given(
    st.sampled_from(LOSSY),
    st.sampled_from([2, 8, 32, 64, 128]),
    st.integers(0, 99),
    st.integers(-149, 120),
    st.booleans(),
)
def test_no_number_comes_back_further_off_than_the_codec_says(name, head_dim, seed, exponent, wild) -> None:
    random = np.random.default_rng(seed)
    rows = random.standard_normal((16, head_dim)) * 2.0**exponent
    if wild:  # sizes of all orders in one row
        rows *= 2.0 ** random.integers(-30, 7, rows.shape)
    rows = rows.astype(np.float32)
    back = through(CODECS[name], rows)
    assert (np.abs(back.astype(np.float64) - rows) <= allowed(name, rows) * SLACK).all()


@pytest.mark.parametrize("name", SCALED)
def test_a_row_with_nan_or_infinity_comes_back_as_nan_and_its_neighbours_unharmed(name: str) -> None:
    rows = RANDOM.standard_normal((8, 64)).astype(np.float32)
    rows[2, 40], rows[4, 3], rows[5, 9] = np.nan, np.inf, -np.inf
    back = through(CODECS[name], rows)
    broken = np.zeros(rows.shape, bool)
    length = 64 // CODECS[name].groups(64)
    for row, channel in ((2, 40), (4, 3), (5, 9)):
        broken[row, channel // length * length : (channel // length + 1) * length] = True
    assert np.isnan(back[broken]).all()
    assert np.isfinite(back[~broken]).all()


def test_bfloat16_keeps_nan_and_infinity_where_they_are() -> None:
    rows = np.ones((8, 8), np.float32)
    rows[0, :4] = [np.nan, np.inf, -np.inf, 3.4e38]
    back = through(CODECS["bfloat16"], rows)
    np.testing.assert_array_equal(back[0, :4], np.array([np.nan, np.inf, -np.inf, np.inf], np.float32))
    np.testing.assert_array_equal(back[1:], rows[1:])


@pytest.mark.parametrize("name", NAMES)
def test_zeros_come_back_as_zeros(name: str) -> None:
    assert not through(CODECS[name], np.zeros((8, 32), np.float32)).any()


@pytest.mark.parametrize("name", LOSSY)
def test_any_bytes_can_be_decoded_and_decode_as_v0_says(name: str) -> None:
    own = CODECS[name]
    ids = np.array([[1, 0]], np.int32)
    caches = np.zeros((1, 2, 2, 1, 128, 64), np.float32)
    units = RANDOM.integers(0, 256, encoded_shape(own, ids, 1, 1, caches)).astype(np.uint8)
    scatter_blocks(units, caches, ids, codec=own)
    with np.errstate(all="ignore"):
        want = own.decode(units, 256, 64)
    np.testing.assert_array_equal(gather_blocks_v0(caches, ids, slice(None), slice(None)), want)


def test_minus_one_leaves_scales_and_codes_of_its_page_alone() -> None:
    own = codec("int4")
    caches = RANDOM.standard_normal((2, 2, 3, 2, 8, 64)).astype(np.float32)
    whole, part = (np.array([ids], np.int32) for ids in ([2, 0, 1], [2, -1, 1]))
    want = np.zeros(encoded_shape(own, whole, 2, 2, caches), np.uint8)
    gather_blocks(caches, whole, want, codec=own)
    out = np.full_like(want, 0xA5)
    gather_blocks(caches, part, out, codec=own)
    for start, step in ((0, 8 * 2 * 2), (24 * 2 * 2, 8 * 32)):  # scales, then codes: a third each
        want[..., start + step : start + 2 * step] = 0xA5
    np.testing.assert_array_equal(out, want)
    target = np.full_like(caches, -7)
    scatter_blocks(out, target, part, codec=own)
    assert (target[:, :, 0] == -7).all()
    assert np.abs(target[:, :, 1:] - caches[:, :, 1:]).max() < 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick
def test_a_layer_is_one_range_of_bytes_and_a_range_of_heads_two_in_a_layer(name: str) -> None:
    own, shape = CODECS[name], (3, 2, 4, 16, 32)
    plain = RANDOM.standard_normal(shape).astype(np.float32)
    whole = own.encode(plain)
    assert whole.nbytes == own.nbytes(shape)
    layer, unit = own.nbytes((1, *shape[1:])), own.unit_nbytes(16, 32)
    flat = whole.reshape(-1)
    np.testing.assert_array_equal(flat[layer : 2 * layer], own.encode(plain[1]).reshape(-1))
    heads = own.encode(plain[1][:, 1:3])
    for kv in range(2):
        start = layer + (kv * 4 + 1) * unit
        np.testing.assert_array_equal(flat[start : start + 2 * unit], heads[kv].reshape(-1))


@pytest.mark.quick
def test_sizes_are_those_that_the_reference_page_states() -> None:
    block = (30, 2, 3, 64, 64)
    per_token = {name: own.nbytes(block) / 64 for name, own in CODECS.items()}
    assert per_token == {"none": 46080, "bfloat16": 23040, "int8": 11880, "int4": 6480, "fp8": 11880}
    page = (Path(__file__).parents[2] / "docs/reference/kv-codecs.md").read_text(encoding="utf-8")
    for name, nbytes in per_token.items():
        assert f"| {name} | {nbytes:,.0f} |" in page
    assert CODECS["none"].nbytes(block, itemsize=2) == math.prod(block) * 2


@pytest.mark.parametrize("name", ["none", "int8"])
def test_many_threads_write_what_one_writes(name: str) -> None:
    own = CODECS[name]
    caches = RANDOM.standard_normal((4, 2, 48, 3, 16, 64)).astype(np.float32)
    ids = RANDOM.permutation(48)[:40].reshape(10, 4).astype(np.int32)
    assert ids.size * caches[:, :, 0].nbytes > PARALLEL_BYTES
    shape = encoded_shape(own, ids, 4, 3, caches)
    raw = np.zeros(math.prod(shape) + 8, np.uint8)
    for offset in (0, 3):  # on and off a line's beginning
        out = raw[offset : offset + math.prod(shape)].reshape(shape)
        alone, back = np.zeros_like(out), [np.zeros_like(caches) for _ in range(2)]
        gather_blocks(caches, ids, out, codec=own)
        scatter_blocks(out, back[0], ids, codec=own)
        with PARALLEL_CALL:  # somebody computes: the caller moves alone
            gather_blocks(caches, ids, alone, codec=own)
            scatter_blocks(out, back[1], ids, codec=own)
        np.testing.assert_array_equal(out, alone)
        np.testing.assert_array_equal(*back)
        if name == "none":
            np.testing.assert_array_equal(back[0][:, :, ids], caches[:, :, ids])


@pytest.mark.quick
def test_what_does_not_fit_a_codec_is_refused_by_name() -> None:
    caches, ids = np.zeros((1, 2, 1, 1, 8, 8), np.float32), np.zeros((1, 1), np.int32)
    with pytest.raises(RangeError, match="codec=int3: expected one of none, bfloat16, int8, int4, fp8"):
        codec("int3")
    with pytest.raises(DtypeError, match=r"out.dtype=float32: expected uint8"):
        gather_blocks(caches, ids, np.zeros((1, 1, 2, 1, 8, 8), np.float32), codec=codec("int8"))
    with pytest.raises(ShapeError, match=r"out.shape=\(1, 1, 2, 1, 8\): expected \(1, 1, 2, 1, 80\)"):
        gather_blocks(caches, ids, np.zeros((1, 1, 2, 1, 8), np.uint8), codec=codec("int8"))
    odd = np.zeros((1, 2, 1, 1, 8, 7), np.float32)
    with pytest.raises(ShapeError, match=r"caches.shape\[5\]=7: expected an even head_dim"):
        gather_blocks(odd, ids, np.zeros((1, 1, 2, 1, 8), np.uint8), codec=codec("int4"))
