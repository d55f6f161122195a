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

READY_BYTES = 256 * 2**20
READY_SHARE, LEFT_SHARE = 1 / 4, 1 / 8
"""Most bytes, largest share of a segment, and largest share of the memory that is left, that a lender keeps
ready for the next puts.

The rest is only reserved. A first touch costs ten times as much as a copy, so puts at full speed overtake the
lender's thread: what is ready must last for a whole burst of them.
"""

READY_STEP_BYTES = 2**20
"""Bytes that a lender makes ready in one call: a writer's range waits so long for its turn, 0.6 to 3 ms."""

LOOK_S = 0.02
"""Time between two looks at how much of the segment is used. Puts at full speed use 160 MiB meanwhile."""

WARM_BYTES = 64 * 1024
"""Granularity of what a process knows about its page table: the kernel maps so much around one fault."""

WINDOW_BYTES = 16 * 2**20
"""Bytes mapped at once ahead of a writer: half a millisecond where the lender has the memory ready."""

WORD_BYTES = 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def make_memfd(name: str, nbytes: int) -> tuple[int, mmap.mmap]:
    """Return (descriptor, mapping) of new shared memory, which gets pages as they are touched.

    Raises StoreError when the system refuses.
    """
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd, mmap.mmap(fd, nbytes)
    except (OSError, ValueError, OverflowError) as error:
        if fd >= 0:
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


def used_at(nbytes: int) -> int:
    """Return the offset of the word behind a segment that tells its lender how much of it is used."""
    return -(-nbytes // WORD_BYTES) * WORD_BYTES


def machine_id() -> str:
    """Return the id of the running kernel and PID namespace.

    Processes with the same one may share memory, and mean the same process by a number. Two containers of a
    host do not.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}-{os.stat('/proc/self/ns/pid').st_ino}"


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
    whole      view, and the word behind it
    address    of its first byte
    used       that word (u64): the end of the last byte that any client has written
    _file      None when closed

    The first touch of a page costs several times as much as copying it: memory must be found, zeroed and
    entered into this process's page table. So the kernel writes large ranges of pages without memory, for it
    needs neither zeroes nor the page table. Entering many pages at once is cheap.
    """

    def __init__(self, memory: mmap.mmap, fd: int, nbytes: int):
        self.nbytes = nbytes
        self._file: _Descriptor | None = _Descriptor(fd)
        self.whole = memory
        self.view = memoryview(memory)[:nbytes]
        self.used = memoryview(memory)[used_at(nbytes) :].cast("Q")
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
        _libc.mincore(self.address + start, pages * mmap.PAGESIZE, found)  # fills in nothing when it fails
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
            self.used.release()
            self.view.release()
            self.whole.close()


class Lent(Mapped):
    """A segment that this process lends.

    fd, inode   by which other processes find it
    """

    def __init__(self, nbytes: int):
        fd, memory = make_memfd("mooncake-lite-segment", used_at(nbytes) + WORD_BYTES)
        self.fd = fd
        self.inode = os.fstat(fd).st_ino
        self._ahead = self._used_until = self._ready_until = 0
        super().__init__(memory, fd, nbytes)

    @property
    def used_until(self) -> int:
        """Return the end of the last byte that was ever written, as far as the writers have told it."""
        self._used_until = max(self._used_until, min(self.used[0], self.nbytes))
        return self._used_until

    def plan(self, left: int) -> int:
        """Decide how many bytes to keep ready, where so many are left in memory; return the number."""
        self._ahead = int(min(READY_BYTES, READY_SHARE * self.nbytes, LEFT_SHARE * left))
        return self._ahead

    def prepare(self) -> float | None:
        """Allocate memory for a step of the space that will be given out next, and map it.

        Returns the seconds until the next call, None when all memory is ready.
        """
        used = self.used_until
        start = max(self._ready_until, used & -mmap.PAGESIZE)
        length = min(READY_STEP_BYTES, used + self._ahead - start, self.nbytes - start) & -mmap.PAGESIZE
        if start + mmap.PAGESIZE > self.nbytes:
            return None
        if length <= 0 or _libc.madvise(self.address + start, length, _MADV_POPULATE_WRITE) != 0:
            return LOOK_S
        self._ready_until = end = start + length
        first, last = -(-start // WARM_BYTES), end // WARM_BYTES
        self._warm[first:last] = b"\1" * (last - first)
        return 0.0
