"""One segment file of the SSD tier: an HDF5 file of blocks, behind a header of our own.

Used by `store.tier`. Knows one file; neither the folder's lock, nor capacity, nor threads. Drawn byte by
byte in docs/reference/hdf5-tier.md. Any HDF5 1.8 tool can read a sealed file. We read it without
libhdf5: the header (in HDF5's user block) says where everything lies and carries two hashes, so that a
flipped bit anywhere outside the blocks is noticed at the start, and one inside a block when it is read.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from store.errors import BadBlock, LayoutError, SegmentFileError
from store.layout import BlockLayout

MAGIC = b"MCLTIER\n"
FORMAT_VERSION = 1
HEADER_NBYTES = 4096
"""HDF5's user block: a power of two, and a page, so that chunks can start on pages (preadv of a block is
about a tenth faster then)."""

HDF5_ERRORS = (OSError, RuntimeError, ValueError, KeyError)
"""What h5py makes of libhdf5's errors."""

MAX_FILE_NBYTES = 1 << 40
MAX_FINGERPRINT_NBYTES = 64
READ_NBYTES = 1 << 20
"""Layers are read about this much at a time and summed while still in cache: 5.7 GB/s against 5.0 for
whole blocks of 3 MB and 4.7 layer by layer (96 KiB), on the machine of docs/reference/hdf5-tier.md."""

ALIGN_FROM_NBYTES = 32 << 10  # blocks from this size on start on a page
_SLACK_NBYTES = 64 << 10  # what libhdf5 needs for its own structures, whatever the number of blocks
_HEADER = struct.Struct("<8sIIQQQ4Q5II64s")
_HASHES = struct.Struct("<QQ")  # metadata, header: the last 16 bytes of the header


