"""How rows of weights lie in memory, and how a kernel reads 32 of their values as float32.

Called by linear_layers.py. Knows the formats and no products. A format is a number in the kernels and has one
reader here:

    FLOAT32   32 float32                                        128 bytes
    INT8      32 int8; one float32 scale a row                   32
    Q8_0      float16 d | 32 int8 q             q * d             34
    Q4_0      float16 d | 16 bytes             (q - 8) * d        18
    Q4_1      float16 d | float16 m | 16 bytes  q * d + m         20

Of a byte with two 4-bit numbers the low half belongs to value i, the high half to value i + 16. The last
three are GGUF's. A reader rounds where the dequantised form does, so its values are the same to the bit.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels_numba import arrays
from kernels_numba.errors import RangeError, ShapeError
from kernels_numba.intrinsics.linear_vectors import (
    STEP,
    add_each,
    load_byte,
    load_float,
    load_floats,
    load_index,
    load_int8,
    load_nibbles,
    multiply_each,
)
from kernels_numba.runtime import register_jitable

FLOAT32, INT8, Q8_0, Q4_0, Q4_1 = range(5)
TILE_ROWS = 4
"""Rows of a weight that are multiplied together, so that what is loaded of x serves all of them."""
BLOCK_BYTES = (4 * STEP, STEP, 34, 18, 20)
"""Bytes of a block, 32 values of a row, by format. A tuple, which is a constant in compiled kernels."""
GGUF_FORMATS = {"Q8_0": Q8_0, "Q4_0": Q4_0, "Q4_1": Q4_1}


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Weights of one byte: row r is values[r] * scales[r].

    values   (rows, in) int8
    scales   (rows,) float32
    """

    values: Any
    scales: Any


@dataclass(frozen=True, slots=True)
class GgufRows:
    """Weights as they lie in a GGUF file.

    format   "Q8_0", "Q4_0" or "Q4_1"
    blocks   (rows, bytes of a row) uint8: in / 32 blocks, one behind the other
    """

    format: str
    blocks: Any

    @property
    def width(self) -> int:
        """Values of a row."""
        return self.blocks.shape[1] // BLOCK_BYTES[GGUF_FORMATS[self.format]] * STEP


@dataclass(frozen=True, slots=True)
class Rows:
    """What a kernel needs to know of one weight; `keep` are the arrays that the addresses point into."""

    kind: int
    rows: int
    width: int
    row_bytes: int
    address: int
    scales: int
    keep: tuple[np.ndarray, ...]


def as_rows(name: str, weight: Any) -> Rows:
    """A weight, checked. Raises ShapeError, DtypeError, LayoutError, KindError, RangeError (errors.py)."""
    if isinstance(weight, Int8Rows):
        values = _checked(f"{name}.values", weight.values, "int8", ("rows", "in"))
        scales = _checked(f"{name}.scales", weight.scales, "float32", (values.shape[0],))
        return _rows(INT8, values, values.shape[1], scales)
    if isinstance(weight, GgufRows):
        if weight.format not in GGUF_FORMATS:
            raise RangeError(f"{name}.format", repr(weight.format), " or ".join(GGUF_FORMATS))
        kind = GGUF_FORMATS[weight.format]
        blocks = _checked(f"{name}.blocks", weight.blocks, "uint8", ("rows", "bytes of a row"))
        if blocks.shape[1] % BLOCK_BYTES[kind]:
            expected = f"a multiple of {BLOCK_BYTES[kind]}, the bytes of a block of {weight.format}"
            raise ShapeError(f"{name}.blocks.shape[1]", blocks.shape[1], expected)
        return _rows(kind, blocks, weight.width)
    values = _checked(name, weight, "float32", ("rows", "in"))
    return _rows(FLOAT32, values, values.shape[1])


def _checked(name: str, array: Any, dtype: str, shape: tuple[int | str, ...]) -> np.ndarray:
    if arrays.device_of(name, array) != arrays.CPU:
        raise arrays.KindError(name, "array on cuda", "an array on cpu")
    arrays.check_integer(name, array, dtype)
    arrays.check_shape(name, array, *shape)
    arrays.check_contiguous(name, array)
    return arrays.as_numpy(array)


def _rows(kind: int, values: np.ndarray, width: int, scales: np.ndarray | None = None) -> Rows:
    keep = (values,) if scales is None else (values, scales)
    address, *others = (array.__array_interface__["data"][0] for array in keep)
    return Rows(kind, values.shape[0], width, values.strides[0], address, others[0] if others else 0, keep)


def dequantize_v0(weight: Any) -> np.ndarray:
    """The oracle: the weight as (rows, in) float32, in NumPy."""
    if isinstance(weight, Int8Rows):
        return np.asarray(weight.values, np.float32) * np.asarray(weight.scales)[:, None]
    if not isinstance(weight, GgufRows):
        return np.asarray(weight)
    kind = GGUF_FORMATS[weight.format]
    blocks = np.asarray(weight.blocks).reshape(-1, BLOCK_BYTES[kind])
    halves = blocks[:, : 4 if kind == Q4_1 else 2].copy().view(np.float16).astype(np.float32)
    codes = blocks[:, 2 * halves.shape[1] :]
    if kind == Q8_0:
        values = codes.view(np.int8).astype(np.float32)
    else:
        values = np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.float32)
    if kind == Q4_0:
        values -= np.float32(8)
    values = values * halves[:, :1]
    return (values + halves[:, 1:] if kind == Q4_1 else values).reshape(-1, weight.width)


HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
"""The float32 of every float16. A load from here needs none of the ports that the arithmetic of a block keeps
busy, the processor's conversion two of them: 1.2 times the speed for Q4_1."""


# Readers: STEP values from the address of a step, as vectors; `halves` is the address of HALVES. They are
# inlined into the kernels of linear_layers.py. No fast float rules: q * d + m must be rounded twice.


@register_jitable(forceinline=True)
def _half(address, halves):
    """The float16 at an address."""
    return load_float(halves + 4 * load_index(address))


@register_jitable(forceinline=True)
def read_float32(address, halves):
    """32 float32."""
    return load_floats(address)


@register_jitable(forceinline=True)
def read_int8(address, halves):
    """32 int8, without their row's scale."""
    return load_int8(address)


@register_jitable(forceinline=True)
def read_q8_0(address, halves):
    """A block of Q8_0."""
    return multiply_each(load_int8(address + 2), _half(address, halves))


@register_jitable(forceinline=True)
def read_q4_0(address, halves):
    """A block of Q4_0."""
    return multiply_each(load_nibbles(address + 2, 8), _half(address, halves))


@register_jitable(forceinline=True)
def read_q4_1(address, halves):
    """A block of Q4_1."""
    products = multiply_each(load_nibbles(address + 4, 0), _half(address, halves))
    return add_each(products, _half(address + 2, halves))


@register_jitable(forceinline=True)
def read_one_float32(address, index):
    """Value `index` behind the last whole step of a row."""
    return load_float(address + 4 * index)


@register_jitable(forceinline=True)
def read_one_int8(address, index):
    """Value `index` behind the last whole step of a row."""
    return load_byte(address + index)
