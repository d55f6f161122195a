"""The directory for other processes of the machine: a hash table in shared memory.

The master alone writes it (TableWriter), except for one word of each slot, into which clients store leases.
Every client of the machine reads it without a message (TableReader). Explained in docs/explain/leases.md.

    header, 4096 bytes       words (u64): magic, slots, retired, lease_ttl_ns; token at 64
    slot, 128 bytes          words:
        0  version           even: valid; odd: being changed or gone. Never the same number twice
        1  key               low half of XXH3-128 of the name; 0 = never used, GONE = was used
        2  digest            high half
        3  nbytes | replicas listed << 56
        4-6  locations       segment << OFFSET_BITS | offset
        7  check             XXH3-64 of words 0-6: a snapshot that mixes two states never passes
        8  lease_until_ns  CLOCK_MONOTONIC; stored by readers, extended only
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from store.errors import StoreError
from store.mooncake_store.memory import make_memfd, map_foreign

HEADER_BYTES = 4096
SLOT_BYTES = 128
"""The header is a page. A slot is two lines of a cache, so that a probe reads no third one."""

SLOT_WORDS = SLOT_BYTES // 8
HEADER_WORDS = HEADER_BYTES // 8
MAGIC = 0x334C4254_454B414C
"""First word of a table. Any number works; change it with the layout, so that no old reader misreads it."""

TOKEN_AT, TOKEN_BYTES = 64, 32
GONE = (1 << 64) - 1
U64 = (1 << 64) - 1

OFFSET_BITS = 44
"""Bits of an offset in a location: segments of up to 16 TiB, and 2**20 of them in the life of a master."""
OFFSET_MASK = (1 << OFFSET_BITS) - 1
MAX_SEGMENTS = 1 << (64 - OFFSET_BITS)
MAX_SEGMENT_BYTES = 1 << OFFSET_BITS
MAX_NBYTES = (1 << 48) - 1

LISTED = 3
"""Most replicas that a slot names. A slot of 128 bytes has space for three, and a reader needs one."""

FIRST_SLOTS = 1 << 12
"""Slots of the first table. Any value works: a crowded table is replaced by one of twice the size."""

MAX_LOAD = 0.6
"""Share of slots in use or gone at which a larger table is published: a miss then probes three slots."""

RETRIES = 200
"""Looks at a slot that the master is just changing, before Busy. A change takes a few microseconds."""

_SLOT = struct.Struct("<8Q")
_FIXED = struct.Struct("<7Q")
_KEY, _CHECK, _LEASE = 1, 7, 8


class Found(NamedTuple):
    """A readable object, read from its slot.

    word       index of the slot's first word in the table
    """

    word: int
    version: int
    nbytes: int
    locations: tuple[int, ...]


class Retired(StoreError):
    """The table has been replaced by a larger one: ask the master for it."""


class Busy(StoreError):
    """A slot was changing for longer than a change takes: ask the master."""


def name_hash(name: str) -> tuple[int, int]:
    """Return (key, digest) of a name: the halves of XXH3-128 of its UTF-8. The key is neither 0 nor GONE.

    Raises UnicodeEncodeError for a lone surrogate.
    """
    whole = xxh3_128_intdigest(name.encode())
    return key_of(whole), whole >> 64


def key_of(whole: int) -> int:
    """Return the low half, but neither of the two values that have a meaning of their own."""
    low = whole & U64
    return low if 0 < low < GONE else 1


def free_slots(keys: np.ndarray, slots: int) -> np.ndarray:
    """Return a slot of an empty table for each of these keys, such that linear probing finds all of them.

        keys    (n,) uint64, n < slots

    In the order of their first choices, each key gets that slot or the one after its predecessor's. Those
    that this carries past the end of the table get the first slots that are free.
    """
    first = (keys & np.uint64(slots - 1)).astype(np.int64)
    order, ranks = np.argsort(first, kind="stable"), np.arange(len(keys))
    placed = np.maximum.accumulate(first[order] - ranks) + ranks
    is_late, is_free = placed >= slots, np.ones(slots, bool)
    is_free[placed[~is_late]] = False
    placed[is_late] = np.flatnonzero(is_free)[: is_late.sum()]
    found = np.empty_like(placed)
    found[order] = placed
    return found


class _Table:
    """The mapped memory, as bytes and as words."""

    def __init__(self, memory: mmap.mmap):
        self.memory = memory
        self.words = memoryview(memory).cast("Q")
        self.slots = self.words[1]
        self.mask = self.slots - 1

    def close(self) -> None:
        """Unmap. May be called twice."""
        self.words.release()
        self.memory.close()

    @property
    def token(self) -> bytes:
        """Return a secret that only processes know which may map this memory: the user's own."""
        return bytes(self.memory[TOKEN_AT : TOKEN_AT + TOKEN_BYTES])


