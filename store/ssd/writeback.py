"""Have the kernel start writing a range of a file to disk now, while the program goes on.

Used by `store.ssd.segment_writer`: fsync of a file then finds most of it written. Measured in
docs/reference/hdf5-tier.md. Linux; elsewhere nothing happens, and fsync does all of it.
"""

from __future__ import annotations

import ctypes

_SYNC_FILE_RANGE_WRITE = 2

_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """A hint: it waits for nothing, and promises nothing. An error of the disk stays for fsync to report
    (the flag that would take it away, by waiting, is not set)."""
    if _sync_file_range is not None and nbytes > 0:
        _sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)
