"""Encoding and decoding KV while it moves between pages and blocks: the kernels of codecs.py.

Called by blocks.gather_blocks and scatter_blocks, which check; codecs.py holds the layouts, the rules of each
codec, and v0. Two kernels serve every codec and every dtype of the caches, so a rank compiles no more than
those. The ladder:
    v0  NumPy on gathered blocks (codecs.py), the oracle of the tests
    v1  one page of one head at a time: widened into scratch that stays in the nearest cache, encoded from there
        into scratch, and moved on: memory is read once and written once
    v2  all threads, planes dealt out; decoded pages are written past the caches

Index mapping, T = page_size, in one unit of pages_per_block * T rows (blocks.py draws the rest):

    page i -> scales[i * T : (i + 1) * T, groups]  uint16 bits of bfloat16, at the unit's start
           `- codes [i * T : (i + 1) * T, row bytes]  after all scales of the unit

Every loop over channels vectorises: conversions are arithmetic on bits, no branch and no call. No float rules
are relaxed, so the bytes are those of v0, and NaN and infinity take the way that codecs.py promises.
"""

# Kernels are typed by Numba, from their arguments; annotations would say less.
# mypy: disable-error-code="no-untyped-def, call-arg"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import numpy as np

from kernels_numba.numerics import (
    bits_to_float,
    copy_bytes,
    float_to_bits,
    half_to_float,
    store,
    widen,
)
from kernels_numba.runtime import njit, prange
from kernels_numba.streaming import fence, stream_bytes

FLOAT32, FLOAT16, BFLOAT16_CACHE = 0, 1, 2
KINDS = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16_CACHE}
"""The caches' dtype, as the kernels take it."""

BFLOAT16, INT8, INT4, FP8 = 1, 2, 3, 4
"""Codec.number of each."""

_SIZE, _SIGN, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x80000000), np.uint32(0x7F800000)
_NAN_SCALE, _LEAST_SCALE = np.uint16(0x7FC0), np.uint32(0x0080)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_ROUNDER = np.float32(12582912.0)
"""1.5 * 2**23: a float32 of that size has no fraction, so adding it rounds to the nearest even integer, which
then stands in the low bits of the sum."""
_FINEST = np.float32(16384.0)
"""2**14: the last bit of a float32 of that size is worth 2**-9, the least positive number of e4m3."""


@njit(cache=True, nogil=True)
def _scale_bits(size, steps):
    """The scale's bfloat16 bits, from the bits of the largest |x|: size / steps, rounded up."""
    if size >= _INFINITY:
        return _NAN_SCALE
    bits = float_to_bits(bits_to_float(size) / steps)
    return np.uint16(max((bits + np.uint32(0xFFFF)) >> np.uint32(16), _LEAST_SCALE))


@njit(cache=True, nogil=True)
def _clamped(x, factor, lowest, highest):
    """x * factor within lowest..highest; 0 for NaN."""
    scaled = x * factor
    scaled = scaled if scaled == scaled else _ZERO
    scaled = scaled if scaled > lowest else lowest
    return scaled if scaled < highest else highest


@njit(cache=True, nogil=True)
def _rounded(x):
    """The low bits of x, rounded to the nearest even integer, as uint32; |x| < 2**22."""
    return float_to_bits(x + _ROUNDER)


@njit(cache=True, nogil=True)
def _largest(row):
    """Bits of the largest |x|: sizes of floats order as their bits do, and NaN lies above all."""
    size = np.uint32(0)
    for d in range(row.shape[0]):
        size = max(size, float_to_bits(row[d]) & _SIZE)
    return size


@njit(cache=True, nogil=True)
def _encode_int8(row, scales, codes):
    scales[0] = _scale_bits(_largest(row), np.float32(127))
    factor = _ONE / widen(scales[0])
    for d in range(row.shape[0]):
        codes[d] = np.uint8(_rounded(_clamped(row[d], factor, np.float32(-127), np.float32(127))))


@njit(cache=True, nogil=True)
def _encode_int4(row, scales, codes):
    half, length = row.shape[0] // 2, row.shape[0] // scales.shape[0]
    for g in range(scales.shape[0]):
        group = row[g * length : (g + 1) * length]
        above, below = np.uint32(0), np.uint32(0)
        for d in range(length):
            bits = float_to_bits(group[d])
            above = max(above, bits if bits < _SIGN else np.uint32(0))
            below = max(below, bits)
        below = below & _SIZE if below >= _SIGN else np.uint32(0)
        scales[g] = _scale_bits(max(above, below), np.float32(8))
        if above > below and scales[g] != _NAN_SCALE:
            scales[g] |= np.uint16(0x8000)
        factor = _ONE / widen(scales[g])
        for d in range(length):  # the scaled row takes the row's place
            group[d] = _clamped(group[d], factor, np.float32(-8), np.float32(7)) + np.float32(8)
    for d in range(half):
        low, high = _rounded(row[d]) & np.uint32(15), _rounded(row[half + d]) & np.uint32(15)
        codes[d] = np.uint8(low | high << np.uint32(4))


@njit(cache=True, nogil=True)
def _encode_fp8(row, scales, codes):
    scales[0] = _scale_bits(_largest(row), np.float32(448))
    factor = _ONE / widen(scales[0])
    for d in range(row.shape[0]):
        bits = float_to_bits(_clamped(row[d], factor, np.float32(-448), np.float32(448)))
        sign, size = (bits & _SIGN) >> np.uint32(24), bits & _SIZE
        odd = size >> np.uint32(20) & np.uint32(1)
        normal = ((size + np.uint32(0x7FFFF) + odd) >> np.uint32(20)) - np.uint32((127 - 7) << 3)
        tiny = float_to_bits(bits_to_float(size) + _FINEST) - float_to_bits(_FINEST)
        codes[d] = np.uint8(sign | (normal if size >= np.uint32((127 - 6) << 23) else tiny))


