"""The CUDA kernels in Numba's simulator, against the oracles: run as a program by test_cuda.py.

A process of its own, because Numba chooses between simulator and compiler when it is imported
(NUMBA_ENABLE_CUDASIM=1). Needs NumPy and Numba only. Prints one line a check; ends with an exit code.
"""

from __future__ import annotations

import numpy as np

import kernels_numba
from kernels_numba import attention_cuda
from kernels_numba.attention_prefill import prefill_v0
from kernels_numba.backend_cuda import SIMULATED, cuda
from kernels_numba.blocks import gather_blocks_v0
from kernels_numba.errors import KindError

RANDOM = np.random.default_rng(0)


def bits(array: np.ndarray) -> np.ndarray:
    """float32 as bfloat16 bits, cut: good enough to make inputs."""
    return (array.view(np.uint32) >> 16).astype(np.uint16)


def floats(array: np.ndarray) -> np.ndarray:
    """bfloat16 bits as float32; float32 as it is."""
    return array if array.dtype == np.float32 else (array.astype(np.uint32) << 16).view(np.float32)


def device(*arrays: np.ndarray) -> list:
    return [cuda.to_device(array) for array in arrays]


def attention_case(dtype: str, group: int, head_dim: int) -> tuple:
    """Two ragged sequences in poisoned pages of 8 tokens: inputs and what v0 makes of them."""
    pages = 9
    caches = RANDOM.standard_normal((2, pages, 1, 8, head_dim), dtype=np.float32)
    query = RANDOM.standard_normal((5, group, head_dim), dtype=np.float32)
    tables = np.full((2, 4), 2**31 - 1, np.int32)
    tables[0, :2], tables[1, :1] = (7, 2), (4,)
    new, lens = np.array([3, 2], np.int32), np.array([11, 5], np.int32)
    caches[:, [0, 1, 3, 5, 6, 8]] = np.nan
    caches[:, 2, :, 3:] = np.nan
    caches[:, 4, :, 5:] = np.nan
    if dtype == "bfloat16":
        query, caches = bits(query), bits(caches)
    want = prefill_v0(floats(query), floats(caches[0]), floats(caches[1]), tables, new, lens, 0.25)
    return query, caches, tables, new, lens, want


def check_attention(dtype: str, group: int, head_dim: int) -> None:
    query, caches, tables, new, lens, want = attention_case(dtype, group, head_dim)
    allowed = 1e-5 if dtype == "float32" else 2**-7
    arguments = device(query, caches[0], caches[1], tables)
    out = kernels_numba.paged_attention_prefill(*arguments, *device(new, lens), scale=0.25)
    assert np.abs(floats(out.copy_to_host()) - want).max() < allowed
    last = np.cumsum(new) - 1
    decoded = kernels_numba.paged_attention_decode(
        *device(query[last]), *arguments[1:], *device(lens), scale=0.25
    )
    assert np.abs(floats(decoded.copy_to_host()) - want[last]).max() < allowed
    print("attention", dtype, group, head_dim)


def check_plain_rung() -> None:
    query, caches, tables, new, lens, want = attention_case("float32", 2, 8)
    out = np.zeros_like(query)
    (result,) = device(out)
    attention_cuda.launch_plain(*device(query, caches[0], caches[1], tables, new, lens), 0.25, result)
    assert np.abs(result.copy_to_host() - want).max() < 1e-5
    print("plain rung")


def check_an_empty_sequence_decodes_to_zeros() -> None:
    query, caches, tables, _, lens, _ = attention_case("float32", 1, 8)
    lens[1] = 0
    out = kernels_numba.paged_attention_decode(
        *device(query[:2].copy(), caches[0], caches[1], tables, lens), scale=0.25
    )
    assert not out.copy_to_host()[1].any()
    assert out.copy_to_host()[0].any()
    print("empty sequence")


def check_blocks(dtype: type) -> None:
    caches = RANDOM.integers(0, 60000, (2, 2, 5, 2, 4, 8)).astype(dtype)
    ids = np.array([[3, 1], [0, -1]], np.int32)
    want = gather_blocks_v0(caches, ids, slice(1, 2), slice(0, 2))
    blocks = np.full(want.shape, 7, dtype)
    pages, table, out = device(caches, ids, blocks)
    kernels_numba.gather_blocks(pages, table, out, layers=slice(1, 2), heads=range(2))
    gathered = out.copy_to_host()
    assert (gathered[0] == want[0]).all()
    assert (gathered[1, ..., :4, :] == want[1, ..., :4, :]).all()
    assert (gathered[1, ..., 4:, :] == 7).all()
    (target,) = device(np.zeros_like(caches))
    kernels_numba.scatter_blocks(out, target, table, layers=slice(1, 2), heads=range(2))
    back = target.copy_to_host()
    assert (back[1][:, [3, 1, 0]] == caches[1][:, [3, 1, 0]]).all()
    assert not back[0].any()
    assert not back[1][:, [2, 4]].any()
    print("blocks", dtype.__name__)


def check_tokens_and_pages() -> None:
    caches = RANDOM.random((1, 2, 3, 2, 4, 8), np.float32)
    fused = RANDOM.random((3, 2, 2, 8), np.float32)
    slots = np.array([9, -1, 0], np.int64)
    keys, values, mapping = device(caches[0, 0], caches[0, 1], slots)
    kernels_numba.scatter_kv(*device(fused[:, 0].copy(), fused[:, 1].copy()), keys, values, mapping)
    for cache, kv in ((keys, 0), (values, 1)):
        want = caches[0, kv].copy()
        want[2, :, 1], want[0, :, 0] = fused[0, kv], fused[2, kv]
        assert (cache.copy_to_host() == want).all()
    pages, sources, targets = device(caches, np.array([0, 1], np.int32), np.array([1, 2], np.int32))
    kernels_numba.copy_pages(pages, sources, targets)
    assert (pages.copy_to_host() == caches[:, :, [0, 0, 0]]).all()
    print("tokens and pages")


def check_that_devices_are_not_mixed() -> None:
    query, caches, tables, new, lens, _ = attention_case("float32", 1, 8)
    mixed = (*device(query, caches[0]), caches[1], *device(tables, new, lens))
    message = ""
    try:
        kernels_numba.paged_attention_prefill(*mixed, scale=1.0)
    except KindError as error:
        message = str(error)
    assert message == "value_cache=cpu: expected an array on cuda, where query lives"
    print("mixed devices")


def main() -> None:
    assert SIMULATED
    for dtype, group, head_dim in (("float32", 3, 32), ("bfloat16", 1, 72), ("float32", 18, 8)):
        check_attention(dtype, group, head_dim)
    check_plain_rung()
    check_an_empty_sequence_decodes_to_zeros()
    check_blocks(np.float32)
    check_blocks(np.uint16)
    check_tokens_and_pages()
    check_that_devices_are_not_mixed()
    print("all checks passed")


if __name__ == "__main__":
    main()
