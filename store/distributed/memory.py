"""Shared memory without names: memfds, mapped by other processes of the same user through /proc.

Used by the table, the lenders of segments and their readers. Nothing is left behind by whoever is killed,
for there is no file. Knows neither objects nor messages. Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from pathlib import Path

from store.errors import StoreError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""The size of what is mapped never changes, so that no reader is killed by its end."""

_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def make_memfd(name: str, nbytes: int) -> tuple[int, mmap.mmap]:
    """(descriptor, mapping) of new shared memory; only reserved, pages come as they are touched.

    Raises StoreError when the system refuses.
    """
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise StoreError(f"shared memory of {nbytes} B cannot be made: {error.strerror}") from None
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd, mmap.mmap(fd, nbytes)
    except (OSError, ValueError, OverflowError) as error:
        os.close(fd)
        raise StoreError(f"shared memory of {nbytes} B cannot be made: {error}") from None


def map_foreign(pid: int, fd: int, inode: int, nbytes: int) -> mmap.mmap:
    """Map the memfd that process `pid` has open as `fd`.

    The kernel allows it to processes of the same user that see each other. Raises StoreError when it does
    not, or when the number means another file now (another inode, size, or no seals).
    """
    try:
        found = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"memory {fd} of process {pid} cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(found)
        seals = fcntl.fcntl(found, fcntl.F_GET_SEALS)
        if status.st_ino != inode or status.st_size != nbytes or seals & _SEALS != _SEALS:
            raise StoreError(f"memory {fd} of process {pid} is not what its owner announced")
        return mmap.mmap(found, nbytes)
    except (OSError, ValueError) as error:
        raise StoreError(f"memory {fd} of process {pid} cannot be mapped: {error}") from None
    finally:
        os.close(found)


def machine_id() -> str:
    """Which running kernel this is: processes with the same one may share memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Mapped:
    """A segment in this process's address space.

    view       its bytes, writable
    address    of its first byte
    """

    def __init__(self, memory: mmap.mmap):
        self.nbytes = len(memory)
        self._memory = memory
        self.view = memoryview(memory)
        self._anchor = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(self._anchor)

    def populate(self, offset: int, nbytes: int) -> None:
        """Give these bytes memory and a place in this process's page table, without the interpreter."""
        start = offset & -mmap.PAGESIZE
        end = min(-(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE, self.nbytes)
        if end > start:
            _libc.madvise(self.address + start, end - start, _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Unmap, once nobody holds a part of the view. May be called twice."""
        del self._anchor
        with contextlib.suppress(BufferError):  # somebody is copying: the last reference unmaps
            self.view.release()
            self._memory.close()


class Lent(Mapped):
    """A segment that this process lends.

    fd, inode   how others find it
    """

    def __init__(self, nbytes: int):
        self.fd, memory = make_memfd("mooncake-lite-segment", nbytes)
        self.inode = os.fstat(self.fd).st_ino
        super().__init__(memory)

    def close(self) -> None:
        """Unmap and give the memory back, as far as nobody else maps it."""
        if self.fd >= 0:
            super().close()
            os.close(self.fd)
            self.fd = -1
