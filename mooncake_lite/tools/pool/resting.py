"""`mooncake-lite store ... FOLDER`: the blocks at rest in a tier's folder, or in the folders of several.

Used by `commands`, which asks it and a running pool (`live.py`) alike. Explained in
docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mooncake_lite.config.progress import byte_bar
from mooncake_lite.errors import UserError
from store.errors import StoreError, TierInUse
from store.ssd.tier_at_rest import (
    RestingBlock,
    blocks,
    compact,
    find_folders,
    look,
    read_block,
    remove,
    verify,
)


class RestingPool:
    """Everything at rest in WHERE. Raises StoreError when that is no tier."""

    def __init__(self, where: Path) -> None:
        self._where = where
        self._folders = [look(folder) for folder in find_folders(where)]

    def rows(self) -> list[dict[str, Any]]:
        """Every row of every file."""
        return [
            {
                "key": f"{block.key:016x}",
                "digest": f"{int(block.file.digests[block.row]):016x}",
                "bytes": block.file.header.layout.nbytes,
                "file": _name(block.file.path),
                "row": block.row,
                "state": block.state,
            }
            for block in blocks(self._folders)
        ]

    def figures(self) -> list[dict[str, Any]]:
        """A row for each folder."""
        served = self._served()
        rows = []
        for folder in self._folders:
            count = sum(file.header.blocks for file in folder.files)
            live = sum(block.file.path.parent == folder.path for block in served)
            rows.append(
                {
                    "folder": str(folder.path),
                    "files": len(folder.files),
                    "bytes": sum(file.header.file_nbytes for file in folder.files),
                    "blocks": live,
                    "dead": count - live,
                    "models": len({file.header.fingerprint for file in folder.files}),
                    "broken": len(folder.broken),
                    "set aside": len(folder.set_aside),
                    "unsealed": len(folder.unsealed),
                    "held by": "" if folder.held_by is None else f"process {folder.held_by or '?'}",
                }
            )
        return rows

    def get(self, key: int) -> bytes:
        """The verified bytes of a block. Raises UserError when it is not there."""
        found = [block for block in self._served() if block.key == key]
        if not found:
            raise self._missing(key)
        return read_block(found[-1])

    def remove(self, keys: list[int], *, force: bool) -> tuple[int, int]:
        """Remove these blocks, all or none; without keys all that are served. Nobody may be using them."""
        self._must_be_unused()
        there = {block.key for block in self._served()}
        wanted = set(keys) or there
        if missing := wanted - there:
            raise self._missing(min(missing))
        for folder in self._folders:
            remove(folder.path, wanted)
        return len(wanted), 0

    def verify(self) -> tuple[list[dict[str, Any]], bool]:
        """Compare every block with its checksums: a row for each file, and whether all are good."""
        found = [block for block in blocks(self._folders) if block.state != "removed"]
        good = {"blocks": 0, "bytes": 0, "bad": 0, "problem": ""}
        rows: dict[Path, dict[str, Any]] = {
            file.path: {"file": _name(file.path), **good} for folder in self._folders for file in folder.files
        }
        with byte_bar("verifying", sum(block.file.header.layout.nbytes for block in found)) as advance:
            for block, problem in verify(found):
                row, nbytes = rows[block.file.path], block.file.header.layout.nbytes
                row["blocks"] += 1
                row["bytes"] += nbytes
                row["bad"] += bool(problem)
                row["problem"] = row["problem"] or problem
                advance(nbytes)
        for folder in self._folders:
            for path, reason in folder.broken:
                rows[path] = {"file": _name(path), **good, "problem": reason}
        return list(rows.values()), not any(row["problem"] for row in rows.values())

    def compact(self) -> list[dict[str, Any]]:
        """Rewrite what is half dead or small: a row for each folder. Nobody may be using them."""
        self._must_be_unused()
        with byte_bar("compacting", None) as advance:
            for folder in self._folders:
                compact(folder.path, advance)
        rows = []
        for old in self._folders:
            row: dict[str, Any] = {"folder": str(old.path)}
            for name, folder in (("before", old), ("after", look(old.path))):
                row[f"files {name}"] = len(folder.files)
                row[f"bytes {name}"] = sum(file.header.file_nbytes for file in folder.files)
            rows.append(row)
        return rows

    def _served(self) -> list[RestingBlock]:
        return [block for block in blocks(self._folders) if block.state == "served"]

    def _missing(self, key: int) -> UserError:
        return UserError(f"{self._where} holds no block {key:016x}; `mooncake-lite store ls` lists its keys")

    def _must_be_unused(self) -> None:
        """Raise TierInUse unless nobody has the folders."""
        for folder in self._folders:
            if folder.held_by is not None:
                raise TierInUse(folder.path, folder.held_by)


@contextmanager
def resting_pool(where: Path) -> Iterator[RestingPool]:
    """What the store complains of is the user's to know: one line, exit code 2."""
    try:
        yield RestingPool(where)
    except StoreError as error:
        raise UserError(str(error)) from None


def _name(path: Path) -> str:
    """A segment file, and the folder that it is numbered in."""
    return f"{path.parent.name}/{path.name}"
