"""Encoding and decoding KV while it moves between pages and blocks: the kernels of codecs.py.

Called by blocks.gather_blocks and scatter_blocks, which check; codecs.py holds the layouts, the rules of each
codec, and v0. Two kernels serve every codec and every dtype of the caches, so a rank compiles no more than
those. The ladder:
    v0  NumPy on gathered blocks (codecs.py), the oracle of the tests
    v1  one page of one head at a time: widened into scratch that stays in the nearest cache, encoded from
        there into scratch, and moved on: memory is read once and written once
    v2  all threads, planes dealt out; decoded pages are written past the caches, encoded blocks are not: they
        are small, and sent next (tried: a tenth slower)

Index mapping, T = page_size, in one unit of pages_per_block * T rows (blocks.py draws the rest):

    page i -> scales[i * T : (i + 1) * T, groups]  uint16 bits of bfloat16, at the unit's start
           `- codes [i * T : (i + 1) * T, row bytes]  after all scales of the unit

Every loop over channels vectorises: conversions are arithmetic on bits, without a branch or a call, and each
operation on 32-bit integers says so again, or Numba would make it one of 64 bits. A page is encoded in two
loops over its rows, scales first: in one, each row would wait for its own scale (10 against 50 ns a row). No
float rules are relaxed, so the bytes are those of v0, and NaN and infinity become what codecs.py promises.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import numpy as np

from kernels_numba.intrinsics.numerics import (
    bits_to_float,
    copy_bytes,
    float_to_bits,
    half_to_float,
    store,
    widen,
)
from kernels_numba.intrinsics.streaming import fence, stream_bytes
from kernels_numba.runtime import PART, njit, prange

FLOAT32, FLOAT16, BFLOAT16_CACHE = 0, 1, 2
KINDS = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16_CACHE}
"""The caches' dtype, as the kernels take it."""

BFLOAT16, INT8, INT4, FP8 = 1, 2, 3, 4
"""Codec.number of each."""

SIZE, SIGN, INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x80000000), np.uint32(0x7F800000)
NAN_SCALE, LEAST_SCALE = np.uint16(0x7FC0), np.uint32(0x0080)
_ZERO, _ONE, _NAN = np.float32(0.0), np.float32(1.0), np.float32(np.nan)
ROUNDER = np.float32(12582912.0)
"""1.5 * 2**23: a float32 of that size has no fraction, so adding it rounds to the nearest even integer, which
then stands in the low bits of the sum."""
ROUNDER_TO_8 = np.float32(12582912.0 + 8.0)
"""The same plus 8: what an int4 code is stored with."""
FINEST, FINEST_BITS = np.float32(16384.0), np.uint32((127 + 14) << 23)
"""2**14: the last bit of a float32 of that size is worth 2**-9, the least positive number of e4m3."""
HALF_A_CODE, CODE_BIAS = np.uint32(0x7FFFF), np.uint32((127 - 7) << 3)
LEAST_NORMAL = np.uint32((127 - 6) << 23)
"""2**-6, the least number of e4m3 with a leading 1, as a float32's bits."""


@njit(**PART)
def _scale_bits(size, steps):
    """The scale's bfloat16 bits, from the bits of the largest |x|: size / steps, rounded up."""
    if size >= INFINITY:
        return NAN_SCALE
    bits = float_to_bits(bits_to_float(size) / steps)
    return np.uint16(max((bits + np.uint32(0xFFFF)) >> np.uint32(16), LEAST_SCALE))


@njit(**PART, error_model="numpy")
def _set_scale(group, size, steps, scales, factors, g):
    """scales[g] and factors[g] = 1 / scale. Where the scale is NaN the group is cleared: then no NaN meets a
    conversion. Scales are rounded up, so a group times its factor stays in the range of its codes."""
    scales[g] = _scale_bits(size, steps)
    factors[g] = _ONE / widen(scales[g])
    if scales[g] == NAN_SCALE:
        group[:], factors[g] = _ZERO, _ONE


@njit(**PART)
def _largest(group):
    """Bits of the largest |x|: sizes of floats order as their bits do, and NaN lies above all."""
    size = np.uint32(0)
    for d in range(group.shape[0]):
        own = np.uint32(float_to_bits(group[d]) & SIZE)
        size = own if own > size else size
    return size


@njit(**PART)
def _find_scales(rows, steps, scales, factors, sizes):
    """One scale a row, 1 / scale into factors; sizes is scratch. Two loops: see the header."""
    for t in range(rows.shape[0]):
        sizes[t] = _largest(rows[t])
    for t in range(rows.shape[0]):
        _set_scale(rows[t], sizes[t], steps, scales, factors, t)


@njit(**PART)
def _largest_signed(group):
    """Bits of the largest x and of the smallest x, each without sign; 0 where there is none of that sign."""
    # Bits of negative numbers grow with their size, as unsigned ones.
    above, below = np.int32(0), np.uint32(0)
    for d in range(group.shape[0]):
        bits = float_to_bits(group[d])
        above = np.int32(bits) if np.int32(bits) > above else above
        below = bits if bits > below else below
    return np.uint32(above), np.uint32(below & SIZE) if below >= SIGN else np.uint32(0)


