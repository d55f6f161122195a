"""The cache folder: where pulled models, remembered digests and tables of measured kernels live.

Used by model/ and by the command line. It knows paths, locks and the operating system's complaints
about them, and nothing of what lies inside. Explained in docs/explain/model.md.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mooncake_lite.errors import CacheError

VARIABLE = "MOONCAKE_LITE_CACHE"

SUBFOLDERS = ("models", "digests", "locks", "linear-paths")
KERNELS = "kernels-*"
"""With the folders of compiled kernels (kernels_numba/runtime.py makes them) all that this project ever
makes in the folder, and so all that `clear` may remove: the variable may point at a folder that holds
other things."""

_FIX = f"set {VARIABLE} to a folder you can write to"


def cache_folder() -> Path:
    """The cache folder, absolute; nothing is created. `$MOONCAKE_LITE_CACHE`, else ~/.cache/mooncake-lite.

    Raises CacheError when the variable is not set and there is no home folder.
    """
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser().absolute()
    try:
        return Path.home() / ".cache" / "mooncake-lite"
    except RuntimeError:
        raise CacheError(f"there is no home folder for the cache; {_FIX}") from None


def subfolder(name: str) -> Path:
    """One of SUBFOLDERS, created (only this user may read it) when it is not there.

    Raises CacheError when it cannot be made.
    """
    if name not in SUBFOLDERS:
        raise ValueError(f"{name!r} is not one of the cache's subfolders {SUBFOLDERS}")
    path = cache_folder() / name
    with cache_errors():
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


@contextmanager
def cache_errors() -> Iterator[None]:
    """Turn an OSError met while writing into the cache folder into a CacheError with the fix."""
    try:
        yield
    except OSError as error:
        folder = cache_folder()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = free_bytes(folder) / 1e6
            raise CacheError(
                f"the cache folder {folder} is full ({free:.0f} MB free); free some space, or "
                f"set {VARIABLE} to a folder on a larger disk"
            ) from None
        raise CacheError(
            f"the cache folder {folder} cannot be used: {error.strerror or error}; {_FIX}"
        ) from None


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write on the disk that holds (or would hold) `folder`; 0 if unknown."""
    for path in (folder, *folder.parents):
        try:
            return shutil.disk_usage(path).free
        except OSError:
            continue
    return 0


@contextmanager
def locked(name: str, timeout_s: float = 900.0) -> Iterator[None]:
    """Hold the lock `name` of the cache folder, against all processes of this host that use it.

    Raises CacheError when the folder cannot be used or another process keeps the lock longer than timeout_s.
    """
    from filelock import FileLock, Timeout  # brings asyncio, which most processes do without

    path = subfolder("locks") / f"{name}.lock"
    lock = FileLock(path, timeout=timeout_s, mode=0o600)
    with cache_errors():
        try:
            lock.acquire()
        except Timeout:
            raise CacheError(
                f"another process has kept {path} locked for {timeout_s:.0f} s; let it end, or stop it"
            ) from None
    try:
        yield
    finally:
        lock.release()


def _made_here() -> list[Path]:
    """The folders in the cache folder that are this project's, the locks' left out."""
    folder = cache_folder()
    named = [folder / name for name in SUBFOLDERS if name != "locks"]
    return [path for path in (*named, *sorted(folder.glob(KERNELS))) if path.is_dir()]


def size_bytes() -> int:
    """Bytes of all files that `clear` would remove."""
    return sum(map(bytes_in, _made_here()))


def bytes_in(made: Path) -> int:
    """Bytes of all files in a folder, also while another process renames or removes some of them."""
    total = 0
    for folder, _, files in os.walk(made):
        for file in files:
            with suppress(OSError):
                status = os.lstat(os.path.join(folder, file))
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def clear_cache() -> int:
    """Remove what this project made in the cache folder (the lock files stay); returns the bytes freed.

    Waits for a pull that is under way. A running cluster keeps the files it has mapped.
    Raises CacheError when something cannot be removed.
    """
    if not cache_folder().is_dir():
        return 0
    with locked("models"):
        before = size_bytes()
        for path in _made_here():
            with cache_errors():
                shutil.rmtree(path)
        return before - size_bytes()
