"""Encoding and decoding KV on CUDA while it moves: the CUDA form of codec_kernels.py, to the same bytes.

Launched by blocks.gather_blocks and scatter_blocks, which check; codecs.py holds the layouts and the rules.
    v1  a thread for each row (one token of one head). Any head_dim, any alignment
    v2  a few neighbouring lanes for a row, 16 channels each: 8 of its first half and 8 of its second, as int4
        stores them. Caches are read and written by 16 bytes, codes by 8 (bfloat16: 16); lanes find a scale in
        a butterfly. One kernel for each codec, element type, head_dim and direction, compiled when needed
Sums and products round one by one (backend_cuda.times, plus), as on the CPU: fused, they give other bytes.

    row of the encoded blocks, in their order -> (block, plane, head, page of the table, row of the page)
    v2: lane k of a row -> channels 8 k .. 8 k + 7 and head_dim / 2 + 8 k .. head_dim / 2 + 8 k + 7
"""

# mypy: disable-error-code="no-untyped-def, assignment, arg-type"
# ruff: noqa: ANN201, ANN202

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from kernels_numba.arrays import dtype_name, strides_of
from kernels_numba.codecs import Codec
from kernels_numba.gpu.backend_cuda import (
    UNPACK,
    addresses,
    aligned,
    as_bits,
    as_float,
    broadcast,
    compiled,
    cuda,
    divide,
    load8,
    load16,
    load_int32,
    load_uint16,
    narrow,
    on_device,
    on_its_device,
    pack_bfloat16,
    pack_float16,
    plus,
    quotient,
    store8,
    store16,
    store_uint16,
    times,
    widen,
)
from kernels_numba.movers.codec_kernels import (
    BFLOAT16,
    CODE_BIAS,
    FINEST,
    FINEST_BITS,
    FP8,
    HALF_A_CODE,
    INFINITY,
    INT4,
    INT8,
    LEAST_NORMAL,
    LEAST_SCALE,
    NAN_SCALE,
    ROUNDER,
    ROUNDER_TO_8,
    SIGN,
    SIZE,
)

THREADS = 64
CHUNK = 16
"""Bytes of one access to the caches."""
LANES = 8
"""Channels of a lane in each half of a row."""
STEPS = {BFLOAT16: np.float32(1), INT8: np.float32(127), INT4: np.float32(8), FP8: np.float32(448)}
"""The largest code of each codec."""
ZERO, ONE, EIGHT = np.float32(0.0), np.float32(1.0), np.float32(8.0)
FP8_UNIT, NAN = np.float32(2.0**120), np.float32(np.nan)
"""FP8_UNIT: moves e4m3's exponent, set into a float32's, to where it belongs; exact, subnormal codes too."""
FP8_NAN, BFLOAT16_NAN, HALF_BFLOAT16 = np.uint32(0x7F), np.uint32(0x7FC0), np.uint32(0x7FFF)


