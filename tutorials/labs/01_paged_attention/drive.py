"""The child's side of 1a to 1c: calls the regions with what the tests send, and tells what was seen.

It runs beside a student's code, so it knows no expected value. Each call reaches the region of one task.
NaN travels as null.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ["NUMBA_OPT"] = "0"  # each child compiles anew, which takes longer than all calls together

import numpy as np

from kernels_numba.attention import attention_plain

GUARD = 64
"""Cells on both sides of a scratch array, more than a page has tokens."""
UNTOUCHED = np.float32(-12345.0)
"""What these cells hold."""

warnings.simplefilter("ignore", RuntimeWarning)  # poison overflows, and tests look at results


def elements(numbers: Any, dtype: str) -> np.ndarray:
    """Return an array of float32, or of the bits of bfloat16."""
    return np.array(numbers, np.uint16 if dtype == "bfloat16" else np.float32)


class Counted(np.ndarray):
    """An array that counts the elements that are read by index.

    A part of it counts as a whole, as long as no elements of that part are read by index themselves. A
    function of NumPy that makes another array out of the whole one reads all of it.

    _is_whole   it has all elements of the array that the region was given, perhaps in another shape
    """

    count = 0
    _counted = 0
    _is_whole = False
    base = data = flat = None  # they lead to the same elements, uncounted

    def __array_finalize__(self, made_of: Any) -> None:
        """Note whether this new array has all elements."""
        self._is_whole = getattr(made_of, "_is_whole", False) and self.size == made_of.size

    def view(self, *given: Any) -> Any:
        """Count the whole array."""
        Counted.count += self.size if self._is_whole else 0
        return super().view(*given)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Count what a function reads."""
        made = super().__array_function__(function, types, args, kwargs)
        if self._is_whole and isinstance(made, np.ndarray) and not _share(made, self):
            Counted.count += self.size
        return made

    def take(self, *args: Any, **kwargs: Any) -> Any:
        """Count the whole array."""
        Counted.count += self.size if self._is_whole else 0
        return super().take(*args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        """Count what is read."""
        Counted.count -= self._counted
        self._counted = 0
        value = super().__getitem__(index)
        Counted.count += np.size(value)
        if not isinstance(value, Counted):
            return value
        if not _share(value, self):
            return np.asarray(value)  # a copy: what is done with it reads no more of this array
        value._counted = value.size
        return value


def _share(one: np.ndarray, other: np.ndarray) -> bool:
    return np.may_share_memory(np.asarray(one), np.asarray(other))


def counted(array: np.ndarray) -> Counted:
    """Return an array that counts."""
    made = array.view(Counted)
    made._is_whole = True
    return made


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
    cache = counted(elements(inputs["cache"], inputs["dtype"]))
    Counted.count = 0
    table = np.array(inputs["table"], np.int32)
    with plain_python(np=CountedNumPy()):
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


class CountedNumPy:
    """NumPy that counts the numbers that `exp` is given, and arrays that it would turn into plain ones."""

    count = 0

    def __getattr__(self, name: str) -> Any:
        if name not in ("array", "asarray", "ascontiguousarray", "asfortranarray"):
            return getattr(np, name)
        return lambda array, *given, **more: getattr(np, name)(_plain(array), *given, **more)

    def exp(self, power: Any) -> Any:
        """Count, and compute."""
        CountedNumPy.count += np.size(power)
        return np.exp(power)


def _plain(array: Any) -> Any:
    return array.view(np.ndarray) if isinstance(array, Counted) else array


def exponentials(inputs: dict[str, Any]) -> int:
    """Count the exponentials of the same pieces, with the function as plain Python."""
    CountedNumPy.count = 0
    with plain_python(np=CountedNumPy()):
        _softmax(attention_plain.add_tokens.py_func, inputs)
    return CountedNumPy.count


# ------------------------------------------------------------------------------------------- 1c


def attend(inputs: dict[str, Any]) -> dict[str, Any]:
    """Attend to one run of tokens."""
    return _attend(attention_plain.attend, inputs, np.asarray)


def _attend(
    function: Callable[..., Any], inputs: dict[str, Any], cache: Callable[[np.ndarray], np.ndarray]
) -> dict[str, Any]:
    """Return the row, and how many cells on both sides of `scores` have changed.

    spare   of inputs: so many cells more than there are tokens has `scores`
    """
    query, keys, values = (elements(inputs[name], inputs["dtype"]) for name in ("query", "keys", "values"))
    scratch = np.full(inputs["end"] - inputs["first"] + inputs["spare"] + 2 * GUARD, UNTOUCHED)
    scratch[GUARD:-GUARD] = np.nan
    out = np.full(query.shape, 0x7FC0 if query.dtype == np.uint16 else np.nan, query.dtype)
    table, run = np.array(inputs["table"], np.int32), (inputs["first"], inputs["end"])
    scores = scratch[GUARD:-GUARD]
    function(query, cache(keys), cache(values), table, *run, inputs["scale"], scores, out)
    around = np.concatenate([scratch[:GUARD], scratch[-GUARD:]])
    return {"out": [float(number) for number in out], "outside": int((around != UNTOUCHED).sum())}


def cells(inputs: dict[str, Any]) -> int:
    """Count the elements of keys and values that are read, with the function as plain Python."""
    Counted.count = 0
    with plain_python(np=CountedNumPy()):
        _attend(attention_plain.attend.py_func, inputs, counted)
    return Counted.count


CALLS = {
    "gathered": gathered,
    "add_tokens": add_tokens,
    "exponentials": exponentials,
    "attend": attend,
    "cells": cells,
}
