"""The log of the rows that were removed for good from a folder's sealed files.

Used by `store.ssd.tier`, and read by `store.ssd.tier_at_rest`. A sealed file is never written again, so
removals are recorded beside it: segment and row, which name one block forever. Drawn in
docs/reference/hdf5-tier.md:

    removed.log     records of 32 B: segment number, row, key, XXH3-64 of the three (u64 each)
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_64_intdigest

from store.errors import TierFolderError
from store.ssd.segment_file import SealedFile
from store.ssd.tier_folder import sync_folder

LOG_NAME = "removed.log"
_RECORD = struct.Struct("<QQQ")
_HASH = struct.Struct("<Q")
RECORD_NBYTES = _RECORD.size + _HASH.size
STALE_RECORDS = 4096
"""The log is written anew when more than this many records, and more than half, name files that are gone."""

Removal = tuple[int, int, int]
"""(segment number, row, key)"""

Copy = tuple[SealedFile, int, int]
"""(file, row, key)"""


def read_removals(folder: Path) -> tuple[list[Removal], int]:
    """Read the log of a folder; return (removals, number of bad records).

    A record cut off at the end was never reported as removed, and is not counted. Raises OSError.
    """
    try:
        raw = (folder / LOG_NAME).read_bytes()
    except FileNotFoundError:
        return [], 0
    removals, bad = [], 0
    for start in range(0, len(raw) - RECORD_NBYTES + 1, RECORD_NBYTES):
        body = raw[start : start + _RECORD.size]
        if _HASH.unpack_from(raw, start + _RECORD.size)[0] == xxh3_64_intdigest(body):
            removals.append(_RECORD.unpack(body))
        else:
            bad += 1
    return removals, bad


class RemovalLog:
    """The log of one locked folder.

        rows          segment number -> row -> key: removed, and the file may still be there
        last_number   the highest segment number ever logged: later files have higher ones
        bad           records that were unreadable at the start; the blocks that they removed are served again

    Invariant: every removal in rows is a record on disk. Belongs to one thread.
    """

    def __init__(self, folder: Path):
        """Read the log, if there is one. Raises OSError when it cannot be read."""
        self._folder = folder
        removals, self.bad = read_removals(folder)
        self._records = len(removals) + self.bad
        self._named = False  # whether the log's own name is durable, as far as this process knows
        self.last_number = 0
        self.rows: dict[int, dict[int, int]] = {}
        self._note(removals)

    def add(self, removals: Collection[Removal]) -> None:
        """Make removals durable. Raises OSError; then they may or may not be durable."""
        if not removals:
            return
        path = self._folder / LOG_NAME
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            data = b"".join(map(_pack, removals))
            # Over what a crash left of a last record, and over nothing else.
            end = os.fstat(fd).st_size // RECORD_NBYTES * RECORD_NBYTES
            if os.pwrite(fd, data, end) != len(data):
                raise OSError(f"{path}: cut short")
            os.fdatasync(fd)
        finally:
            os.close(fd)
        if not self._named:
            sync_folder(self._folder)
            self._named = True
        self._records += len(removals)
        self._note(removals)

    def keep(self, numbers: Collection[int]) -> None:
        """Forget the records of all segments but these; the log is written anew once many are forgotten.

        Raises OSError when the log cannot be written anew; then it stays as it was.
        """
        self.rows = {number: rows for number, rows in self.rows.items() if number in numbers}
        live = sum(map(len, self.rows.values()))
        stale = self._records - live
        if stale <= STALE_RECORDS or stale <= live:
            return
        path = self._folder / LOG_NAME
        fresh = path.with_name(LOG_NAME + ".new")
        removals = [(number, row, key) for number, rows in self.rows.items() for row, key in rows.items()]
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(b"".join(map(_pack, removals)))
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
        sync_folder(self._folder)
        self._records = live

    def check(self) -> None:
        """Assert the invariant (tests)."""
        on_disk, _ = read_removals(self._folder)
        assert {(n, row, key) for n, rows in self.rows.items() for row, key in rows.items()} <= set(on_disk)

    def _note(self, removals: Iterable[Removal]) -> None:
        for number, row, key in removals:
            self.last_number = max(self.last_number, number)
            self.rows.setdefault(number, {})[row] = key


class Removals:
    """The logs of all folders of a tier.

    notes   one line for each log with unreadable records
    """

    def __init__(self, folders: Iterable[Path]):
        """Read the logs. Raises TierFolderError when one cannot be read."""
        self._logs: dict[Path, RemovalLog] = {}
        self.notes: list[str] = []
        for folder in folders:
            try:
                log = self._logs[folder] = RemovalLog(folder)
            except OSError as error:
                raise TierFolderError(folder, f"{LOG_NAME} cannot be read: {error.strerror}") from None
            if log.bad:
                self.notes.append(f"{folder / LOG_NAME}: {log.bad} unreadable records ignored")

    def last_number(self, folder: Path) -> int:
        """Return the highest segment number in a folder's log, 0 without any."""
        return self._logs[folder].last_number

    def dead_rows(self, file: SealedFile) -> set[int]:
        """Return the rows of this file that were removed."""
        rows = self._logs[file.path.parent].rows.get(file.number, {})
        return {row for row, key in rows.items() if row < file.header.blocks and int(file.keys[row]) == key}

    def unknown(self, copies: Iterable[Copy]) -> list[Copy]:
        """Return the copies that no record names as removed."""

        def known(file: SealedFile, row: int) -> int | None:
            return self._logs[file.path.parent].rows.get(file.number, {}).get(row)

        return [(file, row, key) for file, row, key in copies if known(file, row) != key]

    def add(self, copies: Iterable[Copy]) -> None:
        """Record copies, (file, row, key), as removed for good. Raises OSError."""
        by_folder: dict[Path, list[Removal]] = {}
        for file, row, key in copies:
            by_folder.setdefault(file.path.parent, []).append((file.number, row, key))
        for folder, removals in by_folder.items():
            self._logs[folder].add(removals)

    def prune(self, files: Iterable[SealedFile]) -> None:
        """Forget removals from all files but these: the others are gone."""
        here: dict[Path, set[int]] = {folder: set() for folder in self._logs}
        for file in files:
            here[file.path.parent].add(file.number)
        for folder, log in self._logs.items():
            with suppress(OSError):  # it stays longer than it had to
                log.keep(here[folder])

    def check(self) -> None:
        """Assert the invariant of every log (tests)."""
        for log in self._logs.values():
            log.check()


def _pack(removal: Removal) -> bytes:
    body = _RECORD.pack(*removal)
    return body + _HASH.pack(xxh3_64_intdigest(body))
