"""The digest of a file's bytes, remembered in the cache folder so that it is computed once.

Used to notice a damaged model folder and to tell weights apart. A remembered digest is believed while
the file's path, size, inode and times are what they were; where the cache folder cannot be written,
nothing is remembered and everything still works. Explained in docs/explain/model.md.
"""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from mooncake_lite.config import cache
from mooncake_lite.config.files import replace_file
from mooncake_lite.errors import CacheError

DIGEST_BYTES = 16
REMEMBER_FROM_BYTES = 1 << 20
"""Hashing a smaller file (10 GB/s) costs less than looking its digest up."""

_CHUNK_BYTES = 4 << 20


def file_digest(path: Path, *, remembered: bool = True) -> bytes:
    """XXH3-128 of the file's bytes (16 bytes), equal on every machine. Raises OSError when it cannot be read.

    remembered=False always reads the bytes: for a file that will not stay where it is.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        key = _stamp(path, status)
        remembered = remembered and status.st_size >= REMEMBER_FROM_BYTES
        if remembered and (known := _recall(key)) is not None:
            return known
        digest = _hash(file.fileno())
        unchanged = _stamp(path, os.fstat(file.fileno())) == key
    if remembered and unchanged:
        _remember(key, digest)
    return digest


def _hash(descriptor: int) -> bytes:
    state = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    offset = 0
    while count := os.preadv(descriptor, [buffer], offset):
        state.update(buffer[:count])
        offset += count
    return state.digest()


def _stamp(path: Path, status: os.stat_result) -> str:
    """Name of the note for this state of this file. ctime is in it because mtime can be set back."""
    fields = (
        os.path.abspath(path),
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
    return xxhash.xxh3_128(repr(fields).encode("utf-8", "surrogateescape")).hexdigest()


def _recall(key: str) -> bytes | None:
    try:
        note = (cache.cache_folder() / "digests" / key).read_bytes()
    except (OSError, CacheError):
        return None
    # The note proves itself: a torn one would otherwise be believed.
    if len(note) != 2 * DIGEST_BYTES or note[DIGEST_BYTES:] != _proof(key, note[:DIGEST_BYTES]):
        return None
    return note[:DIGEST_BYTES]


def _remember(key: str, digest: bytes) -> None:
    try:
        replace_file(cache.subfolder("digests") / key, digest + _proof(key, digest))
    except (OSError, CacheError):
        return


def _proof(key: str, digest: bytes) -> bytes:
    return xxhash.xxh3_128(key.encode() + digest).digest()
