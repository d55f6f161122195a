"""The child's side of 3e: opens the files that the tests send, and tells what was seen.

It runs beside a student's code, so it knows no expected value. It is apart from drive.py because only this
task needs NumPy, which takes longer to import than most tests take.
"""

from __future__ import annotations

import base64
import os
import tempfile
from pathlib import Path
from typing import Any

import store.ssd.segment_file
from store.errors import BadBlock, SegmentFileError
from store.layout import BlockLayout


class WatchedOs:
    """`os` in the file of `open_sealed`: counts the bytes that are read, and remembers what is opened."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.opened: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, *arguments: Any, **named: Any) -> int:
        """Open a file."""
        self.opened.append(os.open(*arguments, **named))
        return self.opened[-1]

    def pread(self, fd: int, nbytes: int, at: int) -> bytes:
        """Count the bytes of a read."""
        found = os.pread(fd, nbytes, at)
        self.read_bytes += len(found)
        return found

    def read(self, fd: int, nbytes: int) -> bytes:
        """Count the bytes of a read."""
        found = os.read(fd, nbytes)
        self.read_bytes += len(found)
        return found

    def preadv(self, fd: int, buffers: Any, at: int) -> int:
        """Count the bytes of a read."""
        found = os.preadv(fd, buffers, at)
        self.read_bytes += found
        return found

    def left_open(self) -> int:
        """Close what was left open; return how many files those were."""
        count = 0
        for fd in set(self.opened):
            try:
                os.close(fd)
            except OSError:
                continue
            count += 1
        return count


def edited(data: bytes, edits: list[list[Any]]) -> bytes:
    """Damage the bytes of a file.

    Edits: ["flip", byte, bit], ["cut", bytes left], ["grow", bytes more], ["zero", begin, end].
    """
    changed = bytearray(data)
    for verb, *more in edits:
        if verb == "flip":
            changed[more[0]] ^= 1 << more[1]
        elif verb == "cut":
            del changed[more[0] :]
        elif verb == "grow":
            changed += bytes(more[0])
        else:
            changed[more[0] : more[1]] = bytes(more[1] - more[0])
    return bytes(changed)


def opened(inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Open files, whole and damaged, and tell of each what came back.

    file                  its bytes, as base64
    edits                 what a crash or a bad disk has done to it
    kind                  "file", or "link" to one, or "missing"
    layout, fingerprint   of the model that asks; None for none
    """
    seen = []
    with tempfile.TemporaryDirectory() as folder:
        for number, given in enumerate(inputs):
            path = Path(folder) / f"seg-{number:08}.h5"
            real = path.with_suffix(".real") if given["kind"] == "link" else path
            if given["kind"] != "missing":
                real.write_bytes(edited(base64.b64decode(given["file"]), given["edits"]))
            if given["kind"] == "link":
                path.symlink_to(real)
            seen.append(_opened(path, number, given))
    return seen


def _opened(path: Path, number: int, given: dict[str, Any]) -> dict[str, Any]:
    layout = BlockLayout(*given["layout"]) if given["layout"] else None
    watched = WatchedOs()
    vars(store.ssd.segment_file)["os"] = watched
    told: dict[str, Any] = {"raised": "", "message": ""}
    file = None
    try:
        file = store.ssd.segment_file.open_sealed(path, number, layout, bytes.fromhex(given["fingerprint"]))
    except (SegmentFileError, OSError) as error:
        told = {"raised": type(error).__name__, "message": str(error).replace(str(path.parent), "...")}
    finally:
        vars(store.ssd.segment_file)["os"] = os
        told["left_open"] = watched.left_open()
    told["read"] = watched.read_bytes
    if file is None:
        return told | {"returned": "None"}
    told["returned"] = type(file).__name__
    return told | {
        "named": [file.path == path, file.number == number],
        "keys": file.keys.tolist(),
        "digests": file.digests.tolist(),
        "offsets": file.offsets.tolist(),
        "checksums": file.checksums.tolist(),
        "same_kind": bool(file.same_kind),
        "blocks": file.header.blocks,
        "bad_rows": bad_rows(file) if given["reads"] else [],
    }


def bad_rows(file: store.ssd.segment_file.SealedFile) -> list[int]:
    """Read all blocks of a file; return the rows of those whose bytes are not what was written."""
    out = memoryview(bytearray(file.header.layout.nbytes))
    bad = []
    file.fd = os.open(file.path, os.O_RDONLY)
    try:
        for row in range(len(file.keys)):
            try:
                file.read_block(row, out)
            except BadBlock:
                bad.append(row)
    finally:
        os.close(file.fd)
    return bad


CALLS = {"opened": opened}
