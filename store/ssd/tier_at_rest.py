"""A tier's folders, inspected from outside: list and verify their blocks, compact them, remove keys.

Called by `mooncake-lite store`. All but `compact` and `remove` only read, and may be used while a cluster
writes: sealed files never change, though one may vanish. Explained in docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from store.errors import BadBlock, BlockMissing, SegmentFileError, TierFolderError
from store.layout import BlockLayout
from store.ssd.segment_file import SealedFile, open_sealed
from store.ssd.tier import SEGMENT_NBYTES, HDF5Tier
from store.ssd.tier_folder import BAD_SUFFIX, OPEN_SUFFIX, SEALED, TierFolder, lock_holder, store_folders
from store.ssd.tier_removals import read_removals

NO_LIMIT = 1 << 62
STEP_NBYTES = 16 << 20
"""Bytes that are compacted between two reports of progress. Any value works that takes a moment."""


@dataclass(slots=True)
class RestingFolder:
    """One folder of a tier.

    files      sealed and whole, coldest first
    removed    path -> rows that were removed for good
    broken     (path, reason) of sealed files that fail their checks
    unsealed   being written, or left by a killed process; set_aside: failed a check at some start
    held_by    pid of the process that has the folder; 0: an unknown process; None: no process
    """

    path: Path
    files: list[SealedFile] = field(default_factory=list)
    removed: dict[Path, set[int]] = field(default_factory=dict)
    broken: list[tuple[Path, str]] = field(default_factory=list)
    unsealed: list[Path] = field(default_factory=list)
    set_aside: list[Path] = field(default_factory=list)
    held_by: int | None = None


@dataclass(frozen=True, slots=True)
class RestingBlock:
    """One row of a sealed file. state: "served", "removed", or "copy": a younger file has the key too."""

    file: SealedFile
    row: int
    state: str

    @property
    def key(self) -> int:
        """Return its prefix key."""
        return int(self.file.keys[self.row])


def find_folders(where: Path) -> list[Path]:
    """Return [where] if it is one rank's folder, else its store-<j>. Raises TierFolderError without any."""
    try:
        names = os.listdir(where)
    except OSError as error:
        raise TierFolderError(where, f"cannot be read: {error.strerror}") from None
    if any(name == "lock" or SEALED.fullmatch(name.removesuffix(BAD_SUFFIX)) for name in names):
        return [where]
    found = store_folders(where)
    if not found:
        raise TierFolderError(where, "no tier: neither segment files nor store-<j> folders in it")
    return found


def look(folder: Path) -> RestingFolder:
    """Check every sealed file's header and tables, without its blocks. Raises TierFolderError."""
    found = RestingFolder(folder)
    dead: dict[int, dict[int, int]] = {}
    try:
        names = sorted(os.listdir(folder))
        for number, row, key in read_removals(folder)[0]:
            dead.setdefault(number, {})[row] = key
        found.held_by = lock_holder(folder)
    except OSError as error:
        raise TierFolderError(folder, f"cannot be read: {error.strerror}") from None
    used: dict[Path, int] = {}
    for name in names:
        path, match = folder / name, SEALED.fullmatch(name)
        if name.endswith(OPEN_SUFFIX):
            found.unsealed.append(path)
        elif name.endswith(BAD_SUFFIX):
            found.set_aside.append(path)
        elif match:
            try:
                used[path] = path.lstat().st_mtime_ns
                file = open_sealed(path, int(match[1]))
            except FileNotFoundError:
                continue  # evicted meanwhile
            except (SegmentFileError, OSError) as error:
                reason = error.reason if isinstance(error, SegmentFileError) else error.strerror
                found.broken.append((path, reason or "cannot be read"))
                continue
            rows = dead.get(file.number, {}).items()
            found.removed[path] = {
                row for row, key in rows if row < file.header.blocks and int(file.keys[row]) == key
            }
            found.files.append(file)
    found.files.sort(key=lambda file: (used[file.path], file.number))
    return found


def blocks(folders: Iterable[RestingFolder]) -> list[RestingBlock]:
    """Return every row of every sealed file, in their order; each key of a model is served by one row."""
    served: dict[tuple[bytes, BlockLayout, int], tuple[SealedFile, int]] = {}
    rows = []
    for folder in folders:
        for file in folder.files:
            for row, key in enumerate(file.keys.tolist()):
                removed = row in folder.removed[file.path]
                rows.append((file, row, removed))
                if not removed:
                    served[(file.header.fingerprint, file.header.layout, key)] = (file, row)
    chosen = set(map(_place, served.values()))
    return [
        RestingBlock(
            file, row, "removed" if removed else "served" if _place((file, row)) in chosen else "copy"
        )
        for file, row, removed in rows
    ]


def _place(found: tuple[SealedFile, int]) -> tuple[Path, int]:
    return found[0].path, found[1]


def read_block(block: RestingBlock) -> bytes:
    """Read the bytes of one block.

    Raises BadBlock when they are not those that were written, BlockMissing when the file was deleted.
    """
    file = block.file
    out = bytearray(file.header.layout.nbytes)
    try:
        file.fd = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise BlockMissing(block.key) from None
    except OSError as error:
        raise BadBlock(block.key, file.path, error.strerror or "cannot be opened") from None
    try:
        file.read_block(block.row, memoryview(out))
    finally:
        os.close(file.fd)
        file.fd = -1
    return bytes(out)


def verify(found: Iterable[RestingBlock]) -> Iterator[tuple[RestingBlock, str]]:
    """Read blocks and compare their checksums; yield (block, "") or (block, what is wrong).

    Blocks that are removed, or deleted meanwhile, are skipped.
    """
    for block in found:
        if block.state == "removed":
            continue
        try:
            read_block(block)
        except BlockMissing:
            continue
        except BadBlock as error:
            yield block, str(error)
        else:
            yield block, ""


def compact(folder: Path, tell: Callable[[int], None]) -> None:
    """Rewrite all files of a folder that are half dead or small. tell: called with the bytes copied.

    As at every start, unsealed files are deleted and broken ones set aside. Raises TierInUse while another
    process has the folder, TierError.
    """
    with closing(_tiers(folder)) as tiers:
        for tier in tiers:
            while copied := tier.compact(STEP_NBYTES, merge_small=True):
                tell(copied)


def remove(folder: Path, keys: Collection[int]) -> None:
    """Remove blocks of every model from a folder for good; unknown keys are ignored.

    As at every start, unsealed files are deleted and broken ones set aside. Raises TierInUse,
    TierError.
    """
    with closing(_tiers(folder)) as tiers:
        for tier in tiers:
            tier.remove(keys)


def _tiers(folder: Path) -> Generator[HDF5Tier, None, None]:
    """Open the tier of each model in a folder, one after the other. Raises TierInUse, TierError."""
    TierFolder(folder).release()  # raises while another process has it, even if it is empty
    kinds = {(file.header.layout, file.header.fingerprint) for file in look(folder).files}
    for layout, fingerprint in sorted(kinds, key=repr):
        tier = HDF5Tier(folder, NO_LIMIT, layout, fingerprint.hex(), segment_bytes=SEGMENT_NBYTES)
        try:
            yield tier
        finally:
            tier.close()
