"""Where the tensors of a GGUF file lie: its header walked once, the file mapped, nothing unpacked.

Used by weights.py for weights in their published format; the conversion to a folder reads the same file with
`gguf`, which takes seconds because it decodes every token. Knows the layout of the file and no model.
Explained in docs/explain/model.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_lite.errors import ModelError

_FIXED = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value in the metadata, by its type; 8 is a string, 9 an array."""
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32

FORMATS = {0: "F32", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0"}
"""Types of tensors that can be used as they lie; (values, bytes) of a block below."""
_BLOCKS = {"F32": (1, 4), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34)}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. data (rows, bytes of a row) uint8, a read-only view of the mapped file; 1-D: one row."""

    format: str
    shape: tuple[int, ...]
    data: np.ndarray

    def part(self, rows: slice, columns: slice) -> GgufTensor:
        """Return some rows and columns of a matrix; a copy where columns are left out.

        Raises ValueError when that would cut a block.
        """
        (first, end, _), (values, nbytes) = columns.indices(self.shape[1]), _BLOCKS[self.format]
        if first % values or end % values:
            raise ValueError(f"columns {first} to {end} cut a block of {values} values")
        data = np.ascontiguousarray(self.data[rows, first // values * nbytes : end // values * nbytes])
        return GgufTensor(self.format, (len(data), end - first), data)


def gguf_tensors(path: Path) -> dict[str, GgufTensor]:
    """All tensors of the file by name. Raises ModelError for a file that cannot be used."""
    try:
        mapped = np.memmap(path, np.uint8, mode="r")
        return _tensors(mapped)
    except (OSError, ValueError, struct.error, UnicodeDecodeError, KeyError) as error:
        raise ModelError(f"{path} cannot be used as weights: {error}") from None


class _Reader:
    """Walks the header, little-endian."""

    def __init__(self, data: Any):
        self.data = data
        self.at = 0

    def take(self, kind: str) -> int:
        (value,) = struct.unpack_from("<" + kind, self.data, self.at)
        self.at += struct.calcsize("<" + kind)
        return int(value)

    def text(self) -> str:
        length = self.take("Q")
        self.at += length
        return bytes(self.data[self.at - length : self.at]).decode()

    def skip(self, kind: int) -> int | None:
        """Past a value of the metadata; an integer of 4 bytes is returned."""
        if kind == _STRING:
            length = self.take("Q")
            self.at += length
        elif kind == _ARRAY:
            inner, count = self.take("I"), self.take("Q")
            if inner in _FIXED:
                self.at += count * _FIXED[inner]
            elif inner == _STRING:
                self._skip_strings(count)
            else:
                for _ in range(count):
                    self.skip(inner)
        elif kind == 4:
            return self.take("I")
        else:
            self.at += _FIXED[kind]
        return None

    def _skip_strings(self, count: int) -> None:
        """Past so many strings. A vocabulary has tens of thousands, and every start of a rank walks them."""
        at, length = self.at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + length(self.data, at)[0]
        self.at = at


def _tensors(mapped: np.ndarray) -> dict[str, GgufTensor]:
    reader = _Reader(memoryview(mapped))  # type: ignore[arg-type]
    if bytes(mapped[:4]) != b"GGUF":
        raise ValueError("it is not a GGUF file")
    reader.at = 4
    if (version := reader.take("I")) not in (2, 3):
        raise ValueError(f"GGUF version {version} is not supported; supported are 2 and 3")
    tensors, pairs = reader.take("Q"), reader.take("Q")
    alignment = _DEFAULT_ALIGNMENT
    for _ in range(pairs):
        name = reader.text()
        value = reader.skip(reader.take("I"))
        if name == "general.alignment" and value:
            alignment = value
    described = []
    for _ in range(tensors):
        name = reader.text()
        shape = tuple(reader.take("Q") for _ in range(reader.take("I")))[::-1]
        described.append((name, shape, reader.take("I"), reader.take("Q")))
    start = -(-reader.at // alignment) * alignment
    return {name: _view(mapped, name, shape, kind, start + at) for name, shape, kind, at in described}


def _view(mapped: np.ndarray, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
    if kind not in FORMATS:
        raise ValueError(f"{name} is stored as type {kind}; supported are {', '.join(FORMATS.values())}")
    values, block_bytes = _BLOCKS[FORMATS[kind]]
    rows = int(np.prod(shape[:-1]))
    row_bytes = shape[-1] // values * block_bytes
    if shape[-1] % values or start + rows * row_bytes > len(mapped):
        raise ValueError(f"{name} is damaged: {rows} rows of {shape[-1]} values do not fit")
    data = mapped[start : start + rows * row_bytes].reshape(rows, row_bytes)
    return GgufTensor(FORMATS[kind], shape, np.asarray(data))
