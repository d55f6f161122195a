"""Codecs for KV on its way to and from the pool: what an encoded block looks like, byte by byte.

An argument of gather_blocks and scatter_blocks, whose kernels (codec_kernels.py) encode and decode while they
move; here are the names, the sizes, the layouts, and v0 of each in NumPy, the oracle of the tests. Loads
neither numba nor torch, so that a store rank may ask for sizes. What each costs in accuracy, measured:
docs/explain/questions/09-codecs.md.

Every codec keeps the order of a plain block, and encodes each *unit*, one head's keys or values of one layer:

    block   [layers, 2, kv_heads] units          one layer is one range of bytes, in every codec
    unit    block_tokens rows of head_dim        a range of heads is two ranges in a layer: keys and values

A row (one token of one head) is encoded by itself. So a token's bytes depend on nothing beside it: a tail may
hold garbage behind its last token, pages may come one by one (-1 in page_ids), and whoever computes a token
again gets the same bytes. One scale for a channel over many tokens would be finer for keys, whose large
numbers stand in fixed channels, but only for whole blocks, and no better where it counts (measured).

Scales are bfloat16: two bytes with the range of a float32, so none overflows. Their size is rounded up. What
no codec can express is never turned into something plausible: a row (of int4: a group) that holds a NaN or an
infinity gets the scale NaN and comes back as NaN throughout. Any bytes can be decoded.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels_numba.errors import RangeError, ShapeError

GROUP = 32
"""Channels that share a scale in int4. With 16, hardly fewer tokens change; with 64, a third more."""

_NAN_SCALE = 0x7FC0
_LEAST_SCALE = 0x0080
"""2**-126, as bfloat16: the least number whose reciprocal is finite too."""


class Codec:
    """`none`: the bytes of the caches.

        unit = [ rows: block_tokens x head_dim numbers of the caches' dtype ]

    Error: 0.
    """

    name = "none"
    number = 0
    """What kernels call it."""

    def check(self, head_dim: int) -> None:
        """Raises ShapeError when rows of this length cannot be encoded."""

    def groups(self, head_dim: int) -> int:
        """Scales of one row."""
        return 0

    def row_nbytes(self, head_dim: int, itemsize: int) -> int:
        """Bytes of one row, without scales."""
        return head_dim * itemsize

    def unit_nbytes(self, tokens: int, head_dim: int, itemsize: int = 4) -> int:
        """Bytes of one unit: scales, then rows. itemsize: of the caches; only `none` asks."""
        return tokens * (2 * self.groups(head_dim) + self.row_nbytes(head_dim, itemsize))

    def nbytes(self, shape: tuple[int, ...], itemsize: int = 4) -> int:
        """Bytes of an encoded block of shape (layers, 2, kv_heads, block_tokens, head_dim)."""
        return math.prod(shape[:-2]) * self.unit_nbytes(shape[-2], shape[-1], itemsize)

    def encode(self, blocks: np.ndarray) -> np.ndarray:
        """v0. blocks (..., tokens, head_dim) float32 -> units (..., unit_nbytes) uint8."""
        scales, codes = self._encode_rows(np.ascontiguousarray(blocks))
        parts = [part.view(np.uint8).reshape(*blocks.shape[:-2], -1) for part in (scales, codes)]
        return np.concatenate(parts, axis=-1)

    def decode(self, units: np.ndarray, tokens: int, head_dim: int) -> np.ndarray:
        """v0. units (..., unit_nbytes) uint8 -> (..., tokens, head_dim) float32."""
        outer, groups = units.shape[:-1], self.groups(head_dim)
        split = tokens * groups * 2
        scales = np.ascontiguousarray(units[..., :split]).view(np.uint16).reshape(*outer, tokens, groups)
        codes = np.ascontiguousarray(units[..., split:]).reshape(*outer, tokens, -1)
        return self._decode_rows(_from_bfloat16(scales), codes)

    def _encode_rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(scales (..., tokens, groups) uint16, codes (..., tokens, any))."""
        return np.empty((*rows.shape[:-1], 0), np.uint16), rows

    def _decode_rows(self, scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
        return codes.view(np.float32)


class BFloat16(Codec):
    """`bfloat16`: half the bytes of float32; of bfloat16 caches the bytes themselves.

        unit = [ rows: block_tokens x head_dim bfloat16 ]

    Error: |x| / 256 at most (2**-134 below 2**-126), none for bfloat16 caches. NaN and infinity stay;
    numbers of more than 3.3895e38 become infinite.
    """

    name, number = "bfloat16", 1

    def row_nbytes(self, head_dim: int, itemsize: int) -> int:
        """Two for each channel."""
        return 2 * head_dim

    def _encode_rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        bits = rows.view(np.uint32)
        rounded = ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        codes = np.where(np.isnan(rows), np.uint16(_NAN_SCALE), rounded)
        return np.empty((*rows.shape[:-1], 0), np.uint16), codes

    def _decode_rows(self, scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
        return _from_bfloat16(codes.view(np.uint16))


class Int8(Codec):
    """`int8`: a scale for each token and head.

        unit = [ scales: block_tokens bfloat16 | rows: block_tokens x head_dim int8, -127 .. 127 ]
        x ~ scale * code, scale = largest |x| of the row / 127, rounded up

    Error: half a scale at most, so the row's largest |x| / 252; 2**-127 for rows below 2**-119. Decoded into
    float16 caches, numbers of more than 65000 may become infinite.
    """

    name, number = "int8", 2

    def groups(self, head_dim: int) -> int:
        """One scale for the whole row."""
        return 1

    def row_nbytes(self, head_dim: int, itemsize: int) -> int:
        """One for each channel."""
        return head_dim

    def _encode_rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scales = _scale_bits(np.abs(rows).max(-1, keepdims=True), 127)
        return scales, np.rint(_scaled(rows, scales)).astype(np.int8)

    def _decode_rows(self, scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
        return codes.view(np.int8).astype(np.float32) * scales


class Int4(Codec):
    """`int4`: a scale for each group of 32 channels (of the whole row, when 32 does not divide head_dim).

        unit = [ scales: block_tokens x groups bfloat16 | rows: block_tokens x head_dim / 2 bytes ]
        byte j of a row = (code of channel j + 8) | (code of channel j + head_dim / 2, + 8) << 4
        x ~ scale * code, code = -8 .. 7; the group's number of the largest size has code -8: the scale has
        the opposite sign

    There is one code more below 0 than above, and this gives it to the side that needs it: measured, a tenth
    less error than codes from -7 to 7. Error: half a scale, so the group's largest |x| / 15.8; but a whole
    scale, |x| / 7.9, for numbers of the other sign that are almost as large. 2**-126 for groups below
    2**-123. head_dim must be even.
    """

    name, number = "int4", 3

    def check(self, head_dim: int) -> None:
        """Two channels share a byte."""
        if head_dim % 2:
            raise ShapeError("caches.shape[5]", head_dim, "an even head_dim, for the int4 codec")

    def groups(self, head_dim: int) -> int:
        """One scale for 32 channels."""
        return head_dim // GROUP if head_dim % GROUP == 0 else 1

    def row_nbytes(self, head_dim: int, itemsize: int) -> int:
        """Half of one for each channel."""
        return head_dim // 2

    def _encode_rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        head_dim = rows.shape[-1]
        grouped = rows.reshape(*rows.shape[:-1], self.groups(head_dim), -1)
        highest, lowest = grouped.max(-1), grouped.min(-1)
        scales = _scale_bits(np.maximum(np.abs(highest), np.abs(lowest)), 8)
        scales[(highest > -lowest) & (scales != _NAN_SCALE)] |= 0x8000
        codes = (np.rint(_scaled(grouped, scales[..., None])) + np.float32(8)).clip(0, 15).astype(np.uint8)
        low, high = np.split(codes.reshape(rows.shape), 2, axis=-1)
        return scales, low | high << 4

    def _decode_rows(self, scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
        numbers = np.concatenate((codes & 15, codes >> 4), axis=-1).astype(np.float32) - np.float32(8)
        grouped = numbers.reshape(*scales.shape, -1)
        return (grouped * scales[..., None]).reshape(numbers.shape)


class Fp8(Int8):
    """`fp8`: e4m3 (1 sign, 4 exponent and 3 fraction bits; no infinity), a scale for each token and head.

        unit = [ scales: block_tokens bfloat16 | rows: block_tokens x head_dim float8_e4m3fn ]
        x ~ scale * code, scale = largest |x| of the row / 448, rounded up

    Error: |x| / 16, or 2**-10 of the scale (2.2e-6 of the row's largest |x|; 2**-136 for rows below 2**-117)
    where that is more. The large numbers of a row come out coarser than in int8, the small ones finer.
    """

    name, number = "fp8", 4

    def _encode_rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        from ml_dtypes import float8_e4m3fn

        scales = _scale_bits(np.abs(rows).max(-1, keepdims=True), 448)
        return scales, _scaled(rows, scales).astype(float8_e4m3fn)

    def _decode_rows(self, scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
        from ml_dtypes import float8_e4m3fn

        return codes.view(float8_e4m3fn).astype(np.float32) * scales


CODECS = {codec.name: codec for codec in (Codec(), BFloat16(), Int8(), Int4(), Fp8())}


def codec(name: str) -> Codec:
    """The codec of that name. Raises RangeError."""
    if name not in CODECS:
        raise RangeError("codec", name, f"one of {', '.join(CODECS)}")
    return CODECS[name]


def _from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _scale_bits(largest: np.ndarray, steps: int) -> np.ndarray:
    """largest / steps as bfloat16 bits, rounded up, at least 2**-126; NaN for NaN and infinity."""
    bits = (largest / np.float32(steps)).view(np.uint32)
    rounded = ((bits + np.uint32(0xFFFF)) >> 16).clip(_LEAST_SCALE)
    return np.where(np.isfinite(largest), rounded, _NAN_SCALE).astype(np.uint16)


def _scaled(rows: np.ndarray, scales: np.ndarray) -> Any:
    """rows / scales; 0 where the scale is NaN."""
    scale = _from_bfloat16(scales)
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(scale), np.float32(0), rows * (np.float32(1) / scale))