def file_nbytes(layout: BlockLayout, blocks: int) -> int:
    """Upper bound of a file's size: blocks, padding, tables, and 128 B a block for HDF5's chunk index."""
    block = -(-layout.nbytes // 4096) * 4096 if layout.nbytes >= ALIGN_FROM_NBYTES else layout.nbytes
    return HEADER_NBYTES + _SLACK_NBYTES + blocks * (block + 8 * (3 + layout.layers) + 128)


@dataclass(frozen=True, slots=True)
class Header:
    """What the first 4096 bytes say: sizes, where the four tables lie (absolute offsets), whose blocks."""

    file_nbytes: int
    blocks: int
    tables: tuple[int, int, int, int]  # offsets, keys, digests, checksums
    layout: BlockLayout
    fingerprint: bytes
    metadata_hash: int

    def pack(self) -> bytes:
        """The header's bytes, its own hash last."""
        lay = self.layout
        sizes = (lay.layers, lay.kv_heads, lay.block_tokens, lay.head_dim, lay.itemsize)
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
    last_use: int = 0
    fd: int = -1
    readers: int = 0
    deleted: bool = field(default=False)

    def read_block(self, row: int, out: memoryview) -> list[int]:
        """Read block `row` into out (block's nbytes) and verify it; returns its checksums per layer.

        Raises BadBlock when the bytes are not those that were written. Needs an open fd.
        """
        layer = self.header.layout.layer_nbytes
        step = max(READ_NBYTES // layer, 1) * layer
        at, wanted = int(self.offsets[row]), self.checksums[row].tolist()
        sums: list[int] = []
        for start in range(0, len(out), step):
            part = out[start : start + step]
            try:
                _read_fully(self.fd, part, at + start, self.path)
            except (OSError, SegmentFileError) as error:
                raise BadBlock(int(self.keys[row]), self.path, str(error)) from None
            sums += [xxh3_64_intdigest(part[i : i + layer]) for i in range(0, len(part), layer)]
        if sums != wanted:
            bad = next(i for i, (got, right) in enumerate(zip(sums, wanted)) if got != right)
            raise BadBlock(int(self.keys[row]), self.path, f"checksum of layer {bad} differs")
        return sums


class SegmentWriter:
    """An open segment file, `<path>.open` until seal() renames it to path.

        whole   no write to it has failed: it can be appended to and sealed, else only abandoned

    Not thread-safe.
    """

    def __init__(self, path: Path, layout: BlockLayout, fingerprint: bytes):
        """Raises OSError when the file cannot be made."""
        import h5py

        self.path, self.layout, self.fingerprint = path, layout, fingerprint
        self.open_path = path.with_name(path.name + ".open")
        self.keys: list[int] = []
        self._digests: list[int] = []
        self._checksums: list[Sequence[int]] = []
        self._file: Any = None
        self._fd = os.open(self.open_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        self._reserved = 0
        self.whole = True
        try:
            self._file = h5py.File(
                self.open_path,
                "w",
                libver=("earliest", "v110"),  # so that the h5dump of any distribution reads it
                userblock_size=HEADER_NBYTES,
                alignment_threshold=ALIGN_FROM_NBYTES,
                alignment_interval=4096,
                locking=False,  # the folder is locked
            )
            self._blocks = self._file.create_dataset(
                "blocks", (0, layout.nbytes), "u1", maxshape=(None, layout.nbytes), chunks=(1, layout.nbytes)
            )
        except BaseException:
            self.abandon()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of blocks in it."""
        return len(self.keys) * self.layout.nbytes

    def append(self, key: int, digest: int, checksums: Sequence[int], block: memoryview) -> None:
        """Write one block behind the others.

        Raises OSError with errno ENOSPC, EDQUOT or EFBIG when there is no room; as the room is set aside
        first, what was appended before is whole then, and seal() may follow.
        """
        self._reserve()
        self.whole = False
        row = len(self.keys)
        self._blocks.resize(row + 1, axis=0)
        self._blocks.id.write_direct_chunk((row, 0), block)
        self.keys.append(key)
        self._digests.append(digest)
        self._checksums.append(checksums)
        self.whole = True

    def seal(self, number: int) -> SealedFile:
        """Write the tables, close, write the header, fsync, rename. The folder is the caller's to sync.

        Raises OSError, SegmentFileError; then nothing of the file is durable.
        """
        tables = {
            "keys": np.array(self.keys, "<u8"),
            "digests": np.array(self._digests, "<u8"),
            "checksums": np.array(self._checksums, "<u8").reshape(len(self.keys), self.layout.layers),
        }
        ids = self._blocks.id
        offsets = [ids.get_chunk_info_by_coord((row, 0)).byte_offset for row in range(len(self.keys))]
        tables["offsets"] = np.array(offsets, "<u8")
        at = self._write_tables(tables)
        self._file.flush()
        end = self._file.id.get_filesize()
        self._file.close()
        os.ftruncate(self._fd, min(os.fstat(self._fd).st_size, end))  # gives back what was reserved in vain
        header = self._write_header(at, tables["offsets"])
        keys, digests, checksums = tables["keys"], tables["digests"], tables["checksums"]
        sealed = SealedFile(self.path, number, header, keys, digests, tables["offsets"], checksums)
        self._check_places(sealed, at)
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        self.open_path.rename(self.path)
        return sealed

    def abandon(self) -> None:
        """Delete the file, whatever state it is in, and give its space back."""
        if self._fd >= 0:
            with suppress(OSError):
                os.ftruncate(self._fd, 0)  # libhdf5 may keep the file open after a failure: free its space
            os.close(self._fd)
            self._fd = -1
        if self._file:
            with suppress(*HDF5_ERRORS):  # its last metadata cannot be written: no matter now
                self._file.close()
        self.open_path.unlink(missing_ok=True)

    def _reserve(self) -> None:
        """Have the file system set aside room for one more block, before libhdf5 writes: a full disk is
        then met here and leaves a whole file, while libhdf5 cannot even close a file that met it."""
        nbytes = file_nbytes(self.layout, len(self.keys) + 1) - self._reserved
        try:
            os.posix_fallocate(self._fd, self._reserved, nbytes)
            self._reserved += nbytes
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise

    def _write_tables(self, tables: dict[str, np.ndarray]) -> dict[str, int]:
        """Write tables and attributes; returns the byte offset of each table in the file."""
        layout, root = self.layout, self._file.attrs
        root["format"] = np.bytes_("mooncake-lite tier")
        root["format_version"] = np.uint32(FORMAT_VERSION)
        root["fingerprint"] = np.bytes_(self.fingerprint.hex())
        for name in ("layers", "kv_heads", "block_tokens", "head_dim", "itemsize"):
            root[name] = np.uint32(getattr(layout, name))
        return {
            name: self._file.create_dataset(name, data=table).id.get_offset()
            for name, table in tables.items()
        }

    def _write_header(self, at: dict[str, int], offsets: np.ndarray) -> Header:
        size = os.fstat(self._fd).st_size
        gaps = list(_gaps(offsets, self.layout.nbytes, size))
        header = Header(
            size,
            len(self.keys),
            (at["offsets"], at["keys"], at["digests"], at["checksums"]),
            self.layout,
            self.fingerprint,
            _hash_ranges(self._fd, gaps, self.open_path),
        )
        os.pwrite(self._fd, header.pack(), 0)
        return header

    def _check_places(self, sealed: SealedFile, at: dict[str, int]) -> None:
        """Older libhdf5 reported offsets that leave the user block out: read one block back, and the keys."""
        keys = bytearray(8 * len(self.keys))
        _read_fully(self._fd, memoryview(keys), at["keys"], self.open_path)
        layer = bytearray(self.layout.layer_nbytes)
        _read_fully(self._fd, memoryview(layer), int(sealed.offsets[0]), self.open_path)
        if keys != sealed.keys.tobytes() or xxh3_64_intdigest(layer) != sealed.checksums[0, 0]:
            raise SegmentFileError(self.open_path, "libhdf5 put the data elsewhere than it says")


def open_sealed(path: Path, number: int, layout: BlockLayout, fingerprint: bytes) -> SealedFile:
    """Verify a sealed file, without libhdf5, and read its tables.

    Raises SegmentFileError (truncated, corrupt, foreign, another format version), OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe must not stop the start
    try:
        header = _read_header(fd, path)
        offsets = _read_table(fd, path, header, 0, 1)[:, 0]
        _check_offsets(offsets, header, path)
        gaps = list(_gaps(offsets, header.layout.nbytes, header.file_nbytes))
        if _hash_ranges(fd, gaps, path) != header.metadata_hash:
            raise SegmentFileError(path, "metadata is corrupt: its hash differs")
        keys, digests = (_read_table(fd, path, header, i, 1)[:, 0] for i in (1, 2))
        checksums = _read_table(fd, path, header, 3, header.layout.layers)
    finally:
        os.close(fd)
    same = header.layout == layout and header.fingerprint == fingerprint
    return SealedFile(path, number, header, keys, digests, offsets, checksums, same_kind=same)


def _read_header(fd: int, path: Path) -> Header:
    raw = os.pread(fd, HEADER_NBYTES, 0)
    size = os.fstat(fd).st_size
    if len(raw) < HEADER_NBYTES:
        raise SegmentFileError(path, f"truncated: {size} B")
    magic, version, header_nbytes, nbytes, blocks, block_nbytes, *rest = _HEADER.unpack_from(raw)
    tables, sizes, length, fingerprint = tuple(rest[:4]), rest[4:9], rest[9], rest[10]
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
        layout = BlockLayout(*sizes)
    except LayoutError as error:
        raise SegmentFileError(path, f"impossible layout: {error}") from None
    row = layout.nbytes + 8 * (3 + layout.layers)
    if not (layout.nbytes == block_nbytes and 0 < blocks <= nbytes // row and nbytes <= MAX_FILE_NBYTES):
        raise SegmentFileError(path, f"impossible sizes: {blocks} blocks of {block_nbytes} B in {nbytes} B")
    return Header(nbytes, blocks, tables, layout, fingerprint[:length], metadata_hash)


def _read_table(fd: int, path: Path, header: Header, index: int, columns: int) -> np.ndarray:
    """Table `index` of the header, (blocks, columns) u64."""
    table, at = np.empty((header.blocks, columns), "<u8"), header.tables[index]
    if not HEADER_NBYTES <= at <= header.file_nbytes - table.nbytes:
        raise SegmentFileError(path, f"table {index} at {at} lies outside the file")
    _read_fully(fd, table.data.cast("B"), at, path)
    return table


def _check_offsets(offsets: np.ndarray, header: Header, path: Path) -> None:
    nbytes = header.layout.nbytes
    order = np.sort(offsets)
    apart = bool(np.all(np.diff(order) >= nbytes))  # u64: no wrap, the array is sorted
    if not (apart and order[0] >= HEADER_NBYTES and int(order[-1]) <= header.file_nbytes - nbytes):
        raise SegmentFileError(path, "blocks overlap or lie outside the file")


def _gaps(offsets: np.ndarray, block_nbytes: int, end: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each run of bytes behind the header that belongs to no block: HDF5's structures,
    the tables, padding."""
    position = HEADER_NBYTES
    for offset in np.sort(offsets).tolist():
        if offset > position:
            yield position, offset
        position = offset + block_nbytes
    if end > position:
        yield position, end


def _hash_ranges(fd: int, ranges: list[tuple[int, int]], path: Path) -> int:
    """XXH3-64 over these ranges of a file, in order."""
    state, buffer = xxh3_64(), memoryview(bytearray(READ_NBYTES))
    for start, end in ranges:
        for at in range(start, end, READ_NBYTES):
            part = buffer[: min(READ_NBYTES, end - at)]
            _read_fully(fd, part, at, path)
            state.update(part)
    return state.intdigest()


def _read_fully(fd: int, out: memoryview, at: int, path: Path) -> None:
    done = 0
    while done < len(out):
        got = os.preadv(fd, [out[done:]], at + done)
        if not got:
            raise SegmentFileError(path, f"truncated: ends at {at + done}")
        done += got
