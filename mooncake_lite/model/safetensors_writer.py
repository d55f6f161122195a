"""Writes a safetensors file one tensor at a time: a model is converted in the memory of its largest one.

Used by convert.py. Knows arrays and the file format only. Explained in docs/explain/model.md.

    8 bytes    length of the header, little-endian
    header     JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}}, padded with blanks
    data       the tensors, end to end; offsets count from here
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

ALIGNMENT = 64
"""Data starts on a cache line, and so does each tensor whose size is a multiple of one."""


def write_float32(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    tensors: Iterable[np.ndarray],
    written: Callable[[int], None],
) -> None:
    """Write float32 tensors, which must come in the order of `shapes`; `written(bytes)` is told after each.

    Raises OSError when the disk refuses.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors:
            file.write(np.ascontiguousarray(array).data)
            written(array.nbytes)
