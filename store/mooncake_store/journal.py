"""Journals: writers of this machine publish without a message, by a ring of records in shared memory.

A client appends records to its own ring. The master takes them (Journals). A reader that found no object
looks whether any record waits to be taken (ClientJournals). Knows no objects. Explained in
docs/explain/leases.md.

    words (u64)
        0                       journals in use; later ones have never been written
        1                       losses: clients that are gone, and their segments with them
        16 ...                  written: records that journal j has ever been given; stored by its client
        16 + MAX_JOURNALS ...   taken: records of j that are in the table; stored by the master
    from RINGS_AT, journal j    RECORDS records of RECORD_BYTES:
        0  check                XXH3-64 of the rest, up to the end of the name
        1  put                  number of the put
        2  time                 CLOCK_MONOTONIC in ns, before the record was written
        3  bytes of the name    0: the master knows it
        4  name                 UTF-8
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from store.errors import StoreError
from store.mooncake_store.memory import make_memfd, map_foreign

MAX_JOURNALS = 2048
"""Most clients of one machine with a journal: more than `master.MAX_CLIENTS`."""

RECORDS = 64
RECORD_BYTES = 256
"""A ring of 16 KiB per client. A full ring costs a message, so it only has to hold the puts between two of
the master's looks. A record has four words and a name.
"""

_HEAD = struct.Struct("<4Q")
_REST = struct.Struct("<3Q")
MAX_NAME_BYTES = RECORD_BYTES - _HEAD.size
"""Longest name that fits into a record; a longer one is sent in a message."""

_LOSSES = 1
_WRITTEN = 16
_TAKEN = _WRITTEN + MAX_JOURNALS
_RINGS_AT = -(-8 * (_TAKEN + MAX_JOURNALS) // 4096) * 4096
_RING_BYTES = RECORDS * RECORD_BYTES
NBYTES = _RINGS_AT + MAX_JOURNALS * _RING_BYTES

LOOKS = 100
"""Looks at a record whose check does not fit: its bytes may arrive after the count that announces them."""


class Claim(NamedTuple):
    """One record: the bytes of `put` are in place since `time_ns`. name: None if the master knows it."""

    journal: int
    put: int
    time_ns: int
    name: bytes | None


class _Shared:
    def __init__(self, memory: mmap.mmap):
        self.memory = memory
        self.words = memoryview(memory).cast("Q")

    def close(self) -> None:
        """Unmap. May be called twice."""
        self.words.release()
        self.memory.close()


class ClientJournals(_Shared):
    """A client's view of all journals: it writes its own, and sees whether records wait in any.

    journal    number of its own

    Raises StoreError when the memory cannot be mapped, or has another layout.
    """

    def __init__(self, pid: int, fd: int, inode: int, nbytes: int, journal: int):
        if nbytes != NBYTES or not 0 <= journal < MAX_JOURNALS:
            raise StoreError(f"journal {journal} of {nbytes} B: both sides must be of one version")
        own, memory = map_foreign(pid, fd, inode, nbytes)
        os.close(own)
        super().__init__(memory)
        self._ring = _RINGS_AT + journal * _RING_BYTES
        self._journal = journal
        self._lock = threading.Lock()

    def append(self, put: int, name: bytes = b"") -> bool:
        """Publish a put: after the return every reader of this machine finds it. False: the ring is full."""
        with self._lock:
            at = _WRITTEN + self._journal
            count = self.words[at]
            if count - self.words[_TAKEN + self._journal] >= RECORDS:
                return False
            rest = _REST.pack(put, time.monotonic_ns(), len(name)) + name
            start = self._ring + count % RECORDS * RECORD_BYTES
            self.memory[start + 8 : start + 8 + len(rest)] = rest
            self.words[start >> 3] = xxh3_64_intdigest(rest)
            self.words[at] = count + 1
            return True

    @property
    def losses(self) -> int:
        """Return the number of losses. Space that was given before it changed may be gone."""
        return int(self.words[_LOSSES])

    def is_pending(self) -> bool:
        """Tell whether some record is not in the table yet.

        After a False, look into the table again: a record may have got there since the last look.
        """
        end = 8 * min(self.words[0], MAX_JOURNALS)
        written = self.memory[8 * _WRITTEN : 8 * _WRITTEN + end]
        return written != self.memory[8 * _TAKEN : 8 * _TAKEN + end]


class Journals(_Shared):
    """The master's side of the journals, for one thread.

    Any client can write anywhere in this memory. So the master never reads back what it has written: it keeps
    numbers of its own, and repairs those in the memory.

    _taken    of each journal in use: records that are in the table
    _free     journals whose clients are gone
    """

    def __init__(self) -> None:
        self.fd, memory = make_memfd("mooncake-lite-journals", NBYTES)
        self.inode = os.fstat(self.fd).st_ino
        self.nbytes = NBYTES
        super().__init__(memory)
        self._taken: list[int] = []
        self._losses = 0
        self._free: list[int] = []
        self.dropped = 0

    def open(self) -> int | None:
        """Open a journal for a new client; None when all are in use."""
        if self._free:
            return self._free.pop()
        journal = len(self._taken)
        if journal == MAX_JOURNALS:
            return None
        self._taken.append(0)
        self.words[0] = journal + 1
        return journal

    def release(self, journal: int) -> None:
        """Release a journal whose client is gone, after all its records were taken."""
        self.words[_WRITTEN + journal] = self.words[_TAKEN + journal] = self._taken[journal]
        self._free.append(journal)

    def note_loss(self) -> None:
        """Note the loss of a client, before others can get its space."""
        self._losses += 1
        self.words[_LOSSES] = self._losses

    def waiting(self, before_ns: int) -> list[Claim]:
        """Return records written before this time, oldest first; call `taken` once they are in the table.

        All records that were complete at that time are among them. So if one put began after another had
        returned, the later one never comes alone.
        """
        claims: list[Claim] = []
        end = 8 * len(self._taken)
        if self.memory[8 * _WRITTEN : 8 * _WRITTEN + end] == self.memory[8 * _TAKEN : 8 * _TAKEN + end]:
            return claims
        for journal, first in enumerate(self._taken):
            last = self.words[_WRITTEN + journal]
            if not first <= last <= first + RECORDS:  # a stray store: no record in it can be trusted
                self.words[_WRITTEN + journal] = last = first
                self.dropped += 1
            if last == first:
                self.words[_TAKEN + journal] = first
            for count in range(first, last):
                claim = self._record(journal, count)
                if before_ns <= claim.time_ns <= time.monotonic_ns():
                    break  # written since, or a time that has not come yet
                claims.append(claim)
        claims.sort(key=lambda claim: claim.time_ns)
        return claims

    def taken(self, claims: list[Claim]) -> None:
        """Free the places of records that are in the table, or were rejected."""
        for claim in claims:
            self._taken[claim.journal] += 1
            self.words[_TAKEN + claim.journal] = self._taken[claim.journal]

    def _record(self, journal: int, count: int) -> Claim:
        """Read one record. If its check never fits, return a claim of put 0, which does not exist."""
        start = _RINGS_AT + journal * _RING_BYTES + count % RECORDS * RECORD_BYTES
        for _ in range(LOOKS):
            raw = self.memory[start : start + RECORD_BYTES]
            check, put, time_ns, length = _HEAD.unpack_from(raw)
            if length <= MAX_NAME_BYTES and check == xxh3_64_intdigest(raw[8 : _HEAD.size + length]):
                name = raw[_HEAD.size : _HEAD.size + length] if length else None
                return Claim(journal, put, time_ns, name)
        self.dropped += 1
        return Claim(journal, 0, 0, None)

    def close(self) -> None:
        """Unmap and give the memory back, once no client maps it either."""
        if self.fd >= 0:
            super().close()
            os.close(self.fd)
            self.fd = -1
