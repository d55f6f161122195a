"""One sealed segment file of the SSD tier: an HDF5 file of blocks, after a header of our own.

Used by all of the tier. Knows one file; neither the folder's lock, nor capacity, nor threads. Any HDF5 1.8
tool can read it. We read it without libhdf5, because a flipped bit may have hit its structures: our header
and hashes say where everything lies. Written by `store.ssd.segment_writer`, drawn in
docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from store.errors import BadBlock, LayoutError, SegmentFileError
from store.layout import PLAIN, BlockLayout
from store.ssd.segment_frame import USER_BLOCK_NBYTES

MAGIC = b"MCLTIER\n"
FORMAT_VERSION = 2  # 1 had no codec
PLAIN_NUMBER = 0  # of store.layout.PLAIN; kernels_numba/codecs.py has the same
HEADER_NBYTES = USER_BLOCK_NBYTES
TABLES = ("offsets", "keys", "digests", "checksums")  # as the header has their places
MAX_FILE_NBYTES = 1 << 40
"""A header with more bytes than this is damaged: a file has SEGMENT_NBYTES (`store.ssd.tier`), or one
block."""

MAX_FINGERPRINT_NBYTES = 64
READ_NBYTES = 1 << 20
"""Layers are read about this much at a time and summed while still in cache: 5.7 GB/s against 5.0 for
whole blocks of 3 MB and 4.7 layer by layer (96 KiB), on the machine of docs/reference/hdf5-tier.md."""

_HEADER = struct.Struct("<8sIIQQQ4Q6II64s")
_HASHES = struct.Struct("<QQ")  # metadata, header: the last 16 bytes of the header


@dataclass(frozen=True, slots=True)
class Header:
    """The first 4096 bytes of a file: sizes, absolute offsets of the four tables, the model's identity."""

    file_nbytes: int
    blocks: int
    tables: tuple[int, int, int, int]  # of TABLES
    layout: BlockLayout
    fingerprint: bytes
    metadata_hash: int

    def pack(self) -> bytes:
        """Return the bytes of the header, with its own hash last."""
        lay = self.layout
        codec = _codec_number(lay.codec)
        sizes = (lay.layers, lay.kv_heads, lay.block_tokens, lay.head_dim, lay.itemsize, codec)
        block = (self.file_nbytes, self.blocks, lay.nbytes)
        start = (MAGIC, FORMAT_VERSION, HEADER_NBYTES)
        body = _HEADER.pack(*start, *block, *self.tables, *sizes, len(self.fingerprint), self.fingerprint)
        body = body.ljust(HEADER_NBYTES - _HASHES.size, b"\0") + struct.pack("<Q", self.metadata_hash)
        return body + struct.pack("<Q", xxh3_64_intdigest(body))


