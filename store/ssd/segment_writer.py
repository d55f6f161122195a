"""An open segment file of the SSD tier: blocks are appended, then it is sealed once and for all.

Used by `store.ssd.tier` and `store.ssd.compaction`. Knows one file; neither the folder's lock, nor capacity,
nor threads. Blocks are plain writes at known places, and the kernel starts to write them back at once. The
frame that makes the file HDF5 is written around them at the end. Drawn byte by byte in
docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from store.errors import SegmentFileError
from store.layout import BlockLayout
from store.ssd.segment_file import FORMAT_VERSION, Header, SealedFile, read_fully
from store.ssd.segment_frame import HDF5_ERRORS, USER_BLOCK_NBYTES, Frame, blocks_at, frame_of
from store.ssd.writeback import start_writeback

RESERVE_NBYTES = 16 << 20
"""Space is reserved in steps of this size: a call per block costs a fifth of the time of its write."""

WRITEBACK_NBYTES = 1 << 20
"""The kernel is asked to start writing whenever this much is new: 2.2 GB/s, 2.0 for 4 MiB, 1.4 without."""

_TABLES_NBYTES = 64 << 10  # what libhdf5 needs for its own structures, whatever the number of blocks
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def file_nbytes(layout: BlockLayout, blocks: int) -> int:
    """Return an upper bound of a file's size: header, HDF5's structures, blocks, tables."""
    return USER_BLOCK_NBYTES + _TABLES_NBYTES + blocks * (layout.nbytes + 8 * (3 + layout.layers))


class SegmentWriter:
    """An open segment file, `<path>.open` until seal() renames it to path.

        keys    of the blocks in it, in the order of their rows

    A failed write loses its own block only: the blocks before it are whole. Not thread-safe.
    """

    def __init__(self, path: Path, layout: BlockLayout, fingerprint: bytes):
        """Create the file. Raises OSError when that fails."""
        self.path, self.layout, self.fingerprint = path, layout, fingerprint
        self.open_path = path.with_name(path.name + ".open")
        self.keys: list[int] = []
        self._digests: list[int] = []
        self._checksums: list[Sequence[int]] = []
        self._start = blocks_at(layout.nbytes)
        self._reserved = 0
        self._flushing = self._start  # from here on the kernel has not been asked yet
        self._fd = os.open(self.open_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)

    @property
    def nbytes(self) -> int:
        """Return the bytes of blocks in it."""
        return len(self.keys) * self.layout.nbytes

    def append(self, key: int, digest: int, checksums: Sequence[int], block: memoryview) -> None:
        """Write one block after the others.

        Raises OSError (ENOSPC, EDQUOT or EFBIG when the disk is full), and leaves the file as it was.
        """
        self._reserve()
        end = self._place(len(self.keys)) + _write_fully(self._fd, block, self._place(len(self.keys)))
        self.keys.append(key)
        self._digests.append(digest)
        self._checksums.append(checksums)
        if end - self._flushing >= WRITEBACK_NBYTES:
            start_writeback(self._fd, self._flushing, end - self._flushing)
            self._flushing = end

    def discard(self, key: int) -> None:
        """Remove a block; the last one moves into its row.

        Raises KeyError, OSError, and SegmentFileError if another process has truncated the file.
        """
        if key not in self.keys:
            raise KeyError(key)
        row, last = self.keys.index(key), len(self.keys) - 1
        if row != last:
            block = memoryview(bytearray(self.layout.nbytes))
            read_fully(self._fd, block, self._place(last), self.open_path)
            _write_fully(self._fd, block, self._place(row))
        columns: tuple[list, ...] = (self.keys, self._digests, self._checksums)
        for column in columns:
            column[row] = column[last]
            column.pop()
        self._flushing = min(self._flushing, self._place(row))

    def seal(self, number: int) -> SealedFile:
        """Write header and tables around the blocks, fsync, rename. The caller syncs the folder.

        Raises OSError, SegmentFileError; then nothing of the file is durable.
        """
        rows = len(self.keys)
        tables = {
            "offsets": self._start + np.arange(rows, dtype="<u8") * np.uint64(self.layout.nbytes),
            "keys": np.array(self.keys, "<u8"),
            "digests": np.array(self._digests, "<u8"),
            "checksums": np.array(self._checksums, "<u8").reshape(rows, self.layout.layers),
        }
        start_writeback(self._fd, self._flushing, self._place(rows) - self._flushing)
        try:
            frame, at = frame_of(self.layout, rows, self._attributes(), tables)
        except HDF5_ERRORS as error:
            raise SegmentFileError(self.open_path, str(error).splitlines()[0]) from None
        header = self._header(frame, at)
        frame.front[:USER_BLOCK_NBYTES] = header.pack()
        _write_fully(self._fd, memoryview(frame.back), frame.hole_end)
        _write_fully(self._fd, memoryview(frame.front), 0)
        os.ftruncate(self._fd, frame.nbytes)  # gives back what was reserved in vain
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        self.open_path.rename(self.path)
        keys, digests, checksums = tables["keys"], tables["digests"], tables["checksums"]
        return SealedFile(self.path, number, header, keys, digests, tables["offsets"], checksums)

    def abandon(self) -> None:
        """Delete the file in any state."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with suppress(OSError):  # then the next start deletes it
            self.open_path.unlink()

    def _place(self, row: int) -> int:
        return self._start + row * self.layout.nbytes

    def _reserve(self) -> None:
        """Have the file system reserve space for one more block and the tables.

        A full disk is then met here, where it costs one block, and not when the file is sealed.
        """
        needed = file_nbytes(self.layout, len(self.keys) + 1)
        if needed <= self._reserved:
            return
        for end in (max(needed, self._reserved + RESERVE_NBYTES), needed):
            try:
                os.posix_fallocate(self._fd, self._reserved, end - self._reserved)
            except OSError as error:
                if error.errno in _NO_FALLOCATE:
                    return
                if end == needed:
                    raise
            else:
                self._reserved = end
                return

    def _attributes(self) -> dict[str, object]:
        attributes: dict[str, object] = {
            "format": np.bytes_("mooncake-lite tier"),
            "format_version": np.uint32(FORMAT_VERSION),
            "fingerprint": np.bytes_(self.fingerprint.hex()),
        }
        for name in ("layers", "kv_heads", "block_tokens", "head_dim", "itemsize"):
            attributes[name] = np.uint32(getattr(self.layout, name))
        attributes["codec"] = np.bytes_(self.layout.codec)
        return attributes

    def _header(self, frame: Frame, at: dict[str, int]) -> Header:
        metadata = bytes(frame.front[USER_BLOCK_NBYTES:]) + bytes(frame.back)
        places = (at["offsets"], at["keys"], at["digests"], at["checksums"])
        return Header(
            frame.nbytes, len(self.keys), places, self.layout, self.fingerprint, xxh3_64_intdigest(metadata)
        )


def _write_fully(fd: int, data: memoryview, at: int) -> int:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)
    return done
