"""A tier's folder: its lock, its permissions and its files.

Used by `store.ssd.tier`; `adoptable_folders` by store ranks at their start. Knows names and locks, not what
is in a file. Explained in docs/reference/hdf5-tier.md:

    <root>/store-<j>/          0700, one per store rank
        lock                   held (flock) by the process whose pid stands in it
        seg-<n>.h5             sealed: read, never written again
        seg-<n>.h5.open        being written; left by a killed process: deleted at the next start
        seg-<n>.h5.bad         failed a check: set aside for an administrator to inspect or delete
        removed.log            which blocks of sealed files were removed: `store.ssd.tier_removals`
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from store.errors import TierFolderError, TierInUse

SEALED = re.compile(r"seg-(\d{8,12})\.h5")
OPEN_SUFFIX = ".open"
BAD_SUFFIX = ".bad"
LOCK_WAIT_S = 0.1
"""Longest wait for the lock, which `lock_holder` takes for an instant to look at it."""

_STORE = re.compile(r"store-(\d{1,6})")


def segment_name(number: int) -> str:
    """Return the file name of sealed segment `number`."""
    return f"seg-{number:08d}.h5"


def store_folder(root: Path | str, store_index: int) -> Path:
    """Return the folder that store rank `store_index` (0, 1, ...) writes into."""
    return Path(root) / f"store-{store_index}"


def adoptable_folders(root: Path | str, store_index: int, store_count: int) -> list[Path]:
    """Return the folders that store rank `store_index` of `store_count` serves.

    Its own comes first, even if it does not exist yet. Then follows every existing store-<j> with
    j % store_count == store_index, so that a restart with fewer (or more) store ranks loses no block. Raises
    TierFolderError when the root cannot be listed.
    """
    if not 0 <= store_index < store_count:
        raise TierFolderError(root, f"store rank {store_index} of {store_count}")
    own = store_folder(root, store_index)
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return [own]
    except OSError as error:
        raise TierFolderError(root, f"cannot be listed: {error.strerror}") from None
    return [own] + [
        folder
        for number, folder in _numbered(root, names)
        if number % store_count == store_index and number != store_index
    ]


def store_folders(root: Path | str) -> list[Path]:
    """Return every existing store-<j>, in the order of j. Raises OSError when the root cannot be listed."""
    return [folder for _, folder in _numbered(root, os.listdir(root))]


def _numbered(root: Path | str, names: list[str]) -> list[tuple[int, Path]]:
    matches = filter(None, map(_STORE.fullmatch, names))
    numbers = sorted({int(match[1]) for match in matches if match[1] == str(int(match[1]))})
    found = [(number, store_folder(root, number)) for number in numbers]
    return [(number, folder) for number, folder in found if folder.is_dir()]


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class TierFolder:
    """A locked folder. Raises TierInUse when another has it, TierFolderError when it cannot be used."""

    def __init__(self, folder: Path | str):
        self.path = Path(folder)
        try:
            made = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in made:  # what is durable in a folder is lost with the folder's own name
                with suppress(PermissionError):  # a folder that may be written and not read
                    sync_folder(path.parent)
            if self.path.stat().st_mode & 0o077:
                self.path.chmod(0o700)
            self._lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise TierFolderError(
                folder, f"cannot be written: {error.strerror}; give another folder"
            ) from None
        try:
            _lock(self._lock_fd)
        except OSError as error:
            pid = _pid_in(self._lock_fd)
            os.close(self._lock_fd)
            if isinstance(error, BlockingIOError):
                raise TierInUse(folder, pid) from None
            raise TierFolderError(folder, f"cannot be locked: {error.strerror}") from None
        with suppress(OSError):  # a full disk takes no pid; the lock holds without it
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    def sealed(self) -> Iterator[tuple[int, Path]]:
        """Yield (number, path) of each sealed file, ascending."""
        found = ((SEALED.fullmatch(name), name) for name in os.listdir(self.path))
        yield from sorted((int(match[1]), self.path / name) for match, name in found if match)

    def delete_open(self) -> int:
        """Delete the unsealed files of killed processes, as far as possible; return how many."""
        left = [name for name in os.listdir(self.path) if name.endswith(OPEN_SUFFIX)]
        deleted = 0
        for name in left:
            if SEALED.fullmatch(name.removesuffix(OPEN_SUFFIX)):
                with suppress(OSError):
                    (self.path / name).unlink()
                    deleted += 1
        return deleted

    def next_number(self) -> int:
        """Return a number above that of any file here, set-aside ones included."""
        stems = (name.removesuffix(BAD_SUFFIX).removesuffix(OPEN_SUFFIX) for name in os.listdir(self.path))
        return max((int(match[1]) for match in map(SEALED.fullmatch, stems) if match), default=0) + 1

    def set_aside(self, path: Path) -> None:
        """Rename a bad file so that it is never looked at again."""
        path.rename(path.with_name(path.name + BAD_SUFFIX))

    def sync(self) -> None:
        """Make renames and deletions durable. Raises OSError."""
        sync_folder(self.path)

    def release(self) -> None:
        """Release the folder. The lock file stays: if it were deleted, two processes could lock two files."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _lock(fd: int) -> None:
    """Take the lock; wait out `lock_holder`, which has it for an instant. Raises OSError."""
    until = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(LOCK_WAIT_S / 20)
        else:
            return


def lock_holder(folder: Path) -> int | None:
    """Return the pid of the process that has this folder, 0 for an unknown process; None without one.

    Takes the lock for a moment if it is free. Raises OSError.
    """
    try:
        fd = os.open(folder / "lock", os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid_in(fd)
    else:
        return None
    finally:
        os.close(fd)


def _pid_in(fd: int) -> int:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else 0
