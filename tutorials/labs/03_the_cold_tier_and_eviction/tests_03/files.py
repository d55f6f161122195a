"""Sealed segment files as docs/reference/hdf5-tier.md draws them, written here byte by byte."""

from __future__ import annotations

import base64
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_64_intdigest

HEADER = 4096
"""Bytes of the header."""

TABLES = ("offsets", "keys", "digests", "checksums")


def u64s(numbers: Sequence[int]) -> bytes:
    """Numbers as a table has them."""
    return struct.pack(f"<{len(numbers)}Q", *numbers)


@dataclass
class Made:
    """A file, and what one must find in it.

    layout       (layers, kv_heads, block_tokens, head_dim, itemsize)
    at           absolute offset of each table, by name
    gaps         (begin, end) of each run of bytes after the header that belongs to no block
    """

    layout: tuple[int, ...]
    fingerprint: bytes
    keys: list[int]
    digests: list[int]
    checksums: list[list[int]]
    offsets: list[int] = field(default_factory=list)
    at: dict[str, int] = field(default_factory=dict)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)

    @property
    def layer_nbytes(self) -> int:
        _, heads, tokens, dim, itemsize = self.layout
        return 2 * heads * tokens * dim * itemsize

    @property
    def block_nbytes(self) -> int:
        return self.layout[0] * self.layer_nbytes

    def place(self, name: str) -> None:
        """Append a table whose numbers are known, or the place of one."""
        self.at[name] = len(self.data)
        self.data += bytes(8 * len(self.keys) * (self.layout[0] if name == "checksums" else 1))

    def fill(self, offsets: Sequence[int] | None = None) -> None:
        """Write the tables to their places. offsets: others than those of the blocks."""
        sums = [one for of_block in self.checksums for one in of_block]
        tables = (offsets or self.offsets, self.keys, self.digests, sums)
        for name, numbers in zip(TABLES, tables):
            self.data[self.at[name] : self.at[name] + 8 * len(numbers)] = u64s(numbers)

    def seal(self, **other: Any) -> None:
        """Write the header, with hashes that are right. other: fields that say something else."""
        blocks = other.get("blocks_at", self.offsets)
        self.gaps = gaps_between(blocks, self.block_nbytes, len(self.data))
        metadata = b"".join(bytes(self.data[begin:end]) for begin, end in self.gaps)
        where = [other.get(f"{name}_at", self.at[name]) for name in TABLES]
        head = struct.pack(
            "<8sIIQQQ4Q6II64s",
            other.get("magic", b"MCLTIER\n"),
            other.get("version", 2),
            HEADER,
            other.get("file_nbytes", len(self.data)),
            other.get("blocks", len(self.keys)),
            other.get("block_nbytes", self.block_nbytes),
            *where,
            *self.layout,
            0,
            len(self.fingerprint),
            self.fingerprint,
        )
        head = head.ljust(HEADER - 16, b"\0") + struct.pack("<Q", xxh3_64_intdigest(metadata))
        self.data[:HEADER] = head + struct.pack("<Q", xxh3_64_intdigest(head))

    def asked(self, *edits: Sequence[Any], kind: str = "file", reads: bool = False) -> dict[str, Any]:
        """The file with damage, as drive.py takes it."""
        file = base64.b64encode(bytes(self.data)).decode()
        asked = {"file": file, "edits": edits, "kind": kind, "layout": None, "fingerprint": ""}
        return asked | {"reads": reads}


def gaps_between(offsets: Sequence[int], block_nbytes: int, end: int) -> list[tuple[int, int]]:
    """The bytes after the header that belong to no block."""
    found, begin = [], HEADER
    for offset in sorted(offsets):
        if offset > begin:
            found.append((begin, offset))
        begin = offset + block_nbytes
    return [*found, (begin, end)] if end > begin else found


def blocks_of(draw: random.Random, layout: tuple[int, ...], blocks: int) -> tuple[Made, list[bytes]]:
    """A file that is still empty, and the bytes of its blocks."""
    made = Made(
        layout,
        draw.randbytes(16),
        [draw.getrandbits(64) for _ in range(blocks)],
        [draw.getrandbits(64) for _ in range(blocks)],
        [],
    )
    contents = [draw.randbytes(made.block_nbytes) for _ in range(blocks)]
    step = made.layer_nbytes
    made.checksums = [
        [xxh3_64_intdigest(block[begin : begin + step]) for begin in range(0, len(block), step)]
        for block in contents
    ]
    return made, contents


def plain_file(draw: random.Random, layout: tuple[int, ...], blocks: int) -> Made:
    """A file as the tier writes it: the header, a page of HDF5, the blocks in order, the tables."""
    made, contents = blocks_of(draw, layout, blocks)
    made.data += bytes(HEADER) + draw.randbytes(4096)
    for block in contents:
        made.offsets.append(len(made.data))
        made.data += block
    for name in TABLES:
        made.place(name)
    made.fill()
    made.seal()
    return made


def mixed_file(draw: random.Random, layout: tuple[int, ...], blocks: int) -> Made:
    """A file whose blocks and tables lie anywhere, in any order, with other bytes between some of them."""
    made, contents = blocks_of(draw, layout, blocks)
    made.data += bytes(HEADER)
    made.offsets = [0] * blocks
    parts: list[int | str] = [*range(blocks), *TABLES]
    draw.shuffle(parts)
    for part in parts:
        made.data += bytes(8 * draw.randint(0, 3))
        if isinstance(part, str):
            made.place(part)
        else:
            made.offsets[part] = len(made.data)
            made.data += contents[part]
    made.fill()
    made.seal()
    return made
