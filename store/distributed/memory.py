"""Shared memory without names: memfds, mapped by other processes of the same user through /proc.

Used by the table, the lenders of segments and their readers. A killed process leaves nothing behind, because
there is no file. Knows neither objects nor messages. Explained in docs/explain/leases.md.
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
"""Seals that fix the size of a memfd: reading past a shortened end would kill the reader."""

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23

READY_BYTES = 64 * 2**20
READY_SHARE = 1 / 8
"""Most bytes, and largest share, of a segment that a lender keeps in memory for the next puts.

The rest is only reserved. Any values work that last until the lender's thread has prepared more.
"""

READY_STEP_BYTES = 2**20
"""Bytes that a lender makes ready in one call, so that the call is soon over."""

WARM_BYTES = 64 * 1024
"""Granularity of what a process knows about its page table: the kernel maps so much around one fault."""

WINDOW_BYTES = 16 * 2**20
"""Bytes mapped at once ahead of a writer: half a millisecond where the lender has the memory ready."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def make_memfd(name: str, nbytes: int) -> tuple[int, mmap.mmap]:
    """Return (descriptor, mapping) of new shared memory, which gets pages as they are touched.

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


def map_foreign(pid: int, fd: int, inode: int, nbytes: int) -> tuple[int, mmap.mmap]:
    """Return (descriptor, mapping) of the memfd that process `pid` has open as `fd`.

    The kernel allows it to processes of the same user that see each other. Raises StoreError when it refuses,
    or when the number now means another file (another inode, size, or no seals).
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
        return found, mmap.mmap(found, nbytes)
    except BaseException as error:
        os.close(found)
        if isinstance(error, OSError | ValueError):
            raise StoreError(f"memory {fd} of process {pid} cannot be mapped: {error}") from None
        raise


def machine_id() -> str:
    """Return the id of the running kernel and PID namespace.

    Processes with the same one may share memory, and mean the same process by a number. Two containers of a
    host do not.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


class _Descriptor:
    """A file descriptor that is closed after its last use.

    If it were closed during a write, the write could reach another file that has got the number since.
    """

    def __init__(self, fd: int):
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class Mapped:
    """A segment in this process's address space.

    view       its bytes, writable
    address    of its first byte
    _file      None when closed

    The first touch of a page costs several times as much as copying it: memory must be found, zeroed and
    entered into this process's page table. So the kernel writes large ranges of pages without memory, for it
    needs neither zeroes nor the page table. Entering many pages at once is cheap.
    """

    def __init__(self, memory: mmap.mmap, fd: int):
        self.nbytes = len(memory)
        self._file: _Descriptor | None = _Descriptor(fd)
        self._memory = memory
        self.view = memoryview(memory)
        self._anchor = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(self._anchor)
        self._warm = bytearray(-(-self.nbytes // WARM_BYTES))

    def is_warm(self, offset: int, nbytes: int) -> bool:
        """Tell whether these pages have memory and are in this process's page table."""
        return self._warm.find(0, offset // WARM_BYTES, -(-(offset + nbytes) // WARM_BYTES)) < 0

    def write_cold(self, offset: int, data: memoryview) -> None:
        """Copy bytes to pages that may never have been touched. Raises OSError, ValueError when closed."""
        file = self._file
        if file is None or offset + len(data) > self.nbytes:
            raise ValueError(f"{offset}+{len(data)} of a segment of {self.nbytes} B, or of a closed one")
        while data:
            count = os.pwrite(file.fd, data, offset)
            data, offset = data[count:], offset + count

    def is_present(self, offset: int, nbytes: int) -> bool:
        """Tell whether these pages have memory, in the page table of any process."""
        start = offset & -mmap.PAGESIZE
        pages = -(-(offset + nbytes - start) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        if _libc.mincore(self.address + start, pages * mmap.PAGESIZE, found) != 0:
            return False
        return b"\0" not in bytes(found)

    def warm(self, offset: int, nbytes: int) -> None:
        """Enter these pages into this process's page table, without the interpreter."""
        start = offset // WARM_BYTES
        end = -(-(offset + nbytes) // WARM_BYTES)
        length = min(end * WARM_BYTES, self.nbytes) - start * WARM_BYTES
        if _libc.madvise(self.address + start * WARM_BYTES, length, _MADV_POPULATE_READ) == 0:
            self._warm[start:end] = b"\1" * (end - start)

    def warm_around(self, offset: int, nbytes: int) -> None:
        """Warm the whole windows around these pages, unless that was done meanwhile."""
        start = offset // WINDOW_BYTES * WINDOW_BYTES
        end = min(-(-(offset + nbytes) // WINDOW_BYTES) * WINDOW_BYTES, self.nbytes)
        if not self.is_warm(offset, nbytes):
            self.warm(start, end - start)

    def close(self) -> None:
        """Unmap, once no part of the view is in use. May be called twice."""
        if self._file is None:
            return
        self._file = None
        del self._anchor
        with contextlib.suppress(BufferError):  # a copy is under way: the last reference unmaps
            self.view.release()
            self._memory.close()


class Lent(Mapped):
    """A segment that this process lends.

    fd, inode   by which other processes find it
    """

    def __init__(self, nbytes: int):
        fd, memory = make_memfd("mooncake-lite-segment", nbytes)
        self.fd = fd
        self.inode = os.fstat(fd).st_ino
        self._ready_until = 0
        super().__init__(memory, fd)

    def prepare(self, used_until: int) -> None:
        """Allocate memory for the space that will be given out next, a little ahead of use."""
        ahead = min(READY_BYTES, int(READY_SHARE * self.nbytes))
        target = min(used_until + ahead, self.nbytes) & -mmap.PAGESIZE
        start = max(self._ready_until, used_until & -mmap.PAGESIZE)
        while start < target:
            length = min(READY_STEP_BYTES, target - start)
            if _libc.madvise(self.address + start, length, _MADV_POPULATE_WRITE) != 0:
                return
            start += length
            self._ready_until = start
