"""The segments that a client uses: its own, mapped ones of this machine, and remote ones over TCP.

Used by `client`. All kinds have the same verbs, so that no caller needs to know the kind.
Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from store.allocator import Extent
from store.errors import StoreError
from store.mooncake_store import messages as say
from store.mooncake_store.codes import NO_SPACE, CodeError
from store.mooncake_store.memory import WORD_BYTES, Lent, Mapped, map_foreign, used_at
from store.mooncake_store.memory_left import memory_left
from store.mooncake_store.shared_table import OFFSET_BITS, OFFSET_MASK
from store.objects import pieces
from transport.bulk.sockets import BytesClient, BytesServer
from transport.errors import TransportError
from transport.threads import start_thread

SECRET_BYTES = 32
REACH_S = 2.5
"""Longest wait for a lender that does not answer: of a read, and of a connection to write.

A get then ends within 3 s.
"""

STALL_S = 10.0
"""Longest wait of a write whose bytes the lender does not take."""

AVOID_TURNS = 3
"""A lender that could not be reached is asked again after so many times the time that this took."""

SLOWEST_BYTES_PER_S = 20e6
"""A transfer may take REACH_S or STALL_S, and in addition the time of its bytes at this rate."""

EXPOSED = 1
"""Number of a lender's one segment at its own BytesServer."""

RESERVE_BYTES = 32 * 2**20
"""Memory that lenders leave to the processes of their machine. Any value of this order works."""

BULK_BYTES = 256 * 1024
"""Copies of at least so many bytes let other threads run, and first check whether the pages are warm."""

MAX_WARMING = 64
"""Most ranges that wait to be warmed; further ones stay cold, which only costs time."""


