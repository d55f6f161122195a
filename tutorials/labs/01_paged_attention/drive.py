"""The child's side of lab 1: calls the regions with what the tests send, and tells what was seen.

It runs beside a student's code, so it knows no expected value. Each call reaches the region of one task.
Kernels run in Numba's simulator under the race checker; with MOONCAKE_LITE_LABS_GPU they run on a GPU, and
nothing is recorded there. NaN travels as null.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mooncake_lite.labs.child import GPU

ON_GPU = GPU in os.environ
if not ON_GPU:
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # Numba reads it when it is imported

import numpy as np  # noqa: E402

from kernels_numba import attention_cuda, attention_plain  # noqa: E402
from kernels_numba.backend_cuda import cuda  # noqa: E402
from mooncake_lite.labs.access_map import access_map  # noqa: E402
from mooncake_lite.labs.race_checker import READS, Recording, watch  # noqa: E402

LAUNCHES: dict[str, Callable[..., None]] = {
    "attention_v1": attention_cuda.launch_plain,
    "attention_v1_shared": attention_cuda.launch_shared,
}
BLOCK = (0, 0, 0)
"""The block that a picture shows."""

warnings.simplefilter("ignore", RuntimeWarning)  # poison overflows, and tests look at results


def elements(numbers: Any, dtype: str) -> np.ndarray:
    """Return an array of float32, or of the bits of bfloat16."""
    return np.array(numbers, np.uint16 if dtype == "bfloat16" else np.float32)


class Counted(np.ndarray):
    """An array that counts the elements that are read by index.

    A part of it counts as a whole, as long as no elements of that part are read by index themselves.
    """

    count = 0
    _counted = 0

    def __getitem__(self, index: Any) -> Any:
        """Count what is read."""
        Counted.count -= self._counted
        self._counted = 0
        value = super().__getitem__(index)
        Counted.count += np.size(value)
        if not isinstance(value, Counted):
            return value
        if not np.may_share_memory(value, self):
            return value.view(np.ndarray)  # a copy: what is done with it reads no more of this array
        value._counted = value.size
        return value


@contextmanager
def plain_python(**names: Any) -> Iterator[None]:
    """Let the regions of attention_plain run uncompiled, with other objects under these names."""
    names |= {"widen": lambda value: value, "store": _store}
    real = {name: getattr(attention_plain, name) for name in names}
    vars(attention_plain).update(names)
    try:
        yield
    finally:
        vars(attention_plain).update(real)


def _store(array: Any, index: Any, value: Any) -> None:
    array[index] = value


# ------------------------------------------------------------------------------------------- 1a


def gathered(inputs: dict[str, Any]) -> dict[str, Any]:
    """Gather one run of tokens, and count the elements of the cache that were read."""
    cache = elements(inputs["cache"], inputs["dtype"]).view(Counted)
    Counted.count = 0
    table = np.array(inputs["table"], np.int32)
    rows = attention_plain.gathered(cache, table, inputs["first"], inputs["end"])
    count = Counted.count
    found = np.asarray(rows)
    return {"shape": found.shape, "dtype": str(found.dtype), "rows": found.ravel().tolist(), "read": count}


# ------------------------------------------------------------------------------------------- 1b


def add_tokens(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Take pieces into an online softmax, one after the other. Tells what holds after each of them."""
    return _softmax(attention_plain.add_tokens, inputs)


def _softmax(step: Callable[..., Any], inputs: dict[str, Any]) -> list[dict[str, Any]]:
    highest, total = attention_plain.LOWEST, np.float32(0)
    sums = np.zeros(inputs["head_dim"], np.float32)
    seen = []
    for piece in inputs["pieces"]:
        scores = np.array(piece["scores"], np.float32)
        values = elements(piece["values"], inputs["dtype"])
        highest, total = (np.float32(number) for number in step(scores, values, highest, total, sums))
        seen.append({"highest": float(highest), "total": float(total), "sums": sums.tolist()})
    return seen


class CountedPowers:
    """NumPy with an `exp` that counts the numbers it is given."""

    count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def exp(self, power: Any) -> Any:
        """Count, and compute."""
        CountedPowers.count += np.size(power)
        return np.exp(power)


def exponentials(inputs: dict[str, Any]) -> int:
    """Count the exponentials of the same pieces, with the function as plain Python."""
    CountedPowers.count = 0
    with plain_python(np=CountedPowers()):
        _softmax(attention_plain.add_tokens.py_func, inputs)
    return CountedPowers.count


# ------------------------------------------------------------------------------------------- 1c


def attend(inputs: dict[str, Any]) -> list[float]:
    """Attend to one run of tokens."""
    return _attend(attention_plain.attend, inputs, np.ndarray)


def _attend(function: Callable[..., Any], inputs: dict[str, Any], kind: type[np.ndarray]) -> list[float]:
    query, keys, values = (elements(inputs[name], inputs["dtype"]) for name in ("query", "keys", "values"))
    scores = np.full(inputs["end"] - inputs["first"] + 3, np.nan, np.float32)
    out = np.full(query.shape, 0x7FC0 if query.dtype == np.uint16 else np.nan, query.dtype)
    table, run = np.array(inputs["table"], np.int32), (inputs["first"], inputs["end"])
    function(query, keys.view(kind), values.view(kind), table, *run, inputs["scale"], scores, out)
    return [float(number) for number in out]


def cells(inputs: dict[str, Any]) -> int:
    """Count the elements of keys and values that are read, with the function as plain Python."""
    Counted.count = 0
    with plain_python():
        _attend(attention_plain.attend.py_func, inputs, Counted)
    return Counted.count


# -------------------------------------------------------------------------------------- 1d and 1e


def launch(inputs: dict[str, Any]) -> dict[str, Any]:
    """Launch a kernel. Tells its result, what the race checker has found, and how many keys were read.

    drawn   an access map of the first shared array, or of the keys when there is none
    """
    arrays = [elements(inputs[name], inputs["dtype"]) for name in ("query", "key_cache", "value_cache")]
    arrays += [np.array(inputs[name], np.int32) for name in ("block_tables", "query_lens", "context_lens")]
    out = np.full(arrays[0].shape, 0x7FC0 if arrays[0].dtype == np.uint16 else np.nan, arrays[0].dtype)
    *given, result = (cuda.to_device(array) for array in (*arrays, out))
    run = LAUNCHES[inputs["kernel"]]
    if ON_GPU:
        run(*given, inputs["scale"], result, inputs["window"])
        return {
            "out": result.copy_to_host().ravel().tolist(),
            "findings": [],
            "key_reads": None,
            "drawn": None,
        }
    with watch(["key_cache"]) as recording:
        run(*given, inputs["scale"], result, inputs["window"])
    return {
        "out": result.copy_to_host().ravel().tolist(),
        "findings": [str(finding) for finding in recording.findings()],
        "key_reads": recording.count("key_cache", READS),
        "drawn": _drawn(recording),
    }


def _drawn(recording: Recording) -> Any:
    """Return a picture of one block; None when no thread of it touched anything that is watched."""
    for name in (*sorted(recording.shared_names), "key_cache"):
        if name in recording.shapes:
            return access_map(recording, name, unit="page" if name == "key_cache" else "cell", block=BLOCK)
    return None


CALLS = {
    "gathered": gathered,
    "add_tokens": add_tokens,
    "exponentials": exponentials,
    "attend": attend,
    "cells": cells,
    "launch": launch,
}