@njit(**PART)
def _find_signed_scales(groups, scales, factors, sizes):
    """Scales of int4: minus where the largest number is positive, which then gets the code -8."""
    for g in range(groups.shape[0]):
        above, below = _largest_signed(groups[g])
        sizes[g], factors[g] = max(above, below), _ONE if below >= above else -_ONE
    for g in range(groups.shape[0]):
        positive = factors[g] > _ZERO
        _set_scale(groups[g], sizes[g], np.float32(8), scales, factors, g)
        if not positive and scales[g] != NAN_SCALE:
            scales[g] |= np.uint16(0x8000)
            factors[g] = -factors[g]


@njit(**PART)
def _encode_int8(row, factor, codes):
    for d in range(row.shape[0]):
        codes[d] = np.uint8(float_to_bits(row[d] * factor + ROUNDER))


@njit(**PART)
def _encode_int4(row, codes):
    """row: already times its factors."""
    half, most = row.shape[0] // 2, np.uint32(15)
    first, second = row[:half], row[half:]
    for d in range(half):
        low = np.uint32(float_to_bits(first[d] + ROUNDER_TO_8) & np.uint32(31))
        high = np.uint32(float_to_bits(second[d] + ROUNDER_TO_8) & np.uint32(31))
        low, high = low if low < most else most, high if high < most else most
        codes[d] = np.uint8(np.uint32(low | np.uint32(high << np.uint32(4))))


@njit(**PART)
def _encode_fp8(row, factor, codes):
    for d in range(row.shape[0]):
        bits = float_to_bits(row[d] * factor)
        sign, size = np.uint32(np.uint32(bits & SIGN) >> np.uint32(24)), np.uint32(bits & SIZE)
        odd = np.uint32(np.uint32(size >> np.uint32(20)) & np.uint32(1))
        rounded = np.uint32(np.uint32(size + HALF_A_CODE) + odd)
        normal = np.uint32(np.uint32(rounded >> np.uint32(20)) - CODE_BIAS)
        tiny = np.uint32(float_to_bits(bits_to_float(size) + FINEST) - FINEST_BITS)
        codes[d] = np.uint8(np.uint32(sign | (normal if size >= LEAST_NORMAL else tiny)))


@njit(**PART)
def _scale(group, factor):
    for d in range(group.shape[0]):
        group[d] *= factor


@njit(**PART)
def _decode_int8(row, scale, codes):
    for d in range(row.shape[0]):
        row[d] = np.float32(np.int8(codes[d])) * scale


@njit(**PART)
def _decode_int4(row, codes):
    """Without the scales."""
    half = row.shape[0] // 2
    first, second = row[:half], row[half:]
    for d in range(half):
        first[d] = np.float32(np.int32(codes[d] & np.uint8(15))) - np.float32(8)
    for d in range(half):
        second[d] = np.float32(np.int32(codes[d] >> np.uint8(4))) - np.float32(8)


@njit(**PART)
def _decode_fp8(row, scale, codes):
    """A code's bits, moved up, are those of a float16 2**8 times smaller, subnormal ones included."""
    for d in range(row.shape[0]):
        size, sign = np.int16(codes[d] & np.uint8(0x7F)), np.int16(codes[d] & np.uint8(0x80))
        value = half_to_float(np.int16(np.int16(size << np.int16(7)) | np.int16(sign << np.int16(8))))
        row[d] = (value * np.float32(256) if size != np.int16(0x7F) else _NAN) * scale


@njit(**PART)
def _read_page(source, kind, rows, halves):
    """Widens one page of one head, from address `source`, into rows."""
    count, flat = rows.size, rows.reshape(-1)
    if kind == FLOAT32:
        copy_bytes(rows.ctypes.data, source, count * 4)
        return
    copy_bytes(halves.ctypes.data, source, count * 2)
    if kind == FLOAT16:
        float16 = halves.view(np.int16)
        for i in range(count):
            flat[i] = widen(float16[i])
    else:
        for i in range(count):
            flat[i] = widen(halves[i])


@njit(**PART)
def _write_page(target, kind, rows, halves, streamed):
    """Narrows rows into one page of one head, at address `target`."""
    count, flat = rows.size, rows.reshape(-1)
    source, size = rows.ctypes.data, count * 4
    if kind != FLOAT32:
        source, size = halves.ctypes.data, count * 2
    if kind == FLOAT16:
        float16 = halves.view(np.int16)
        for i in range(count):
            store(float16, i, flat[i])
    elif kind == BFLOAT16_CACHE:
        for i in range(count):
            store(halves, i, flat[i])
    if streamed:
        stream_bytes(target, source, size)
    else:
        copy_bytes(target, source, size)


