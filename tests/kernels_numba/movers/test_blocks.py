"""Moving KV between pages, blocks and pages on the CPU: bit for bit, and nothing else is touched."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels_numba
from kernels_numba.errors import DtypeError, LayoutError, RangeError, ShapeError
from kernels_numba.movers.block_kernels import gather_blocks_v0
from kernels_numba.movers.blocks import PARALLEL_BYTES
from kernels_numba.movers.rotary import rotate_v0
from kernels_numba.runtime import PARALLEL_CALL
from mooncake_lite.model.rope import inverse_frequencies, rotary_tables
from tests.conftest import examples

SHAPE = (3, 2, 12, 4, 8, 16)
"""layers, key or value, pages, kv_heads, page_size, head_dim"""


def random_caches(dtype: type = np.float32, seed: int = 0) -> np.ndarray:
    """Random bits, so NaN and all: movers must not look at values."""
    return np.random.default_rng(seed).integers(0, 2**16, SHAPE).astype(np.uint16).astype(dtype)


def page_table(*shape: int) -> np.ndarray:
    """Distinct pages in random order."""
    return (
        np.random.default_rng(1).permutation(SHAPE[2])[: int(np.prod(shape))].reshape(shape).astype(np.int32)
    )


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_gathered_blocks_hold_the_pages_in_order_for_any_part_of_layers_and_heads(dtype) -> None:
    caches, ids = random_caches(dtype), page_table(2, 3)
    for layers, heads in ((None, None), (slice(1, 3), range(2, 4)), (range(0, 1), slice(None, -1))):
        span_l = slice(None) if layers is None else layers if isinstance(layers, slice) else slice(0, 1)
        span_h = slice(None) if heads is None else heads if isinstance(heads, slice) else slice(2, 4)
        want = gather_blocks_v0(caches, ids, span_l, span_h)
        out = np.zeros_like(want)
        kernels_numba.gather_blocks(caches, ids, out, layers=layers, heads=heads)
        np.testing.assert_array_equal(out, want)


def test_scattered_blocks_come_back_and_no_other_page_changes() -> None:
    caches, ids = random_caches(), page_table(2, 3)
    blocks = gather_blocks_v0(caches, ids, slice(1, 3), slice(0, 2))
    target = np.full(SHAPE, np.nan, np.float32)
    kernels_numba.scatter_blocks(blocks, target, ids, layers=slice(1, 3), heads=range(2))
    want = np.full(SHAPE, np.nan, np.float32)
    for page in ids.ravel():
        want[1:3, :, page, :2] = caches[1:3, :, page, :2]
    np.testing.assert_array_equal(target, want)


def test_minus_one_leaves_its_part_alone_in_both_directions() -> None:
    caches = random_caches()
    ids = np.array([[4, -1]], np.int32)
    out = np.full((1, 3, 2, 4, 16, 16), -7, np.float32)
    kernels_numba.gather_blocks(caches, ids, out)
    np.testing.assert_array_equal(out[0, :, :, :, :8], caches[:, :, 4])
    assert (out[:, :, :, :, 8:] == -7).all()
    target = np.zeros(SHAPE, np.float32)
    kernels_numba.scatter_blocks(out, target, ids)
    np.testing.assert_array_equal(target[:, :, 4], caches[:, :, 4])
    assert np.count_nonzero(target.any(axis=(0, 1, 3, 4, 5))) == 1


def test_blocks_may_lie_apart_as_slots_of_a_pool_do() -> None:
    caches, ids = random_caches(), page_table(2, 2)
    want = gather_blocks_v0(caches, ids, slice(None), slice(None))
    pool = np.full((2, want[0].size + 16), -7, np.float32)
    blocks = np.lib.stride_tricks.as_strided(pool, want.shape, (pool.strides[0], *want.strides[1:]))
    kernels_numba.gather_blocks(caches, ids, blocks)
    np.testing.assert_array_equal(blocks, want)
    assert (pool[:, -16:] == -7).all()


@pytest.mark.parametrize("name", ["none", "int8"])
def test_an_axis_of_one_head_that_was_added_later_has_no_step_and_is_moved_all_the_same(name) -> None:
    plain = np.random.default_rng(0).standard_normal((2, 2, 5, 8, 16), dtype=np.float32)
    caches, ids = plain[:, :, :, None], np.array([[3, 1]], np.int32)
    assert caches.flags.c_contiguous
    assert caches.strides[3] == 0
    shape = (1, 2, 2, 1, kernels_numba.codec(name).unit_nbytes(16, 16))
    out, want = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
    kernels_numba.gather_blocks(caches, ids, out, codec=kernels_numba.codec(name))
    kernels_numba.gather_blocks(
        plain.reshape(caches.shape).copy(), ids, want, codec=kernels_numba.codec(name)
    )
    np.testing.assert_array_equal(out, want)
    assert out.any()
    back = np.zeros_like(plain)
    kernels_numba.scatter_blocks(out, back[:, :, :, None], ids, codec=kernels_numba.codec(name))
    assert back[:, :, [1, 3]].all(axis=(0, 1, 3)).any()


def test_torch_caches_and_a_numpy_window_may_meet() -> None:
    caches, ids = random_caches(np.uint16), page_table(1, 2)
    tensor = torch.from_numpy(caches).view(torch.bfloat16)
    window = np.zeros((1, 3, 2, 4, 16, 16), np.uint16)
    kernels_numba.gather_blocks(tensor, torch.from_numpy(ids), window)
    np.testing.assert_array_equal(window, gather_blocks_v0(caches, ids, slice(None), slice(None)))


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_new_tokens_land_in_their_slots_and_minus_one_is_skipped(dtype) -> None:
    caches = random_caches(dtype)
    fused = random_caches(dtype, seed=5).reshape(-1)[: 5 * 2 * 4 * 16].reshape(5, 2, 4, 16)
    key, value = fused[:, 0], fused[:, 1]  # views with a stride over tokens, as of a fused projection
    slots = np.array([17, -1, 95, 0, 18], np.int64)
    want = caches[0].copy()
    for token, slot in enumerate(slots):
        if slot >= 0:
            want[0, slot // 8, :, slot % 8], want[1, slot // 8, :, slot % 8] = key[token], value[token]
    kernels_numba.scatter_kv(key, value, caches[0, 0], caches[0, 1], slots)
    np.testing.assert_array_equal(caches[0], want)


def test_a_view_of_one_head_or_one_token_is_taken_whatever_the_steps_of_those_axes() -> None:
    caches = random_caches()
    wide = random_caches(seed=5).reshape(-1)[: 5 * 4 * 16].reshape(5, 4, 16)
    one_head = np.lib.stride_tricks.as_strided(wide, (5, 1, 16), (wide.strides[0], 8, wide.strides[2]))
    one_token = np.lib.stride_tricks.as_strided(wide, (1, 4, 16), (12, *wide.strides[1:]))
    slots = np.array([17, -1, 95, 0, 18], np.int64)
    for new, where, heads in ((one_head, slots, slice(0, 1)), (one_token, slots[:1], slice(None))):
        keys, values = (np.ascontiguousarray(cache[:, heads]) for cache in caches[0])
        want = keys.copy()
        for token, slot in zip(new, where):
            if slot >= 0:
                want[slot // 8, :, slot % 8] = token
        kernels_numba.scatter_kv(new, new, keys, values, where)
        np.testing.assert_array_equal(keys, want)
    two = np.lib.stride_tricks.as_strided(wide, (5, 2, 16), (wide.strides[0], 8, wide.strides[2]))
    with pytest.raises(LayoutError, match=r"key=.*\(64, 2, 1\): expected strides \(any, 16, 1\)"):
        kernels_numba.scatter_kv(two, two, *np.zeros((2, 3, 2, 8, 16), np.float32), slots)


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """By torch, in float32: (tokens, heads, head_dim), with rows of `rotary_tables` (tokens, 1, head_dim)."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
    return (heads * cosine).addcmul_(swapped, sine).to(heads.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_keys_and_queries_are_turned_to_the_bits_that_the_model_computes(dtype: str) -> None:
    kind, random = getattr(torch, dtype), np.random.default_rng(3)
    tables = rotary_tables(inverse_frequencies(16, 10000.0, None), 40)
    fused = torch.from_numpy(random.standard_normal((6, 4 + 2 + 2, 16), np.float32)).to(kind)
    query, key, value = fused[:, :4], fused[:, 4:6], fused[:, 6:]  # views with a stride over tokens
    positions = torch.tensor([39, 0, 7, 7, 21, 1])
    slots = torch.tensor([17, -1, 95, 0, 18, 30])
    angles = [table[positions] for table in tables]
    want_query, turned, before = rotate(query, *angles), rotate(key, *angles), fused.clone()
    caches = torch.from_numpy(random.standard_normal((2, 12, 2, 8, 16), np.float32)).to(kind)
    want = caches.clone()
    kernels_numba.scatter_kv(turned, value, want[0], want[1], slots)

    kernels_numba.scatter_kv(
        key, value, caches[0], caches[1], slots, rotary=tables, positions=positions, query=query
    )

    assert torch.equal(caches, want)
    assert torch.equal(query, want_query), "in place, for the skipped token as well"
    assert torch.equal(fused[:, 4:], before[:, 4:]), "keys and values stay as they are"


@settings(max_examples=examples(30))
@given(st.integers(1, 5), st.integers(1, 3), st.sampled_from([2, 6, 64]), st.integers(0, 99))
def test_any_rotation_is_that_of_the_oracle(tokens, heads, head_dim, seed) -> None:
    random = np.random.default_rng(seed)
    half = random.uniform(0, 2 * np.pi, (9, 1, head_dim // 2)).astype(np.float32)
    cosine = np.concatenate((np.cos(half), np.cos(half)), -1)
    sine = np.concatenate((-np.sin(half), np.sin(half)), -1)
    key = random.standard_normal((tokens, heads, head_dim), np.float32)
    positions, slots = random.integers(0, 9, tokens), random.permutation(8)[:tokens]
    caches = np.full((2, 2, heads, 4, head_dim), np.nan, np.float32)
    kernels_numba.scatter_kv(
        key, key, caches[0], caches[1], slots, rotary=(cosine, sine), positions=positions
    )
    want = rotate_v0(key, cosine, sine, positions)
    for token, slot in enumerate(slots):
        found = caches[0, slot // 4, :, slot % 4]
        # two products and a sum, each rounded to 24 digits, of numbers whose size the last factor bounds
        assert (np.abs(found - want[token]) <= 2.0**-23 * 2 * np.abs(key[token]).max()).all()
        np.testing.assert_array_equal(caches[1, slot // 4, :, slot % 4], key[token])
    assert np.isnan(caches).sum() == caches.size - 2 * tokens * heads * head_dim


def test_what_does_not_fit_a_rotation_is_refused_before_anything_is_written() -> None:
    cache = np.zeros((2, 1, 8, 4), np.float32)
    new, slots = np.ones((2, 1, 4), np.float32), np.array([3, 4], np.int64)
    tables = (np.ones((5, 1, 4), np.float32), np.ones((5, 1, 4), np.float32))

    def scatter(**changed) -> None:
        kernels_numba.scatter_kv(new, new, cache, cache, slots, **changed)

    with pytest.raises(RangeError, match=r"positions\[1\]=5: expected an id from 0 to 4"):
        scatter(rotary=tables, positions=np.array([4, 5]))
    with pytest.raises(ShapeError, match=r"positions=None: expected \(2,\) int64, since rotary is given"):
        scatter(rotary=tables)
    with pytest.raises(ShapeError, match="rotary=None"):
        scatter(positions=slots)
    with pytest.raises(ShapeError, match=r"sine.shape=\(4, 1, 4\): expected \(5, 1, 4\)"):
        scatter(rotary=(tables[0], tables[1][:4]), positions=slots)
    with pytest.raises(DtypeError, match=r"query\.dtype=float16: expected float32, as key has"):
        scatter(rotary=tables, positions=slots, query=new.astype(np.float16))
    assert not cache.any()


def test_pages_are_copied_in_order_over_all_layers() -> None:
    caches = random_caches()
    want = caches.copy()
    for source, target in ((3, 5), (5, 7), (2, 2)):
        want[:, :, target] = want[:, :, source]
    kernels_numba.copy_pages(caches, np.array([3, 5, 2], np.int32), np.array([5, 7, 2], np.int32))
    np.testing.assert_array_equal(caches, want)


def test_two_threads_may_move_large_blocks_at_once() -> None:
    caches = np.random.default_rng(2).random((4, 2, 48, 3, 16, 64), np.float32)
    ids = np.random.default_rng(3).permutation(48)[:40].reshape(10, 4).astype(np.int32)
    want = gather_blocks_v0(caches, ids, slice(None), slice(None))
    assert want.nbytes > PARALLEL_BYTES
    start, outs = threading.Barrier(2, timeout=30), [np.zeros_like(want) for _ in range(2)]

    def work(out: np.ndarray) -> None:
        start.wait()
        for _ in range(20):
            kernels_numba.gather_blocks(caches, ids, out)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, outs))
    for out in outs:
        np.testing.assert_array_equal(out, want)
    assert not PARALLEL_CALL.locked()


def test_nothing_to_move_moves_nothing() -> None:
    caches = random_caches()
    before = caches.copy()
    none = np.zeros((0, 2), np.int32)
    kernels_numba.gather_blocks(caches, none, np.zeros((0, 3, 2, 4, 16, 16), np.float32))
    kernels_numba.scatter_blocks(np.zeros((0, 3, 2, 4, 16, 16), np.float32), caches, none)
    kernels_numba.copy_pages(caches, none[:, 0].copy(), none[:, 0].copy())
    new = np.zeros((0, 4, 16), np.float32)
    kernels_numba.scatter_kv(new, new, caches[0, 0], caches[0, 1], np.zeros(0, np.int64))
    np.testing.assert_array_equal(caches, before)


@settings(max_examples=examples(30))
@given(st.data())
def test_any_gather_then_scatter_brings_every_named_page_back(data) -> None:
    layers, pages, heads = (data.draw(st.integers(1, 4)) for _ in range(3))
    page_size, head_dim = data.draw(st.sampled_from([8, 16])), data.draw(st.sampled_from([8, 32]))
    per_block = data.draw(st.integers(1, pages))
    blocks = data.draw(st.integers(1, pages // per_block))
    ids = np.array(data.draw(st.permutations(range(pages))), np.int32)[: blocks * per_block]
    ids = ids.reshape(blocks, per_block)
    caches = np.random.default_rng(0).random((layers, 2, pages, heads, page_size, head_dim), np.float32)
    out = np.full((blocks, layers, 2, heads, per_block * page_size, head_dim), np.nan, np.float32)
    kernels_numba.gather_blocks(caches, ids, out)
    np.testing.assert_array_equal(out, gather_blocks_v0(caches, ids, slice(None), slice(None)))
    target = np.zeros_like(caches)
    kernels_numba.scatter_blocks(out, target, ids)
    np.testing.assert_array_equal(target[:, :, ids], caches[:, :, ids])
    others = np.setdiff1d(np.arange(pages), ids)
    assert not target[:, :, others].any()
