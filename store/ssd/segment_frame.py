"""The frame around the blocks of a segment file that makes it HDF5: libhdf5's structures, and the tables.

Used by `store.ssd.segment_writer`, which has already written the blocks where `blocks_at` says. libhdf5 works
in memory here and never meets a disk's errors. Drawn in docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from store.layout import BlockLayout

USER_BLOCK_NBYTES = 4096
"""Bytes before HDF5's own, which the format leaves to applications: our header. A power of two; a page."""

PAGE_NBYTES = 4096

HDF5_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError)
"""The exceptions in which h5py reports errors of libhdf5."""


class Frame(io.RawIOBase):
    """A file in memory with a hole where the blocks lie.

        front   bytes 0 .. hole_start        back   bytes from hole_end on

    libhdf5 gets this as its file. A write into the hole would overwrite blocks, and raises OSError.
    """

    def __init__(self, hole_start: int, hole_end: int):
        super().__init__()
        self.hole_start, self.hole_end = hole_start, hole_end
        self.front, self.back = bytearray(hole_start), bytearray()
        self.nbytes = 0  # of the whole file, hole included; libhdf5 makes a new one only where there is none
        self._position = 0

    def bytes_at(self, at: int, nbytes: int) -> bytes:
        """Return bytes at .. at + nbytes, which lie outside of the hole."""
        part, start = (self.front, at) if at < self.hole_start else (self.back, at - self.hole_end)
        return bytes(part[start : start + nbytes]) if start >= 0 else b""

    # ------------------------------------------------------------ what libhdf5 calls through h5py

    def seekable(self) -> bool:
        """Yes."""
        return True

    def readable(self) -> bool:
        """Yes."""
        return True

    def writable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset from the start, from here or from the end."""
        self._position = offset + (0, self._position, self.nbytes)[whence]
        return self._position

    def tell(self) -> int:
        """Return the absolute offset."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as there are bytes, with zeros for the hole."""
        view = memoryview(buffer).cast("B")
        got = self.bytes_at(self._position, len(view))
        view[: len(got)] = got
        view[len(got) :] = bytes(len(view) - len(got))
        self._position += len(view)
        return len(view)

    def write(self, data: Any) -> int:
        """Write before or after the hole."""
        view, at = memoryview(data).cast("B"), self._position
        end = at + len(view)
        if end <= self.hole_start:
            self.front[at:end] = view
        elif at >= self.hole_end:
            self.back.extend(bytes(max(end - self.hole_end - len(self.back), 0)))
            self.back[at - self.hole_end : end - self.hole_end] = view
        else:
            raise OSError(f"a write to {at} .. {end}, among the blocks")
        self._position = end
        self.nbytes = max(self.nbytes, end)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Make the file end here."""
        size = self._position if size is None else size
        keep = size - self.hole_end
        if keep < 0:
            raise OSError(f"a file of {size} B would end among the blocks")
        del self.back[keep:]
        self.back.extend(bytes(keep - len(self.back)))
        self.nbytes = size
        return size


@cache
def blocks_at(block_nbytes: int) -> int:
    """Return where the first block starts in every segment file: the first page after HDF5's structures.

    Their size hardly depends on the size of a block. It is asked of libhdf5 itself, once.
    """
    with io.BytesIO() as scratch, _create(scratch, block_nbytes) as file:
        return _blocks_dataset(file, 1, block_nbytes)


def frame_of(
    layout: BlockLayout, blocks: int, attributes: Mapping[str, object], tables: Mapping[str, np.ndarray]
) -> tuple[Frame, dict[str, int]]:
    """Return the frame around `blocks` blocks that start at blocks_at, and {table name: absolute offset}.

    Raises one of HDF5_ERRORS; OSError also when libhdf5 would put something elsewhere than it says.
    """
    start = blocks_at(layout.nbytes)
    frame = Frame(start, start + blocks * layout.nbytes)
    with _create(frame, layout.nbytes) as file:
        if _blocks_dataset(file, blocks, layout.nbytes) != start:
            raise OSError("libhdf5 wants the blocks elsewhere than before")
        for name, value in attributes.items():
            file.attrs[name] = value
        at = {name: file.create_dataset(name, data=table).id.get_offset() for name, table in tables.items()}
    for name, table in tables.items():  # older libhdf5 reported offsets that leave the user block out
        if frame.bytes_at(at[name], table.nbytes) != table.tobytes():
            raise OSError(f"libhdf5 put table {name} elsewhere than it says")
    return frame, at


def _create(target: io.IOBase, block_nbytes: int) -> Any:
    """Create an empty HDF5 file in the format of 1.8 and older, which every distribution's h5dump reads."""
    import h5py

    return h5py.File(
        target,
        "w",
        libver=("earliest", "v110"),
        userblock_size=USER_BLOCK_NBYTES,
        meta_block_size=PAGE_NBYTES,  # all of its structures lie in the page before the blocks
        alignment_threshold=block_nbytes,
        alignment_interval=PAGE_NBYTES,
    )


def _blocks_dataset(file: Any, blocks: int, block_nbytes: int) -> int:
    """Create /blocks, contiguous, allocated and never filled; return its offset in the file."""
    from h5py import h5d, h5p, h5s, h5t

    plist = h5p.create(h5p.DATASET_CREATE)
    plist.set_layout(h5d.CONTIGUOUS)
    plist.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5d.FILL_TIME_NEVER)
    space = h5s.create_simple((blocks, block_nbytes))
    offset: int = h5d.create(file.id, b"blocks", h5t.STD_U8LE, space, plist).get_offset()
    return offset