class TableReader(_Table):
    """A client's view of the master's table. Any thread may use it.

    Opens the memory through /proc. Raises StoreError when it cannot be mapped or is no such table.
    """

    def __init__(self, pid: int, fd: int, inode: int, nbytes: int):
        own, memory = map_foreign(pid, fd, inode, nbytes)
        os.close(own)
        super().__init__(memory)
        if self.words[0] != MAGIC or nbytes != HEADER_BYTES + self.slots * SLOT_BYTES:
            self.close()
            raise StoreError("the master's table has another layout: both sides must be of one version")
        self.lease_ttl_ns = self.words[3]

    def find(self, whole: int) -> Found | None:
        """Return the readable object of this name (XXH3-128), None when there is none.

        Raises Retired, Busy.
        """
        memory, mask = self.memory, self.mask
        low, digest = whole & U64, whole >> 64
        key = low if 0 < low < GONE else 1
        at, tries = key & mask, 0
        while True:
            offset = HEADER_BYTES + at * SLOT_BYTES
            raw = memory[offset : offset + 64]
            version, found, second, size, *locations, check = _SLOT.unpack(raw)
            if found == key and second == digest:
                if not version & 1 and check == xxh3_64_intdigest(raw[:56]):
                    return Found(offset >> 3, version, size & MAX_NBYTES, tuple(locations[: size >> 56]))
                if self.words[2]:
                    raise Retired("the table has been replaced")
                tries += 1
                if tries > RETRIES:
                    raise Busy("a slot of the table stays in change")
                continue
            if found == 0 or tries > mask + RETRIES:
                if self.words[2]:
                    raise Retired("the table has been replaced")
                return None
            tries += 1
            at = (at + 1) & mask

    def is_still(self, found: Found) -> bool:
        """Tell whether an object is unchanged since it was found: else copied bytes may be another's."""
        return self.words[found.word] == found.version

    def extend_lease(self, found: Found, until_ns: int) -> bool:
        """Let the lease end at until_ns or later. False when the object has changed: it may have no lease."""
        at = found.word + _LEASE
        if self.words[at] < until_ns:
            self.words[at] = until_ns
        return self.words[found.word] == found.version