@njit(**PART)
def _encode_page(codec, rows, scales, codes, factors, sizes):
    """rows -> scales, codes; rows is overwritten.

    rows     (page_size, head_dim) float32
    scales   (page_size * groups,) uint16; factors float32 and sizes uint32, scratch of its shape
    codes    (page_size, row bytes) uint8
    """
    if codec == BFLOAT16:
        flat, bits = rows.reshape(-1), codes.reshape(-1).view(np.uint16)
        for i in range(flat.shape[0]):
            store(bits, i, flat[i])
    elif codec == INT8:
        _find_scales(rows, np.float32(127), scales, factors, sizes)
        for t in range(rows.shape[0]):
            _encode_int8(rows[t], factors[t], codes[t])
    elif codec == FP8:
        _find_scales(rows, np.float32(448), scales, factors, sizes)
        for t in range(rows.shape[0]):
            _encode_fp8(rows[t], factors[t], codes[t])
    else:
        groups = rows.reshape(scales.shape[0], -1)
        _find_signed_scales(groups, scales, factors, sizes)
        for g in range(groups.shape[0]):
            _scale(groups[g], factors[g])
        for t in range(rows.shape[0]):
            _encode_int4(rows[t], codes[t])


@njit(**PART)
def _decode_page(codec, rows, scales, codes):
    """scales, codes -> rows; shapes as `_encode_page` has them."""
    if codec == BFLOAT16:
        flat, bits = rows.reshape(-1), codes.reshape(-1).view(np.uint16)
        for i in range(flat.shape[0]):
            flat[i] = widen(bits[i])
    elif codec == INT8:
        for t in range(rows.shape[0]):
            _decode_int8(rows[t], widen(scales[t]), codes[t])
    elif codec == FP8:
        for t in range(rows.shape[0]):
            _decode_fp8(rows[t], widen(scales[t]), codes[t])
    else:
        groups = rows.reshape(scales.shape[0], -1)
        for t in range(rows.shape[0]):
            _decode_int4(rows[t], codes[t])
        for g in range(groups.shape[0]):
            _scale(groups[g], widen(scales[g]))


@njit(**PART)
def _code_bytes(codec, head_dim):
    """Bytes of a row's codes."""
    if codec == BFLOAT16:
        return 2 * head_dim
    return head_dim // 2 if codec == INT4 else head_dim


@njit(**PART)
def _recode_plane(item, caches, blocks, page_ids, strides, part, shape, to_pages, streamed):
    """One block's keys or values of one layer, in the one or the other direction: a page at a time."""
    first_layer, layer_count, first_head, heads = part
    kind, codec, page_size, head_dim, groups = shape
    b, plane = item // (layer_count * 2), item % (layer_count * 2)
    pages = page_ids[b]
    rows = np.empty((page_size, head_dim), np.float32)
    halves = np.empty(page_size * head_dim, np.uint16)
    scales = np.empty(page_size * groups, np.uint16)
    factors, sizes = np.empty(scales.size, np.float32), np.empty(scales.size, np.uint32)
    codes = np.empty((page_size, _code_bytes(codec, head_dim)), np.uint8)
    scale_run, code_run = scales.size * 2, codes.size
    unit = blocks + b * strides[4] + plane * heads * pages.shape[0] * (scale_run + code_run)
    layer = caches + (first_layer + plane // 2) * strides[0] + plane % 2 * strides[1]
    for head in range(heads):
        unit_codes = unit + pages.shape[0] * scale_run
        for i in range(pages.shape[0]):
            if pages[i] >= 0:
                page = layer + pages[i] * strides[2] + (first_head + head) * strides[3]
                own_scales, own_codes = unit + i * scale_run, unit_codes + i * code_run
                if to_pages:
                    copy_bytes(scales.ctypes.data, own_scales, scale_run)
                    copy_bytes(codes.ctypes.data, own_codes, code_run)
                    _decode_page(codec, rows, scales, codes)
                    _write_page(page, kind, rows, halves, streamed)
                else:
                    _read_page(page, kind, rows, halves)
                    _encode_page(codec, rows, scales, codes, factors, sizes)
                    copy_bytes(own_scales, scales.ctypes.data, scale_run)
                    copy_bytes(own_codes, codes.ctypes.data, code_run)
        unit += pages.shape[0] * (scale_run + code_run)
    if streamed:
        fence()


@njit(cache=True, nogil=True)
def recode_v1(caches, blocks, page_ids, strides, part, shape, to_pages, streamed):
    """By the calling thread alone. Arguments as block_kernels.move_block_runs_v1 has them, and
    shape = (kind, codec, page_size, head_dim, scales of a row)."""
    for item in range(page_ids.shape[0] * part[1] * 2):
        _recode_plane(item, caches, blocks, page_ids, strides, part, shape, to_pages, streamed)


@njit(cache=True, nogil=True, parallel=True)
def recode_v2(caches, blocks, page_ids, strides, part, shape, to_pages):
    """The same by all threads."""
    for item in prange(page_ids.shape[0] * part[1] * 2):
        _recode_plane(item, caches, blocks, page_ids, strides, part, shape, to_pages, True)