@dataclass(slots=True, eq=False)
class SealedFile:
    """A sealed file, verified, with its tables in memory.

        keys, digests, offsets   (blocks,) u64      offsets: where block i starts in the file
        checksums                (blocks, layers) u64
        same_kind                False: of another model or layout; kept, not served
        live                     rows that the index points to; kept by `store.ssd.sealed_set`

    fd is opened on demand; `readers` > 0 while a thread reads; a deleted file is closed by its last reader.
    """

    path: Path
    number: int
    header: Header
    keys: np.ndarray
    digests: np.ndarray
    offsets: np.ndarray
    checksums: np.ndarray
    same_kind: bool = True
    live: int = 0
    last_use: int = 0
    fd: int = -1
    readers: int = 0
    deleted: bool = field(default=False)

    def read_block(self, row: int, out: memoryview) -> list[int]:
        """Read block `row` into out (block's nbytes) and verify it; return its checksums per layer.

        Raises BadBlock when the bytes are not those that were written. Needs an open fd.
        """
        layer = self.header.layout.layer_nbytes
        step = max(READ_NBYTES // layer, 1) * layer
        at, wanted = int(self.offsets[row]), self.checksums[row].tolist()
        sums: list[int] = []
        for start in range(0, len(out), step):
            part = out[start : start + step]
            try:
                read_fully(self.fd, part, at + start, self.path)
            except (OSError, SegmentFileError) as error:
                raise BadBlock(int(self.keys[row]), self.path, str(error)) from None
            sums += [xxh3_64_intdigest(part[i : i + layer]) for i in range(0, len(part), layer)]
        if sums != wanted:
            bad = next(i for i, (got, right) in enumerate(zip(sums, wanted)) if got != right)
            raise BadBlock(int(self.keys[row]), self.path, f"checksum of layer {bad} differs")
        return sums


def open_sealed(
    path: Path, number: int, layout: BlockLayout | None = None, fingerprint: bytes = b""
) -> SealedFile:
    """Verify a sealed file, without libhdf5, and read its tables.

    layout, fingerprint   decide same_kind; without a layout it is True for every file

    Nothing is used before it was checked. The header has a hash of its own. Its metadata_hash is that of all
    gaps between blocks, in order: of every byte after the header that belongs to no block. The offsets of
    the blocks tell where gaps lie, and lie in a gap themselves, so they must be possible (`_check_offsets`)
    before a gap is read. Blocks are not read here: `read_block` compares their bytes with their checksums.
    The file is closed again, also when it is refused.

    Raises SegmentFileError (truncated, corrupt, foreign, another format version), OSError.
    """
    # labs:begin 3e
    with _Source(path) as source:
        header = source.header()
        offsets = source.table(header, "offsets")
        _check_offsets(offsets, header, path)
        if source.hash_of(_gaps(offsets, header)) != header.metadata_hash:
            raise SegmentFileError(path, "metadata is corrupt: its hash differs")
        others = [source.table(header, name) for name in ("keys", "digests", "checksums")]
    same = layout is None or (header.layout == layout and header.fingerprint == fingerprint)
    keys, digests, checksums = others
    return SealedFile(path, number, header, keys, digests, offsets, checksums, same_kind=same)
    # labs:end 3e


class _Source:
    """A file that is being verified. Use it in a `with` statement: at its end the file is closed."""

    def __init__(self, path: Path) -> None:
        """Open a file; follow no link, and do not wait for a pipe, which must not stop the start."""
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def header(self) -> Header:
        """Read and check the header. Raises SegmentFileError if it is damaged, or of another file size."""
        path, raw = self._path, os.pread(self._fd, HEADER_NBYTES, 0)
        size = os.fstat(self._fd).st_size
        if len(raw) < HEADER_NBYTES:
            raise SegmentFileError(path, f"truncated: {size} B")
        magic, version, header_nbytes, nbytes, blocks, block_nbytes, *rest = _HEADER.unpack_from(raw)
        tables, sizes, length, fingerprint = tuple(rest[:4]), rest[4:10], rest[10], rest[11]
        if magic != MAGIC:
            raise SegmentFileError(path, "not a segment file of mooncake-lite")
        metadata_hash, header_hash = _HASHES.unpack_from(raw, HEADER_NBYTES - _HASHES.size)
        if xxh3_64_intdigest(raw[:-8]) != header_hash:
            raise SegmentFileError(path, "header is corrupt: its hash differs")
        if version != FORMAT_VERSION or header_nbytes != HEADER_NBYTES:
            raise SegmentFileError(path, f"format version {version}; this program reads {FORMAT_VERSION}")
        if nbytes != size:
            raise SegmentFileError(path, f"truncated or grown: {size} B, not {nbytes} B")
        try:
            layers, kv_heads, block_tokens, head_dim, itemsize, codec = sizes
            layout = BlockLayout(layers, kv_heads, block_tokens, head_dim, itemsize, _codec_name(codec))
        except LayoutError as error:
            raise SegmentFileError(path, f"impossible layout: {error}") from None
        row = layout.nbytes + 8 * (3 + layout.layers)
        if not (layout.nbytes == block_nbytes and 0 < blocks <= nbytes // row and nbytes <= MAX_FILE_NBYTES):
            raise SegmentFileError(
                path, f"impossible sizes: {blocks} blocks of {block_nbytes} B in {nbytes} B"
            )
        return Header(nbytes, blocks, tables, layout, fingerprint[:length], metadata_hash)

    def table(self, header: Header, name: str) -> np.ndarray:
        """Read a table of TABLES; return a u64 array of shape (blocks,), or (blocks, layers) of checksums.

        Raises SegmentFileError if the table does not lie in the file, OSError.
        """
        columns = (header.layout.layers,) if name == "checksums" else ()
        table, at = np.empty((header.blocks, *columns), "<u8"), header.tables[TABLES.index(name)]
        if not HEADER_NBYTES <= at <= header.file_nbytes - table.nbytes:
            raise SegmentFileError(self._path, f"the table of {name} at {at} lies outside the file")
        read_fully(self._fd, table.data.cast("B"), at, self._path)
        return table

    def hash_of(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Return XXH3-64 over these (start, end) of the file, in order. Raises SegmentFileError, OSError."""
        state, buffer = xxh3_64(), memoryview(bytearray(READ_NBYTES))
        for start, end in ranges:
            for at in range(start, end, READ_NBYTES):
                part = buffer[: min(READ_NBYTES, end - at)]
                read_fully(self._fd, part, at, self._path)
                state.update(part)
        return state.intdigest()


def _codec_number(name: str) -> int:
    """Return the number that stands for a codec in the header."""
    if name == PLAIN:
        return PLAIN_NUMBER
    from kernels_numba.codecs import CODECS

    return CODECS[name].number


def _codec_name(number: int) -> str:
    """Return the codec of a number in the header. Raises LayoutError for an unknown number."""
    if number == PLAIN_NUMBER:
        return PLAIN
    from kernels_numba.codecs import CODECS

    for codec in CODECS.values():
        if codec.number == number:
            return codec.name
    raise LayoutError(f"codec {number} is unknown")


def _check_offsets(offsets: np.ndarray, header: Header, path: Path) -> None:
    """Raise SegmentFileError unless the blocks at these offsets lie in the file, and apart."""
    nbytes = header.layout.nbytes
    order = np.sort(offsets)
    apart = bool(np.all(np.diff(order) >= nbytes))  # u64: no wrap, the array is sorted
    if not (apart and order[0] >= HEADER_NBYTES and int(order[-1]) <= header.file_nbytes - nbytes):
        raise SegmentFileError(path, "blocks overlap or lie outside the file")


def _gaps(offsets: np.ndarray, header: Header) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each run of bytes after the header that belongs to no block.

    These are HDF5's structures, the tables and padding. The offsets must have been checked.
    """
    position = HEADER_NBYTES
    for offset in np.sort(offsets).tolist():
        if offset > position:
            yield position, offset
        position = offset + header.layout.nbytes
    if header.file_nbytes > position:
        yield position, header.file_nbytes


def read_fully(fd: int, out: memoryview, at: int, path: Path) -> None:
    """Fill `out` from this offset of a file. Raises SegmentFileError if the file ends before, OSError."""
    done = 0
    while done < len(out):
        got = os.preadv(fd, [out[done:]], at + done)
        if not got:
            raise SegmentFileError(path, f"truncated: ends at {at + done}")
        done += got