class LocalSegment:
    """Memory in this process's address space."""

    def __init__(self, memory: Mapped):
        self.memory = memory
        self.view = memory.view

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        """Return a copy. Like the other verbs, raises ValueError for a missing range, and when closed."""
        self._check(offset, nbytes)
        return bytes(self.view[offset : offset + nbytes])

    def read_into(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Copy each (offset, nbytes, address of the destination)."""
        for offset, nbytes, address in ranges:
            self._check(offset, nbytes)
            with self.view[offset : offset + nbytes]:  # keeps the memory mapped meanwhile
                ctypes.memmove(address, self.memory.address + offset, nbytes)

    def _check(self, offset: int, nbytes: int) -> None:
        if offset + nbytes > self.memory.nbytes:  # they come out of memory that others write to
            raise ValueError(f"{offset}+{nbytes} of a segment of {self.memory.nbytes} B")

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Copy these parts one after the other."""
        used = self.memory.used
        for part in parts:
            end = offset + len(part)
            self._check(offset, len(part))
            if end > used[0]:
                used[0] = end
            if len(part) < BULK_BYTES:
                self.view[offset:end] = part
            elif not self._is_warm_now(offset, len(part)):
                self.memory.write_cold(offset, part)
            elif isinstance(part.obj, bytes) and len(part) == len(part.obj):
                with self.view[offset:end]:  # keeps the memory mapped meanwhile
                    ctypes.memmove(self.memory.address + offset, part.obj, len(part))
            else:
                self.view[offset:end] = part
            offset = end

    def _is_warm_now(self, offset: int, nbytes: int) -> bool:
        """Tell whether a plain copy is fastest, after entering pages that have memory into the page table."""
        memory = self.memory
        if not memory.is_warm(offset, nbytes) and memory.is_present(offset, nbytes):
            memory.warm(offset, nbytes)
        return memory.is_warm(offset, nbytes)

    def close(self) -> None:
        """Unmap."""
        self.memory.close()


class RemoteSegment:
    """Memory of another process, behind its BytesServer. Verbs raise TransportError."""

    view = None

    def __init__(self, told: say.Segment, limit_s: float):
        self._client = BytesClient(told.host, told.port, told.secret, timeout_s=limit_s)
        self._used_at, self._used_until = used_at(told.nbytes), 0

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        """Return a copy."""
        data = bytearray(nbytes)
        self._client.read(EXPOSED, [(offset, nbytes)], [data], _limit_s(REACH_S, nbytes))
        return bytes(data)

    def read_into(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Copy each (offset, nbytes, address of the destination)."""
        buffers = [(ctypes.c_ubyte * nbytes).from_address(address) for _, nbytes, address in ranges]
        wanted = [(offset, nbytes) for offset, nbytes, _ in ranges]
        limit_s = _limit_s(REACH_S, sum(nbytes for _, nbytes in wanted))
        self._client.read(EXPOSED, wanted, buffers, limit_s)

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Send these parts one after the other."""
        ranges = []
        for part in parts:
            ranges.append((offset, len(part)))
            offset += len(part)
        if offset > self._used_until:
            self._used_until = offset
            ranges.append((self._used_at, WORD_BYTES))
            parts = [*parts, memoryview(offset.to_bytes(WORD_BYTES, sys.byteorder))]
        limit_s = _limit_s(STALL_S, sum(nbytes for _, nbytes in ranges))
        self._client.write(EXPOSED, ranges, parts, limit_s)

    def close(self) -> None:
        """End the connections."""
        self._client.close()


class Scattered:
    """An object in several ranges of one segment, with the verbs of a segment: offset 0 is its first byte."""

    def __init__(self, segment: AnySegment, extents: Sequence[Extent]):
        self._segment = segment
        self._extents = extents

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        """Return a copy."""
        return b"".join(
            self._segment.read_bytes(start, length) for start, length in pieces(self._extents, offset, nbytes)
        )

    def read_into(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Copy each (offset, nbytes, address of the destination)."""
        cut = []
        for offset, nbytes, address in ranges:
            for start, length in pieces(self._extents, offset, nbytes):
                cut.append((start, length, address))
                address += length
        self._segment.read_into(cut)

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Copy these parts one after the other."""
        for part in parts:
            for start, length in pieces(self._extents, offset, len(part)):
                self._segment.write(start, [part[:length]])
                part, offset = part[length:], offset + length


class Warmer:
    """A thread that prepares pages: of any segment before a put, and else of the own one for later puts.

    It works in long calls without the interpreter, at ordinary priority. At a low priority it could lose its
    core while it holds the interpreter's lock, and then the writer would wait too.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._step: Callable[[], float | None] = lambda: None
        self._wait_s: float | None = None
        self._is_dead = False
        self._thread = start_thread("store warmer", self._run, on_death=self._die)

    def prepare(self, memory: Lent) -> None:
        """Prepare memory after the part that is in use, from now on."""

        def begin() -> None:
            self._step, self._wait_s = memory.prepare, 0.0

        self._add(begin)

    def settle(self, segment: AnySegment | None, offset: int, nbytes: int) -> None:
        """Map the pages of a range and around it for the next copies: bytes go there, or went there."""
        if isinstance(segment, LocalSegment) and not segment.memory.is_warm(offset, nbytes):
            memory = segment.memory
            self._add(lambda: memory.warm_around(offset, nbytes))

    def _add(self, work: Callable[[], None]) -> None:
        if self._work.qsize() < MAX_WARMING and not self._is_dead:
            self._work.put(work)

    def _run(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=self._wait_s)
            except Empty:  # no put waits: one more step
                self._wait_s = self._step()
                continue
            if work is None:
                return
            work()

    def _die(self, _: str) -> None:
        """Drop the waiting ranges: their pages stay cold, and copies to them take longer."""
        self._is_dead = True
        with contextlib.suppress(Empty):
            while True:
                self._work.get_nowait()

    def close(self) -> None:
        """End the thread before the segments are unmapped."""
        self._work.put(None)
        self._thread.join(timeout=5)


AnySegment = LocalSegment | RemoteSegment
Readable = AnySegment | Scattered


def _limit_s(silent_s: float, nbytes: int) -> float:
    return silent_s + nbytes / SLOWEST_BYTES_PER_S


class Lending:
    """The segment that this client lends: memory, and a server for clients that cannot map it."""

    def __init__(self, nbytes: int, host: str):
        left = memory_left()
        if nbytes > left:
            raise CodeError(NO_SPACE, f"a segment of {nbytes} B, and {left} B of memory are left; lend less")
        self.memory = Lent(nbytes)
        self.memory.plan(left)
        self.secret = secrets.token_bytes(SECRET_BYTES)
        try:
            self.server = BytesServer(self.secret, host)
        except TransportError as error:
            self.memory.close()
            raise StoreError(str(error)) from None
        self.server.expose(EXPOSED, self.memory.whole)

    def growth(self) -> int:
        """Return the bytes by which its used part may grow until the next beat.

        Half of what is left, for other lenders of the machine grow, too; less a reserve for what `prepare`
        takes ahead, which is planned anew here.
        """
        left = memory_left()
        return max(0, left - RESERVE_BYTES - self.memory.plan(left)) // 2

    def close(self) -> None:
        """Stop lending."""
        self.server.withdraw(EXPOSED)
        self.server.close()
        self.memory.close()


class Segments:
    """Segments by their number, opened when they are first needed.

    ask       the master's answer for a number, None when the segment is gone
    machine   of this process; "" when memory is not to be mapped

    _opening    number -> lock of the thread that opens it; other segments are opened meanwhile
    _avoid_s    number -> when a lender that could not be reached is asked again
    """

    def __init__(self, ask: Callable[[int], say.Segment | None], machine: str):
        self._ask = ask
        self._machine = machine
        self._lock = threading.Lock()
        self._open: dict[int, AnySegment] = {}
        self._opening: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._avoid_s: dict[int, float] = {}
        self.views: dict[int, memoryview] = {}
        self.names: dict[int, str] = {}
        self._own = 0
        self._closed = False

    def add_own(self, number: int, name: str, memory: Mapped) -> None:
        """Add the client's own segment, which needs no request. Its Lending closes it."""
        self.names[number] = name
        self._own = number
        if self._machine:
            self._open[number] = LocalSegment(memory)
            self.views[number] = memory.view

    def get(self, number: int, limit_s: float | None = None) -> AnySegment | None:
        """Return the segment, opened within limit_s (None: REACH_S); None when it is gone or out of reach."""
        found = self._open.get(number)
        if found is not None:
            return found
        deadline = time.monotonic() + (REACH_S if limit_s is None else limit_s)
        with self._lock:
            opening = self._opening[number]
        if not opening.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return None
        try:
            found = self._open.get(number)
            return found if found is not None else self._open_now(number, deadline)
        finally:
            opening.release()

    def opened(self, number: int) -> AnySegment | None:
        """Return the segment if it is open already, without a request."""
        return self._open.get(number)

    def _open_now(self, number: int, deadline: float) -> AnySegment | None:
        began = time.monotonic()
        if self._closed or began < self._avoid_s.get(number, began) or began >= deadline:
            return None
        told = self._ask(number)
        if told is None:
            return None
        self.names[number] = told.name
        segment = self._mapped(told)
        try:
            segment = segment or RemoteSegment(told, deadline - began)
        except TransportError:
            now = time.monotonic()
            self._avoid_s[number] = now + AVOID_TURNS * (now - began)
            return None
        with self._lock:
            if self._closed:
                segment.close()
                return None
            self._open[number] = segment
            if segment.view is not None:
                self.views[number] = segment.view
        return segment

    def _mapped(self, told: say.Segment) -> AnySegment | None:
        if not self._machine or told.machine != self._machine:
            return None
        try:
            return LocalSegment(_mapped(told))
        except StoreError:
            return None  # another user's, or in another PID namespace

    def name(self, number: int) -> str:
        """Return the name of a segment; "" when it is gone."""
        if number not in self.names and (told := self._ask(number)) is not None:
            self.names[number] = told.name
        return self.names.get(number, "")

    def scattered(self, replica: Sequence[tuple[int, int]], limit_s: float | None = None) -> Scattered | None:
        """Return a replica of several (location, bytes), as `get` does."""
        segment = self.get(replica[0][0] >> OFFSET_BITS, limit_s)
        extents = [(location & OFFSET_MASK, nbytes) for location, nbytes in replica]
        return None if segment is None else Scattered(segment, extents)

    def forget(self, number: int) -> None:
        """Forget a segment that is gone or did not answer; `get` opens it anew. The own one is kept."""
        if number == self._own and self._machine:
            return
        with self._lock:
            self.views.pop(number, None)
            segment = self._open.pop(number, None)
            if segment is not None:
                segment.close()

    def look_after(self, turn: int) -> None:
        """Close one segment per turn if it is gone: while it is mapped, its memory is not free."""
        numbers = [number for number in list(self._open) if number != self._own]
        if numbers and self._ask(number := numbers[turn % len(numbers)]) is None:
            self.forget(number)
            self.names.pop(number, None)

    def close(self) -> None:
        """Close all segments, and open no more. Copies under way run to the end."""
        with self._lock:
            self._closed = True
            if self._machine:
                self._open.pop(self._own, None)
                self.views.pop(self._own, None)
        for number in list(self._open):
            self.forget(number)


def _mapped(told: say.Segment) -> Mapped:
    fd, memory = map_foreign(told.pid, told.fd, told.inode, used_at(told.nbytes) + WORD_BYTES)
    return Mapped(memory, fd, told.nbytes)
