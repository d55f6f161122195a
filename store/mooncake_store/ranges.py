"""get_into_ranges: many byte ranges of many objects into many registered buffers, in one call.

Used by `api`. A wrong range fails alone, with a code in its place. Explained in docs/explain/leases.md.
"""

from __future__ import annotations

from typing import Any

from store.mooncake_store.arguments import checked_names, checked_numbers, is_usable
from store.mooncake_store.buffers import Buffers
from store.mooncake_store.client import Client
from store.mooncake_store.codes import BAD_PARAMETERS, NOT_FOUND, CodeError


def get_into_ranges(
    client: Client | None,
    buffers: Buffers,
    ptrs: Any,
    all_keys: Any,
    all_to: Any,
    all_from: Any,
    all_sizes: Any,
) -> list[list[list[int]]]:
    """Copy ranges: for buffer b, key k and range r, all_sizes[b][k][r] bytes from offset all_from[b][k][r]
    of the object to offset all_to[b][k][r] of the buffer. Returns bytes read or codes in that shape.

    A buffer, key or range list of another length than its siblings gets -600 throughout, in the shape of
    all_sizes, with one place for each missing size. Raises TypeError.
    """
    addresses = checked_numbers("buffer_ptrs", ptrs)
    keys = [checked_names(names) for names in all_keys]
    nested = [_numbers(values) for values in (all_to, all_from, all_sizes)]
    to, source, sizes = nested
    if client is None or not len(addresses) == len(keys) == len(to) == len(source) == len(sizes):
        shapes = [*sizes, *[[[0]]] * (len(addresses) - len(sizes))]
        return [[[BAD_PARAMETERS] * len(ranges) for ranges in of_buffer] for of_buffer in shapes]
    result: list[list[list[int]]] = []
    for at, ptr in enumerate(addresses):
        columns = (keys[at], to[at], source[at], sizes[at])
        if len({len(column) for column in columns}) != 1:
            shape = [len(sizes[at][k]) if k < len(sizes[at]) else 1 for k in range(len(keys[at]))]
            result.append([[BAD_PARAMETERS] * max(count, 1) for count in shape])
            continue
        room = buffers.room(ptr)
        result.append([_ranges(client, ptr, room, *of_key) for of_key in zip(*columns)])
    return result


def _numbers(values: Any) -> list[list[list[int]]]:
    return [[checked_numbers("offsets and sizes", one) for one in of_buffer] for of_buffer in values]


def _ranges(
    client: Client, ptr: int, room: int, name: str, to: list[int], source: list[int], sizes: list[int]
) -> list[int]:
    """Copy the ranges of one object into one buffer of `room` bytes."""
    if not len(to) == len(source) == len(sizes):
        return [BAD_PARAMETERS] * max(len(sizes), 1)

    def take(segment: Any, offset: int, nbytes: int) -> list[int]:
        counts, wanted = [], []
        for at, start, size in zip(to, source, sizes):
            fits = start + size <= nbytes and at + size <= room
            counts.append(size if fits else BAD_PARAMETERS)
            if fits and size:
                wanted.append((offset + start, size, ptr + at))
        segment.read_into(wanted)
        return counts

    try:
        counts = client.reader.read(name, take) if is_usable(name) else None
    except CodeError as error:
        return [error.code] * len(sizes)
    return [NOT_FOUND] * len(sizes) if counts is None else counts