class TableWriter(_Table):
    """The master's side of the table, for one thread.

    Any client can write anywhere in this memory. So the master reads back only leases, and keeps versions and
    keys itself.

    _keys        key of each slot; 0 or GONE without an object
    _versions    version of each slot; 0 without an object
    _count       slots in use

    Invariant: a slot in use has its even version, its key and its own check; every other is unused or GONE.
    """

    def __init__(self, lease_ttl_ns: int, token: bytes, *, slots: int = FIRST_SLOTS, last_version: int = 0):
        self.nbytes = HEADER_BYTES + slots * SLOT_BYTES
        self.fd, memory = make_memfd("mooncake-lite-table", self.nbytes)
        memory[TOKEN_AT : TOKEN_AT + TOKEN_BYTES] = token
        struct.pack_into("<4Q", memory, 0, MAGIC, slots, 0, lease_ttl_ns)
        super().__init__(memory)
        self.inode = os.fstat(self.fd).st_ino
        self.lease_ttl_ns = lease_ttl_ns
        self._last_version = last_version
        self._keys = array("Q", bytes(8 * slots))
        self._versions = array("Q", bytes(8 * slots))
        self._count = self._gone = 0

    @property
    def is_crowded(self) -> bool:
        """Tell whether a larger (or tidier) table should replace it."""
        return self._count + self._gone > MAX_LOAD * self.slots

    @property
    def is_full(self) -> bool:
        """Tell whether no slot is left for another object."""
        return self._count >= self.slots - 1

    def insert(self, key: int, digest: int, nbytes: int, locations: Sequence[int], lease_ns: int) -> int:
        """Insert an object; return the index of its slot's first word."""
        at = key & self.mask
        while 0 < self._keys[at] < GONE:
            at = (at + 1) & self.mask
        word = HEADER_WORDS + at * SLOT_WORDS
        self._gone -= self._keys[at] == GONE
        self._keys[at] = key
        self._count += 1
        self._write(word, key, digest, nbytes, locations, lease_ns)
        return word

    def replace(self, word: int, key: int, digest: int, nbytes: int, locations: Sequence[int]) -> None:
        """Change the bytes or places of the object in a slot; its lease stays."""
        self._set_changing(word)
        self._write(word, key, digest, nbytes, locations, self.words[word + _LEASE])

    def _write(
        self, word: int, key: int, digest: int, nbytes: int, locations: Sequence[int], lease_ns: int
    ) -> None:
        """Fill a slot, the version last. Until then the version is odd, or the check does not fit."""
        self._last_version += 2
        version = self._versions[(word - HEADER_WORDS) // SLOT_WORDS] = self._last_version
        listed = list(locations[:LISTED])
        size = nbytes | len(listed) << 56
        fixed = _FIXED.pack(version, key, digest, size, *listed, *[0] * (LISTED - len(listed)))
        self.words[word] = version - 1
        self.words[word + _LEASE] = lease_ns
        self.words[word + _CHECK] = xxh3_64_intdigest(fixed)
        start = word << 3
        self.memory[start + 16 : start + 56] = fixed[16:]
        self.words[word + _KEY] = key
        self.words[word] = version

    def _set_changing(self, word: int) -> None:
        self.words[word] = self._versions[(word - HEADER_WORDS) // SLOT_WORDS] | 1

    def lease_until_ns(self, word: int, now_ns: int) -> int:
        """Return when the lease ends. A time that a client stored counts for at most one lease from now."""
        return min(self.words[word + _LEASE], now_ns + self.lease_ttl_ns)

    def extend_lease(self, word: int, until_ns: int) -> None:
        """Let the lease end at until_ns or later."""
        if self.words[word + _LEASE] < until_ns:
            self.words[word + _LEASE] = until_ns

    def lock_unleased(self, words: Sequence[int], now_ns: int) -> list[bool]:
        """Hide those of these slots that have no lease; tell for each slot whether it is hidden now.

        All slots are hidden first, then the leases are read. A reader stores its lease first, then looks at
        the version. So either the reader sees the change, or the master sees the lease. `remove` or `unlock`
        follows.
        """
        for word in words:
            self._set_changing(word)
        free = [self.lease_until_ns(word, now_ns) <= now_ns for word in words]
        for word, is_free in zip(words, free):
            if not is_free:
                self.unlock(word)
        return free

    def unlock(self, word: int) -> None:
        """Show the object of a slot again."""
        self.words[word] = self._versions[(word - HEADER_WORDS) // SLOT_WORDS]

    def remove(self, word: int) -> None:
        """Remove the object of a slot. A reader that copies its bytes now finds out afterwards."""
        self._set_changing(word)
        at = (word - HEADER_WORDS) // SLOT_WORDS
        self._versions[at] = 0
        self._count -= 1
        is_last = self._keys[(at + 1) & self.mask] == 0  # no search goes past this slot
        self._keys[at] = self.words[word + _KEY] = 0 if is_last else GONE
        self._gone += not is_last

    def regrown(self) -> tuple[TableWriter, dict[int, int]]:
        """Return a table that is a third full at most, and {old word: new word} of each slot.

        This table is then retired: its slots are hidden, and moved with leases that came until then. All
        slots move in a few operations over arrays, because clients wait meanwhile.
        """
        slots = FIRST_SLOTS
        while 3 * self._count > slots:
            slots *= 2
        made = TableWriter(self.lease_ttl_ns, self.token, slots=slots, last_version=self._last_version)
        self.words[2] = 1
        old = np.flatnonzero(np.frombuffer(self._versions, np.uint64))
        new = made._take_over(self, old)
        before, after = ((HEADER_WORDS + at * SLOT_WORDS).tolist() for at in (old, new))
        return made, dict(zip(before, after))

    def _take_over(self, old: TableWriter, slots: np.ndarray) -> np.ndarray:
        """Copy slots of the retired table with their versions, on which clients that have just read rely.

        Returns the new slot of each.
        """
        keys, versions = (np.frombuffer(words, np.uint64)[slots] for words in (old._keys, old._versions))
        new = free_slots(keys, self.slots)
        np.frombuffer(self._keys, np.uint64)[new] = keys
        np.frombuffer(self._versions, np.uint64)[new] = versions
        self._count = len(slots)
        here, there = (
            np.frombuffer(table.memory, np.uint64)[HEADER_WORDS:].reshape(-1, SLOT_WORDS)
            for table in (self, old)
        )
        here[new, :_LEASE] = there[slots, :_LEASE]
        there[slots, 0] = versions | np.uint64(1)
        here[new, _LEASE] = there[slots, _LEASE]
        return new

    def close(self) -> None:
        """Unmap and give the memory back, once no reader maps it either."""
        super().close()
        os.close(self.fd)

    def check(self) -> None:
        """Assert the invariant (tests)."""
        gone = count = 0
        for at in range(self.slots):
            word = HEADER_WORDS + at * SLOT_WORDS
            key = self.words[word + _KEY]
            assert key == self._keys[at], f"slot {at} has a key that the master has not written"
            if self._versions[at]:
                raw = bytes(self.memory[(word << 3) : (word << 3) + 64])
                assert self.words[word] % 2 == 0, f"slot {at} is in change"
                assert self.words[word] == self._versions[at]
                assert self.words[word + _CHECK] == xxh3_64_intdigest(raw[:56]), f"slot {at} is damaged"
                assert key not in (0, GONE)
                count += 1
            else:
                assert key in (0, GONE), f"slot {at} belongs to no object"
                gone += key == GONE
        assert (count, gone) == (self._count, self._gone)