@njit(cache=True, nogil=True)
def _decode_int8(row, scales, codes):
    scale = widen(scales[0])
    for d in range(row.shape[0]):
        row[d] = np.float32(np.int8(codes[d])) * scale


@njit(cache=True, nogil=True)
def _decode_int4(row, scales, codes):
    half, length = row.shape[0] // 2, row.shape[0] // scales.shape[0]
    for d in range(half):
        row[d] = np.float32(np.int32(codes[d] & np.uint8(15)) - np.int32(8))
        row[half + d] = np.float32(np.int32(codes[d] >> np.uint8(4)) - np.int32(8))
    for g in range(scales.shape[0]):
        group, scale = row[g * length : (g + 1) * length], widen(scales[g])
        for d in range(length):
            group[d] *= scale


@njit(cache=True, nogil=True)
def _decode_fp8(row, scales, codes):
    """A code's bits, moved up, are those of a float16 2**8 times smaller, subnormal ones included."""
    scale = widen(scales[0])
    for d in range(row.shape[0]):
        size, sign = np.uint16(codes[d] & np.uint8(0x7F)), np.uint16(codes[d] & np.uint8(0x80))
        value = half_to_float(np.int16(size << np.uint16(7) | sign << np.uint16(8))) * np.float32(256)
        row[d] = (value if size != np.uint16(0x7F) else bits_to_float(np.uint32(0x7FC00000))) * scale


@njit(cache=True, nogil=True)
def _read_page(source, kind, row_count, rows, halves):
    """Widens one page of one head, from address `source`, into rows[:row_count]."""
    count = row_count * rows.shape[1]
    flat = rows.reshape(-1)
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


@njit(cache=True, nogil=True)
def _write_page(target, kind, row_count, rows, halves, streamed):
    """Narrows rows[:row_count] into one page of one head, at address `target`."""
    count = row_count * rows.shape[1]
    flat = rows.reshape(-1)
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


@njit(cache=True, nogil=True)
def _encode_page(codec, row_count, rows, scales, codes):
    """rows -> scales, codes; rows is overwritten."""
    for t in range(row_count):
        if codec == INT8:
            _encode_int8(rows[t], scales[t], codes[t])
        elif codec == INT4:
            _encode_int4(rows[t], scales[t], codes[t])
        elif codec == FP8:
            _encode_fp8(rows[t], scales[t], codes[t])
        else:
            bits = codes[t].view(np.uint16)
            for d in range(rows.shape[1]):
                store(bits, d, rows[t, d])


@njit(cache=True, nogil=True)
def _decode_page(codec, row_count, rows, scales, codes):
    """scales, codes -> rows."""
    for t in range(row_count):
        if codec == INT8:
            _decode_int8(rows[t], scales[t], codes[t])
        elif codec == INT4:
            _decode_int4(rows[t], scales[t], codes[t])
        elif codec == FP8:
            _decode_fp8(rows[t], scales[t], codes[t])
        else:
            bits = codes[t].view(np.uint16)
            for d in range(rows.shape[1]):
                rows[t, d] = widen(bits[d])


@njit(cache=True, nogil=True)
def _code_bytes(codec, head_dim):
    """Bytes of a row's codes."""
    if codec == BFLOAT16:
        return 2 * head_dim
    return head_dim // 2 if codec == INT4 else head_dim


@njit(cache=True, nogil=True)
def _recode_plane(item, caches, blocks, page_ids, strides, part, shape, to_pages, streamed):
    """One block's keys or values of one layer, in the one or the other direction: a page at a time."""
    first_layer, layer_count, first_head, heads = part
    kind, codec, page_size, head_dim, groups = shape
    b, plane = item // (layer_count * 2), item % (layer_count * 2)
    pages = page_ids[b]
    rows = np.empty((page_size, head_dim), np.float32)
    halves = np.empty(page_size * head_dim, np.uint16)
    scales = np.empty((page_size, groups), np.uint16)
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
                    _decode_page(codec, page_size, rows, scales, codes)
                    _write_page(page, kind, page_size, rows, halves, streamed)
                else:
                    _read_page(page, kind, page_size, rows, halves)
                    _encode_page(codec, page_size, rows, scales, codes)
                    copy_bytes(own_scales, scales.ctypes.data, scale_run)
                    copy_bytes(own_codes, codes.ctypes.data, code_run)
        unit += pages.shape[0] * (scale_run + code_run)
    if streamed:
        fence()


@njit(cache=True, nogil=True)
def recode_v1(caches, blocks, page_ids, strides, part, shape, to_pages, streamed):
    """By the calling thread alone. Arguments as blocks._move_block_runs_v1 has them, and
    shape = (kind, codec, page_size, head_dim, scales of a row)."""
    for item in range(page_ids.shape[0] * part[1] * 2):
        _recode_plane(item, caches, blocks, page_ids, strides, part, shape, to_pages, streamed)


@njit(cache=True, nogil=True, parallel=True)
def recode_v2(caches, blocks, page_ids, strides, part, shape, to_pages):
    """The same by all threads."""
    for item in prange(page_ids.shape[0] * part[1] * 2):
        _recode_plane(item, caches, blocks, page_ids, strides, part, shape, to_pages, True)
