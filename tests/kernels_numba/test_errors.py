"""What the kernels refuse: each message names the argument, its value and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import kernels_numba
from kernels_numba import arrays
from kernels_numba.errors import (
    ArgumentError,
    DtypeError,
    KernelError,
    KindError,
    LayoutError,
    RangeError,
    ShapeError,
)


def decode_arguments() -> dict[str, Any]:
    """A good call of paged_attention_decode: 2 sequences, 4/2 heads x 16, 5 pages of 8."""
    return {
        "query": np.zeros((2, 4, 16), np.float32),
        "key_cache": np.zeros((5, 2, 8, 16), np.float32),
        "value_cache": np.zeros((5, 2, 8, 16), np.float32),
        "block_tables": np.array([[0, 1], [2, 3]], np.int32),
        "context_lens": np.array([16, 9], np.int32),
        "scale": 1.0,
    }


def prefill_arguments() -> dict[str, Any]:
    return decode_arguments() | {"query_lens": np.array([1, 1], np.int32)}


def block_arguments() -> dict[str, Any]:
    """A good call of gather_blocks: 3 layers, 5 pages of 2 heads x 8 x 16, blocks of two pages."""
    return {
        "caches": np.zeros((3, 2, 5, 2, 8, 16), np.float32),
        "page_ids": np.array([[0, 1]], np.int32),
        "out": np.zeros((1, 3, 2, 2, 16, 16), np.float32),
    }


def slot_arguments() -> dict[str, Any]:
    return {
        "key": np.zeros((2, 2, 16), np.float32),
        "value": np.zeros((2, 2, 16), np.float32),
        "key_cache": np.zeros((5, 2, 8, 16), np.float32),
        "value_cache": np.zeros((5, 2, 8, 16), np.float32),
        "slot_mapping": np.array([3, 39], np.int64),
    }


def refusal(function: str, good: Callable[[], dict[str, Any]], **wrong: Any) -> ArgumentError:
    """The error that a good call raises once some arguments are exchanged."""
    with pytest.raises(ArgumentError) as caught:
        getattr(kernels_numba, function)(**(good() | wrong))
    return caught.value


ATTENTION = [
    (ShapeError, "query.shape", {"query": np.zeros((2, 4), np.float32)}),
    (ShapeError, "query.shape[1]", {"query": np.zeros((2, 3, 16), np.float32)}),
    (ShapeError, "key_cache.shape", {"key_cache": np.zeros((5, 2, 8, 32), np.float32)}),
    (ShapeError, "value_cache.shape", {"value_cache": np.zeros((4, 2, 8, 16), np.float32)}),
    (ShapeError, "block_tables.shape", {"block_tables": np.zeros(2, np.int32)}),
    (ShapeError, "block_tables.shape", {"block_tables": np.zeros((3, 2), np.int32)}),
    (ShapeError, "out.shape", {"out": np.zeros((2, 4, 8), np.float32)}),
    (DtypeError, "query.dtype", {"query": np.zeros((2, 4, 16), np.float64)}),
    (DtypeError, "query.dtype", {"query": torch.zeros(2, 4, 16, dtype=torch.float64)}),
    (DtypeError, "key_cache.dtype", {"key_cache": torch.zeros(5, 2, 8, 16, dtype=torch.bfloat16)}),
    (DtypeError, "block_tables.dtype", {"block_tables": np.zeros((2, 2), np.int64)}),
    (DtypeError, "context_lens.dtype", {"context_lens": np.zeros(2, np.uint16)}),
    (LayoutError, "query", {"query": np.zeros((4, 2, 16), np.float32).transpose(1, 0, 2)}),
    (LayoutError, "block_tables", {"block_tables": np.zeros((2, 4), np.int32)[:, ::2]}),
    (KindError, "query", {"query": [[[0.0] * 16] * 4] * 2}),
    (KindError, "key_cache", {"key_cache": torch.zeros(5, 2, 8, 16, device="meta")}),
]


@pytest.mark.quick
@pytest.mark.parametrize(("error", "argument", "wrong"), ATTENTION)
def test_attention_names_the_argument_its_value_and_what_was_expected(error, argument, wrong) -> None:
    for function, good in (
        ("paged_attention_decode", decode_arguments),
        ("paged_attention_prefill", prefill_arguments),
    ):
        refused = refusal(function, good, **wrong)
        assert type(refused) is error
        assert refused.argument == argument
        assert str(refused).startswith(f"{argument}=")
        assert f"expected {refused.expected}" in str(refused)


def test_a_head_width_that_the_kernels_do_not_know_is_refused_with_the_range() -> None:
    wrong = {"query": np.zeros((2, 4, 12), np.float32)}
    wrong |= {name: np.zeros((5, 2, 8, 12), np.float32) for name in ("key_cache", "value_cache")}
    refused = refusal("paged_attention_decode", decode_arguments, **wrong)
    assert str(refused) == "query.shape[2]=12: expected a multiple of 8 from 8 to 256"


def test_a_page_or_a_length_outside_the_cache_is_refused_before_anything_is_read() -> None:
    tables = np.array([[0, 1], [2, 5]], np.int32)
    refused = refusal("paged_attention_decode", decode_arguments, block_tables=tables)
    assert str(refused) == "block_tables[1, 1]=5: expected a page from 0 to 4"
    lens = np.array([16, 17], np.int32)
    refused = refusal("paged_attention_decode", decode_arguments, context_lens=lens)
    assert str(refused) == "context_lens[1]=17: expected 0 to 16, what the table can hold"
    refused = refusal("paged_attention_prefill", prefill_arguments, context_lens=-lens)
    assert (type(refused), refused.argument) == (RangeError, "context_lens[0]")


@pytest.mark.parametrize(("new", "argument"), [([17, 1], "query_lens[0]"), ([1, 2], "sum(query_lens)")])
def test_query_lengths_that_contradict_the_rest_are_refused(new, argument) -> None:
    refused = refusal("paged_attention_prefill", prefill_arguments, query_lens=np.array(new, np.int32))
    assert (type(refused), refused.argument) == (RangeError, argument)


class OnGpu:
    """As much of a CUDA array as tells where it lives: torch's and Numba's, without a GPU."""

    def __init__(self, index: int):
        self.device = torch.device("cuda", index)
        self.gpu_data = SimpleNamespace(context=SimpleNamespace(device=SimpleNamespace(id=index)))


class OnGpuByNumba(OnGpu):
    __cuda_ndarray__ = True


@pytest.mark.parametrize("kind", [OnGpu, OnGpuByNumba])
def test_arrays_on_two_cuda_devices_are_refused_with_the_name_of_the_second(kind, monkeypatch) -> None:
    monkeypatch.setattr(arrays, "_torch_of", lambda array: torch if type(array) is OnGpu else None)
    assert arrays.common_device({"query": kind(1), "key_cache": OnGpu(1)}) == "cuda"
    for other, place in ((kind(1), "cuda:1"), (np.zeros(1), "cpu")):
        with pytest.raises(KindError) as caught:
            arrays.common_device({"query": OnGpu(0), "key_cache": kind(0), "value_cache": other})
        assert str(caught.value) == f"value_cache={place}: expected an array on cuda:0, where query lives"


BLOCKS = [
    (ShapeError, "caches.shape", {"caches": np.zeros((3, 5, 2, 8, 16), np.float32)}),
    (ShapeError, "out.shape", {"out": np.zeros((1, 3, 2, 2, 24, 16), np.float32)}),
    (ShapeError, "out.shape", {"layers": slice(0, 2)}),
    (DtypeError, "out.dtype", {"out": np.zeros((1, 3, 2, 2, 16, 16), np.uint16)}),
    (DtypeError, "page_ids.dtype", {"page_ids": np.zeros((1, 2), np.int64)}),
    (LayoutError, "out[0]", {"out": np.zeros((1, 3, 2, 2, 16, 32), np.float32)[..., ::2]}),
    (LayoutError, "caches", {"caches": np.zeros((2, 3, 5, 2, 8, 16), np.float32).swapaxes(0, 1)}),
    (RangeError, "page_ids[0, 1]", {"page_ids": np.array([[0, 5]], np.int32)}),
    (RangeError, "page_ids[0, 0]", {"page_ids": np.array([[-2, 1]], np.int32)}),
    (RangeError, "layers", {"layers": range(0, 3, 2)}),
    (RangeError, "heads", {"heads": range(1, 3)}),
    (RangeError, "heads", {"heads": 1}),
    (KindError, "codec", {"codec": "int8"}),
]


@pytest.mark.quick
@pytest.mark.parametrize(("error", "argument", "wrong"), BLOCKS)
def test_gather_names_what_does_not_fit(error, argument, wrong) -> None:
    refused = refusal("gather_blocks", block_arguments, **wrong)
    assert (type(refused), refused.argument) == (error, argument)


def rotary_arguments() -> dict[str, Any]:
    tables = (np.zeros((9, 1, 16), np.float32), np.zeros((9, 1, 16), np.float32))
    turned = {"positions": np.array([0, 8]), "query": np.ones((2, 4, 16), np.float32)}
    return slot_arguments() | {"rotary": tables} | turned


def page_arguments() -> dict[str, Any]:
    ids = {"source_ids": np.array([1], np.int32), "target_ids": np.array([2], np.int32)}
    caches = np.arange(3 * 2 * 5 * 2 * 8 * 16, dtype=np.float32).reshape(3, 2, 5, 2, 8, 16)
    return {"caches": caches, **ids}


def with_out(good: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    return lambda: good() | {"out": np.ones((2, 4, 16), np.float32)}


def linear_arguments() -> dict[str, Any]:
    return {name: np.ones((2, 2), np.float32) for name in ("x", "weight", "out")}


@pytest.mark.parametrize(
    ("function", "good", "argument"),
    [
        ("gather_blocks", block_arguments, "out"),
        ("copy_pages", page_arguments, "caches"),
        ("scatter_kv", slot_arguments, "key_cache"),
        ("scatter_kv", slot_arguments, "value_cache"),
        ("scatter_kv", rotary_arguments, "query"),
        ("paged_attention_decode", with_out(decode_arguments), "out"),
        ("paged_attention_prefill", with_out(prefill_arguments), "out"),
        ("linear", linear_arguments, "out"),
    ],
)
def test_nothing_is_ever_written_into_a_read_only_array(function, good, argument) -> None:
    """Twice: checks of a kind of arrays are remembered."""
    getattr(kernels_numba, function)(**good())
    array = good()[argument]
    before = array.copy()
    array.flags.writeable = False
    for _ in range(2):
        refused = refusal(function, good, **{argument: array})
        assert (type(refused), refused.argument) == (LayoutError, argument)
        assert refused.value == "read-only array"
    np.testing.assert_array_equal(array, before)


def test_weights_are_never_unpacked_into_a_read_only_array() -> None:
    out = np.zeros((1, 2), np.float32)
    out.flags.writeable = False
    with pytest.raises(LayoutError, match="out=read-only array"):
        kernels_numba.Linears([np.ones((2, 2), np.float32)]).dequantized(0, 0, out)
    assert not out.any()


SLOTS = [
    (RangeError, "slot_mapping[1]", {"slot_mapping": np.array([3, 40], np.int64)}),
    (DtypeError, "slot_mapping.dtype", {"slot_mapping": np.array([3, 4], np.int32)}),
    (ShapeError, "value.shape", {"value": np.zeros((3, 2, 16), np.float32)}),
    (ShapeError, "key_cache.shape", {"key_cache": np.zeros((5, 3, 8, 16), np.float32)}),
    (LayoutError, "key", {"key": np.zeros((2, 2, 32), np.float32)[..., ::2]}),
]


@pytest.mark.quick
@pytest.mark.parametrize(("error", "argument", "wrong"), SLOTS)
def test_scatter_names_what_does_not_fit(error, argument, wrong) -> None:
    refused = refusal("scatter_kv", slot_arguments, **wrong)
    assert (type(refused), refused.argument) == (error, argument)


def test_copy_on_write_refuses_pages_that_are_not_there() -> None:
    caches, ids = block_arguments()["caches"], np.array([1, 2], np.int32)
    for name, wrong in (("source_ids", -1), ("target_ids", 5)):
        bad = {"source_ids": ids, "target_ids": ids} | {name: np.array([1, wrong], np.int32)}
        with pytest.raises(RangeError, match=rf"{name}\[1\]={wrong}: expected an id from 0 to 4"):
            kernels_numba.copy_pages(caches, **bad)


def test_a_check_that_another_thread_forgets_at_once_still_answers(monkeypatch) -> None:
    class Forgotten(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            """Another thread found it full and cleared it."""

    monkeypatch.setattr(arrays, "_PASSED", Forgotten())
    assert arrays.check_once(lambda named: "cpu", {"key": np.zeros(1)}) == "cpu"


def test_every_refusal_is_a_kernel_error_and_a_value_error() -> None:
    assert issubclass(ArgumentError, KernelError)
    assert issubclass(ArgumentError, ValueError)
