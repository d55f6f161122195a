"""The sealed files of one tier: the file that serves each key, open files, and the order of eviction.

Used by `store.ssd.tier` alone. Knows no folder, no open file, no clock; its lock makes it safe for one
writing and any number of loading threads. Explained in docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from store.errors import BadBlock, BlockMissing
from store.ssd.segment_file import SealedFile
from store.ssd.tier_folder import sync_folder

MAX_OPEN_FILES = 64
"""A tier sealed every second can have thousands of files; opening one again takes 5 us."""

TOO_MANY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say nothing about the file: no descriptor or no memory is left."""


class SealedSet:
    """All sealed files of a tier, and the index over them.

        _index    key -> (file, row); of two files with one key the younger serves it
        _files    all files; nbytes is the sum of their sizes
        _open     those with an fd, in the order of their opening
        _evicted  keys that are gone and not yet reported by take_evicted
        _doomed   deleted, not unlinked yet; of the thread that writes alone

    Invariant: every indexed row belongs to a file of _files that is not deleted; `live` of a file is the
    number of its rows that are indexed.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.files_evicted = self.blocks_evicted = 0
        self._lock = threading.Lock()
        self._index: dict[int, tuple[SealedFile, int]] = {}
        self._files: dict[SealedFile, None] = {}
        self._open: dict[SealedFile, None] = {}
        self._evicted: list[int] = []
        self._doomed: list[Path] = []
        self._uses = count(1)
        self._hottest: SealedFile | None = None

    def __contains__(self, key: int) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    def serve(self, file: SealedFile, *, new: bool, dead: Container[int] = ()) -> None:
        """Index a file as the hottest one.

        new    sealed just now, and not found at the start
        dead   rows that were removed
        """
        with self._lock:
            self._note_use(file, persist=new)
            self._files[file] = None
            self.nbytes += file.header.file_nbytes
            if file.same_kind:
                for row, key in enumerate(file.keys.tolist()):
                    if row not in dead:
                        self._point(key, file, row)

    def replace(self, old: Sequence[SealedFile], file: SealedFile) -> None:
        """Serve the blocks of old files from this copy of them, and delete the old files.

        The copy is as hot as the hottest of them was.
        """
        with self._lock:
            hottest = max(old, key=lambda other: other.last_use)
            file.last_use = hottest.last_use
            with suppress(OSError):
                used_ns = hottest.path.lstat().st_mtime_ns
                os.utime(file.path, ns=(used_ns, used_ns))
            self._files[file] = None
            self.nbytes += file.header.file_nbytes
            for row, key in enumerate(file.keys.tolist()):
                if self._index.get(key, (None, 0))[0] in old:
                    self._point(key, file, row)
            for other in old:
                self._delete(other)
        self._unlink_doomed()

    def rows_of(self, keys: Iterable[int]) -> list[tuple[SealedFile, int, int]]:
        """Return (file, row, key) of every copy of these keys, served or not. For the writing thread."""
        wanted = set(keys)
        with self._lock:
            files = [file for file in self._files if file.same_kind]
        # Without the lock: a million rows take 0.1 s, and only this thread adds and deletes files.
        return [
            (file, row, key) for file in files for row, key in enumerate(file.keys.tolist()) if key in wanted
        ]

    def served_rows(self, file: SealedFile) -> list[int]:
        """Return the rows of a file that the index points to."""
        with self._lock:
            return [row for row, key in enumerate(file.keys.tolist()) if self._index.get(key) == (file, row)]

    def files(self) -> list[SealedFile]:
        """Return all files, the least recently used first."""
        with self._lock:
            return sorted(self._files, key=lambda file: file.last_use)

    def delete_empty(self) -> None:
        """Delete the files that serve no block any more, but not those of other models."""
        with self._lock:
            for file in [file for file in self._files if file.same_kind and not file.live]:
                self._delete(file)
        self._unlink_doomed()

    def delete_for_good(self, files: Sequence[SealedFile]) -> bool:
        """Delete files so that no crash brings their blocks back; tell whether that was possible.

        Their keys count as evicted.
        """
        with self._lock:
            for file in files:
                if file in self._files:
                    self._evict(file)
        self._unlink_doomed()
        try:
            for folder in {file.path.parent for file in files}:
                sync_folder(folder)
        except OSError:
            return False
        return not any(file.path.exists() for file in files)

    def blocks(self) -> tuple[list[int], list[int]]:
        """Return (keys, digests) of all served blocks, hottest last."""
        keys: list[int] = []
        digests: list[int] = []
        with self._lock:
            for file in sorted(self._files, key=lambda file: file.last_use):
                for row, (key, digest) in enumerate(zip(file.keys.tolist(), file.digests.tolist())):
                    if self._index.get(key) == (file, row):
                        keys.append(key)
                        digests.append(digest)
        return keys, digests

    def forget(self, keys: Iterable[int], *, tell: bool = False) -> None:
        """Stop serving these keys; unknown ones are ignored. tell: report them by take_evicted."""
        with self._lock:
            for key in keys:
                if self._unpoint(key) and tell:
                    self._evicted.append(key)

    def acquire(self, key: int, digest: int | None, *, use: bool = True) -> tuple[SealedFile, int]:
        """Return the file and row of a key. The file stays open until give_back, even if it is evicted.

        use   make the file the hottest one

        Raises BlockMissing (also for another digest); BadBlock when the file cannot be opened, OSError when
        this process can open none (TOO_MANY).
        """
        with self._lock:
            file, row = self._index.get(key, (None, 0))
            if file is None or (digest is not None and int(file.digests[row]) != digest):
                raise BlockMissing(key)
            if file.fd < 0:
                self._open_file(file, key)
            file.readers += 1
            if use and file is not self._hottest:
                self._note_use(file, persist=True)
            return file, row

    def give_back(self, file: SealedFile) -> None:
        """Release a file: the thread that acquired it has read it."""
        with self._lock:
            file.readers -= 1
            if file.deleted:
                self._close_file(file)
            if len(self._open) > MAX_OPEN_FILES:
                idle = [other for other in self._open if not other.readers]
                if idle:
                    self._close_file(min(idle, key=lambda other: other.last_use))

    def evict_to(self, nbytes: int) -> None:
        """Delete files until the rest has at most nbytes.

        Files of other models are deleted first, then the least recently used ones.
        """
        if self.nbytes <= nbytes:
            return
        with self._lock:
            for file in sorted(self._files, key=lambda file: (file.same_kind, file.last_use)):
                if self.nbytes <= nbytes:
                    break
                self._evict(file)
        self._unlink_doomed()

    def take_evicted(self) -> list[int]:
        """Return the keys that were evicted, or found bad during a rewrite, since the last call."""
        with self._lock:
            evicted, self._evicted = self._evicted, []
        return evicted

    def close(self) -> None:
        """Stop serving. Files that are being read are closed by their readers."""
        with self._lock:
            self._index.clear()
            for file in self._files:
                file.deleted, file.live = True, 0
                self._close_file(file)
            self._files.clear()
            self.nbytes = 0

    def check(self) -> None:
        """Assert the invariant (tests)."""
        with self._lock:
            counts = dict.fromkeys(self._files, 0)
            for key, (file, row) in self._index.items():
                assert int(file.keys[row]) == key
                assert not file.deleted
                counts[file] += 1
            assert counts == {file: file.live for file in self._files}
            assert self.nbytes == sum(file.header.file_nbytes for file in self._files)
            assert all(file.fd >= 0 for file in self._open)

    def _evict(self, file: SealedFile) -> None:
        self.files_evicted += 1
        self.blocks_evicted += self._delete(file)

    def _delete(self, file: SealedFile) -> int:
        """Take a file out of the index; return how many keys it served. _unlink_doomed unlinks it later."""
        self._doomed.append(file.path)
        del self._files[file]
        self.nbytes -= file.header.file_nbytes
        file.deleted = True
        self._close_file(file)
        gone = [key for key in file.keys.tolist() if self._index.get(key, (None, 0))[0] is file]
        for key in gone:
            self._unpoint(key)
        self._evicted += gone
        return len(gone)

    def _unlink_doomed(self) -> None:
        """Unlink deleted files, without the lock: freeing 64 MiB of pages takes 10 ms, while others load."""
        while self._doomed:
            with suppress(OSError):  # if that fails, the next start finds the file again
                self._doomed.pop().unlink()

    def _point(self, key: int, file: SealedFile, row: int) -> None:
        self._unpoint(key)
        self._index[key] = (file, row)
        file.live += 1

    def _unpoint(self, key: int) -> bool:
        file, _ = self._index.pop(key, (None, 0))
        if file is None:
            return False
        file.live -= 1
        return True

    def _note_use(self, file: SealedFile, *, persist: bool) -> None:
        """Make a file the hottest one.

        The next start knows the order by the modification times. They are set to the nanosecond, because the
        file system's own clock ticks in milliseconds.
        """
        self._hottest = file
        file.last_use = next(self._uses)
        if persist:
            with suppress(OSError):
                os.utime(file.path, ns=(time.time_ns(), time.time_ns()))

    def _open_file(self, file: SealedFile, key: int) -> None:
        try:
            file.fd = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in TOO_MANY:
                raise
            raise BadBlock(key, file.path, error.strerror or "cannot be opened") from None
        self._open[file] = None

    def _close_file(self, file: SealedFile) -> None:
        """Close its fd, unless it has none or a thread still reads."""
        if file.fd >= 0 and not file.readers:
            os.close(file.fd)
            file.fd = -1
            del self._open[file]