def recode_v1(caches, page_ids, blocks, first_layer, first_head, codec, groups, steps, to_pages):
    """Thread: one row of the encoded blocks. groups: scales of a row; steps: the largest code."""
    row = cuda.grid(1)
    layers, heads, pages = blocks.shape[1], blocks.shape[3], page_ids.shape[1]
    page_size, head_dim = caches.shape[4], caches.shape[5]
    if row >= blocks.shape[0] * layers * 2 * heads * pages * page_size:
        return
    unit, token = row // (pages * page_size), row % (pages * page_size)
    head, kv = unit % heads, unit // heads % 2
    layer, b = unit // (2 * heads) % layers, unit // (2 * heads * layers)
    page, s = page_ids[b, token // page_size], token % page_size
    if page < 0:
        return
    l_at, h_at, half = first_layer + layer, first_head + head, head_dim // 2
    if codec == BFLOAT16:
        for d in range(head_dim):
            at = (token * head_dim + d) * 2
            if to_pages:
                low = np.uint32(blocks[b, layer, kv, head, at])
                bits = np.uint32(low | np.uint32(blocks[b, layer, kv, head, at + 1]) << np.uint32(8))
                caches[l_at, kv, page, h_at, s, d] = narrow(
                    as_float(np.uint32(bits << np.uint32(16))), caches
                )
            else:
                value = widen(caches[l_at, kv, page, h_at, s, d])
                bits = as_bits(value)
                odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
                bits = np.uint32(np.uint32(bits + np.uint32(HALF_BFLOAT16 + odd)) >> np.uint32(16))
                bits = bits if value == value else BFLOAT16_NAN
                blocks[b, layer, kv, head, at] = np.uint8(bits & np.uint32(255))
                blocks[b, layer, kv, head, at + 1] = np.uint8(bits >> np.uint32(8))
        return
    length = head_dim // groups
    codes = pages * page_size * groups * 2 + token * (half if codec == INT4 else head_dim)
    for g in range(groups):
        at = (token * groups + g) * 2
        if to_pages:
            low = np.uint32(blocks[b, layer, kv, head, at])
            bits = np.uint32(low | np.uint32(blocks[b, layer, kv, head, at + 1]) << np.uint32(8))
            scale = as_float(np.uint32(bits << np.uint32(16)))
            for d in range(g * length, (g + 1) * length):
                if codec == INT4:
                    pair = np.uint32(blocks[b, layer, kv, head, codes + d % half])
                    code = np.int32(np.uint32(pair >> np.uint32(0 if d < half else 4)) & np.uint32(15))
                    value = np.float32(np.int32(code - 8))
                else:
                    byte = np.uint32(blocks[b, layer, kv, head, codes + d])
                    sign = np.uint32(byte & np.uint32(128))
                    if codec == INT8:
                        value = np.float32(np.int32(np.int32(byte) - np.int32(sign) * 2))
                    else:
                        size = np.uint32(byte & FP8_NAN)
                        bits = np.uint32(np.uint32(size << np.uint32(20)) | np.uint32(sign << np.uint32(24)))
                        value = times(as_float(bits), FP8_UNIT) if size != FP8_NAN else NAN
                caches[l_at, kv, page, h_at, s, d] = narrow(times(value, scale), caches)
        else:
            above, below = np.uint32(0), np.uint32(0)
            for d in range(g * length, (g + 1) * length):
                bits = as_bits(widen(caches[l_at, kv, page, h_at, s, d]))
                size = np.uint32(bits & SIZE)
                if bits < SIGN:
                    above = size if size > above else above
                else:
                    below = size if size > below else below
            size = above if above > below else below
            broken, bits, factor = size >= INFINITY, np.uint32(NAN_SCALE), ZERO
            if not broken:
                up = np.uint32(as_bits(quotient(as_float(size), steps)) + np.uint32(0xFFFF))
                bits = np.uint32(up >> np.uint32(16))
                bits = bits if bits > LEAST_SCALE else LEAST_SCALE
                factor = quotient(ONE, as_float(np.uint32(bits << np.uint32(16))))
                if codec == INT4 and above > below:
                    bits, factor = np.uint32(bits | np.uint32(0x8000)), times(factor, -ONE)
            blocks[b, layer, kv, head, at] = np.uint8(bits & np.uint32(255))
            blocks[b, layer, kv, head, at + 1] = np.uint8(bits >> np.uint32(8))
            for d in range(g * length, (g + 1) * length):
                scaled = ZERO
                if not broken:
                    scaled = times(widen(caches[l_at, kv, page, h_at, s, d]), factor)
                if codec == INT4:
                    code = np.uint32(as_bits(plus(scaled, ROUNDER_TO_8)) & np.uint32(31))
                    code = code if code < np.uint32(15) else np.uint32(15)
                    if d < half:
                        blocks[b, layer, kv, head, codes + d] = np.uint8(code)
                    else:
                        code = np.uint32(code << np.uint32(4))
                        code = np.uint32(code | np.uint32(blocks[b, layer, kv, head, codes + d - half]))
                        blocks[b, layer, kv, head, codes + d - half] = np.uint8(code)
                elif codec == INT8:
                    blocks[b, layer, kv, head, codes + d] = np.uint8(
                        as_bits(plus(scaled, ROUNDER)) & np.uint32(255)
                    )
                else:
                    bits = as_bits(scaled)
                    size = np.uint32(bits & SIZE)
                    if size >= LEAST_NORMAL:
                        odd = np.uint32(np.uint32(size >> np.uint32(20)) & np.uint32(1))
                        code = np.uint32(np.uint32(size + np.uint32(HALF_A_CODE + odd)) >> np.uint32(20))
                        code = np.uint32(code - CODE_BIAS)
                    else:
                        code = np.uint32(as_bits(plus(as_float(size), FINEST)) - FINEST_BITS)
                    code = np.uint32(code | np.uint32(np.uint32(bits & SIGN) >> np.uint32(24)))
                    blocks[b, layer, kv, head, codes + d] = np.uint8(code)


def fits_v2(groups: int, head_dim: int) -> bool:
    """Whether lanes can hold a row: no group of int4 may lie in both of its halves, unless it is the row."""
    return head_dim % 16 == 0 and head_dim <= 512 and (groups <= 1 or head_dim % 64 == 0)


@functools.cache
def make_recode_v2(codec: int, element: str, head_dim: int, groups: int, to_pages: bool) -> Any:
    """The kernel of one codec, element type, head_dim and direction; groups: scales of a row."""
    unpack, pack = UNPACK[element], pack_bfloat16 if element == "bfloat16" else pack_float16
    item = 4 if element == "float32" else 2
    per_word, loads = 4 // item, item // 2
    half, pieces = head_dim // 2, head_dim // 16
    lanes = 1 << (pieces - 1).bit_length()
    lane_bits = lanes.bit_length() - 1
    row_bytes = head_dim * item
    plain, signed, wide = codec == BFLOAT16, codec == INT4, element == "float32"
    code_bytes = {BFLOAT16: 2 * head_dim, INT4: half}.get(codec, head_dim)
    joint = groups <= 1
    parts, sharing = (1, lanes) if joint else (2, 4)  # scales of a lane; lanes that share one
    steps = STEPS[codec]
    channels, words_shape = (2, LANES), (2, 4)

    def recode_v2(
        caches,
        blocks,
        page_ids,
        rows,
        rows_per_block,
        heads,
        pages,
        page_size,
        first,
        plane_bytes,
        page_bytes,
        unit_bytes,
        block_bytes,
    ):
        lane = np.int32(cuda.threadIdx.x % 32)
        row = np.int64(cuda.blockIdx.x) * (THREADS // lanes) + (cuda.threadIdx.x >> lane_bits)
        there = row < rows  # lanes without a row repeat the last one: all must come to the butterfly
        row = min(row, rows - 1)
        b = divide(row, rows_per_block)
        rest = row - b * rows_per_block
        run = divide(rest, page_size)
        unit = divide(run, pages)
        plane = divide(unit, heads)
        i, s, head = run - unit * pages, rest - run * page_size, unit - plane * heads
        page = load_int32(page_ids, (b * pages + i) * 4)
        if page < 0:
            there, page = False, np.int32(0)
        own = np.int32(lane & (lanes - 1))
        piece = min(own, np.int32(pieces - 1))
        there = there and own < pieces
        cached = first + plane * plane_bytes + page * page_bytes + (head * page_size + s) * row_bytes
        cached += piece * (LANES * item)
        start, token = b * block_bytes + unit * unit_bytes, i * page_size + s
        scales = start + token * (groups * 2)
        codes = start + pages * page_size * (groups * 2) + token * code_bytes + piece * LANES
        numbers = cuda.local.array(channels, np.float32)
        words = cuda.local.array(words_shape, np.uint32)

        if to_pages:
            if not there:
                return
            if plain:
                for h in range(2):
                    chunk = load16(blocks, codes + piece * LANES + h * (half * 2))
                    for w in range(4):
                        low = np.uint32(chunk[w] << np.uint32(16))
                        numbers[h, 2 * w] = as_float(low)
                        numbers[h, 2 * w + 1] = as_float(np.uint32(chunk[w] & np.uint32(0xFFFF0000)))
            else:
                for h in range(2):
                    g = 0 if joint else (h * half + piece * LANES) >> 5
                    scale = as_float(np.uint32(load_uint16(blocks, scales + g * 2) << np.uint32(16)))
                    pair = load8(blocks, codes + (0 if signed else h * half))
                    for d in range(LANES):
                        byte = np.uint32(pair[d // 4] >> np.uint32(d % 4 * 8))
                        if signed:
                            code = np.int32(np.uint32(byte >> np.uint32(h * 4)) & np.uint32(15))
                            value = np.float32(np.int32(code - np.int32(8)))
                        else:
                            sign = np.uint32(byte & np.uint32(128))
                            size = np.uint32(byte & FP8_NAN)
                            if codec == INT8:
                                value = np.float32(np.int32(np.int32(size) - np.int32(sign)))
                            else:
                                bits = np.uint32(size << np.uint32(20))
                                bits = np.uint32(bits | np.uint32(sign << np.uint32(24)))
                                value = times(as_float(bits), FP8_UNIT) if size != FP8_NAN else NAN
                        numbers[h, d] = times(value, scale)
            for h in range(2):
                for j in range(loads):
                    for w in range(4):
                        if wide:
                            words[h, w] = as_bits(numbers[h, j * 4 + w])
                        else:
                            words[h, w] = pack(numbers[h, 2 * w], numbers[h, 2 * w + 1])
                    chunk = (words[h, 0], words[h, 1], words[h, 2], words[h, 3])
                    store16(caches, cached + h * (half * item) + j * CHUNK, chunk)
            return

        for h in range(2):
            for j in range(loads):
                chunk = load16(caches, cached + h * (half * item) + j * CHUNK)
                for w in range(4):
                    for e in range(per_word):
                        numbers[h, (j * 4 + w) * per_word + e] = unpack(chunk[w])[e]
        if plain:
            for h in range(2):
                for w in range(4):
                    words[h, w] = np.uint32(0)
                    for e in range(2):
                        value = numbers[h, 2 * w + e]
                        bits = as_bits(value)
                        odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
                        bits = np.uint32(np.uint32(bits + np.uint32(HALF_BFLOAT16 + odd)) >> np.uint32(16))
                        bits = bits if value == value else BFLOAT16_NAN
                        words[h, w] = np.uint32(words[h, w] | np.uint32(bits << np.uint32(16 * e)))
                if there:
                    chunk = (words[h, 0], words[h, 1], words[h, 2], words[h, 3])
                    store16(blocks, codes + piece * LANES + h * (half * 2), chunk)
            return

        # sizes of the largest positive and negative numbers, as bits; NaN lies above all
        above, below = cuda.local.array(2, np.uint32), cuda.local.array(2, np.uint32)
        factors, broken = cuda.local.array(2, np.float32), cuda.local.array(2, np.uint32)
        for h in range(2):
            p = 0 if joint else h
            if p == h:
                above[p], below[p] = np.uint32(0), np.uint32(0)
            for d in range(LANES):
                bits = as_bits(numbers[h, d])
                size = np.uint32(bits & SIZE)
                if bits < SIGN:
                    above[p] = size if size > above[p] else above[p]
                else:
                    below[p] = size if size > below[p] else below[p]
        for p in range(parts):
            distance = 1
            while distance < sharing:
                other = broadcast(above[p], lane ^ distance)
                above[p] = other if other > above[p] else above[p]
                other = broadcast(below[p], lane ^ distance)
                below[p] = other if other > below[p] else below[p]
                distance *= 2
            size = above[p] if above[p] > below[p] else below[p]
            bits, factor = np.uint32(NAN_SCALE), ZERO
            broken[p] = np.uint32(1)
            if size < INFINITY:
                broken[p] = np.uint32(0)
                up = np.uint32(as_bits(quotient(as_float(size), steps)) + np.uint32(0xFFFF))
                bits = np.uint32(up >> np.uint32(16))
                bits = bits if bits > LEAST_SCALE else LEAST_SCALE
                factor = quotient(ONE, as_float(np.uint32(bits << np.uint32(16))))
                if signed and above[p] > below[p]:
                    bits, factor = np.uint32(bits | np.uint32(0x8000)), times(factor, -ONE)
            factors[p] = factor
            if there and own & (sharing - 1) == 0:
                g = 0 if joint else (p * half + piece * LANES) >> 5
                store_uint16(blocks, scales + g * 2, bits)
        for w in range(2):
            words[0, w], words[1, w] = np.uint32(0), np.uint32(0)
        for h in range(2):
            p = 0 if joint else h
            for d in range(LANES):
                scaled = ZERO
                if broken[p] == np.uint32(0):
                    scaled = times(numbers[h, d], factors[p])
                if signed:
                    code = np.uint32(as_bits(plus(scaled, ROUNDER_TO_8)) & np.uint32(31))
                    code = code if code < np.uint32(15) else np.uint32(15)
                    code = np.uint32(code << np.uint32(4 * h))
                elif codec == INT8:
                    code = np.uint32(as_bits(plus(scaled, ROUNDER)) & np.uint32(255))
                else:
                    bits = as_bits(scaled)
                    size = np.uint32(bits & SIZE)
                    odd = np.uint32(np.uint32(size >> np.uint32(20)) & np.uint32(1))
                    code = np.uint32(np.uint32(size + np.uint32(HALF_A_CODE + odd)) >> np.uint32(20))
                    code = np.uint32(code - CODE_BIAS)
                    if size < LEAST_NORMAL:
                        code = np.uint32(as_bits(plus(as_float(size), FINEST)) - FINEST_BITS)
                    code = np.uint32(code | np.uint32(np.uint32(bits & SIGN) >> np.uint32(24)))
                to = 0 if signed else h
                words[to, d // 4] = np.uint32(words[to, d // 4] | np.uint32(code << np.uint32(d % 4 * 8)))
        if there:
            store8(blocks, codes, (words[0, 0], words[0, 1]))
            if not signed:
                store8(blocks, codes + half, (words[1, 0], words[1, 1]))

    return recode_v2


@on_its_device
def launch_recode(
    caches: Any, page_ids: Any, blocks: Any, part: tuple[int, int, int, int], codec: Codec, to_pages: bool
) -> None:
    """gather_blocks or scatter_blocks with a codec that changes the bytes, on checked device arrays.

    part: (first layer, layers, first head, heads) of the caches.
    """
    head_dim, page_size, pages = caches.shape[5], caches.shape[4], page_ids.shape[1]
    item, groups = caches.dtype.itemsize, codec.groups(caches.shape[5])
    block_bytes, unit_bytes = strides_of(blocks)[0], blocks.shape[4]
    steps = (block_bytes, unit_bytes, pages * page_size * groups * 2)
    first_layer, layer_count, first_head, head_count = part
    rows_per_block = layer_count * 2 * head_count * pages * page_size
    rows = page_ids.shape[0] * rows_per_block
    fits = fits_v2(groups, head_dim) and rows < 2**31 and not any(n % CHUNK for n in steps)
    if not fits or not aligned(caches, blocks):
        launch_recode_plain(caches, page_ids, blocks, part, codec, to_pages)
        return
    run_bytes = page_size * head_dim * item
    page_bytes = run_bytes * caches.shape[3]
    plane_bytes = page_bytes * caches.shape[2]
    pointers, stream = addresses(caches, blocks, page_ids)
    first = first_layer * 2 * plane_bytes + first_head * run_bytes
    sizes = (rows, rows_per_block, head_count, pages, page_size, first)
    rows_at_once = THREADS // (1 << (head_dim // 16 - 1).bit_length())
    kernel = make_recode_v2(codec.number, dtype_name(caches), head_dim, groups, to_pages)
    compiled(kernel)[-(-rows // rows_at_once), THREADS, stream](
        *pointers, *(np.int64(n) for n in (*sizes, plane_bytes, page_bytes, unit_bytes, block_bytes))
    )


@on_its_device
def launch_recode_plain(
    caches: Any, page_ids: Any, blocks: Any, part: tuple[int, int, int, int], codec: Codec, to_pages: bool
) -> None:
    """v1."""
    views, stream = on_device(caches, page_ids, blocks)
    rows = math.prod(blocks.shape[:4]) * page_ids.shape[1] * caches.shape[4]
    groups = codec.groups(caches.shape[5])
    numbers = (np.int64(n) for n in (part[0], part[2], codec.number, groups))
    compiled(recode_v1)[-(-rows // THREADS), THREADS, stream](*views, *numbers, STEPS[codec.number], to_pages)
