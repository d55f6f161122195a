"""Joins the parts of a run into one file that Perfetto and chrome://tracing open.

Called at the end of a run by the launcher, or by rank 0 under a user's own mpirun. It copies bytes and parses
nothing, so a trace of 256 MiB takes less than a second. See docs/how-to/trace.md.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

import mooncake_lite

PIECE_NBYTES = 64 << 10
"""A line is much shorter: that of a step names at most eight requests."""


class Merged(NamedTuple):
    """What a merge has written. torn: parts whose last line was incomplete and was left out."""

    parts: int
    nbytes: int
    torn: int


def merge(folder: Path, target: Path) -> Merged:
    """Join all parts in a run folder, in the order of their processes, into a new file.

    Writes nothing when there is no part. Raises OSError when the file cannot be made, or exists.
    """
    parts = sorted(folder.glob("trace-*.part"), key=lambda path: int(path.stem.removeprefix("trace-")))
    if not parts:
        return Merged(0, 0, 0)
    head = {"displayTimeUnit": "ms", "otherData": {"version": f"mooncake-lite {mooncake_lite.__version__}"}}
    torn = 0
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(head)[:-1] + b',"traceEvents":[\n')
        for part in parts:
            torn += not _copy(part, file)
        file.write(
            b'{"ph":"M","pid":0,"tid":0,"name":"trace_end"}\n]}\n'
        )  # lines end with a comma, this does not
        return Merged(len(parts), file.tell(), torn)


def merged_line(folder: Path, target: Path) -> str:
    """Join the parts of a run, and say in a line for the terminal what has become of its trace."""
    try:
        done = merge(folder, target)
    except OSError as error:
        return f"the trace {target} cannot be written: {error.strerror}"
    if not done.parts:
        return f"there is no trace {target}: the cluster ended before it had started"
    return f"trace of {done.parts} processes: {target} ({done.nbytes / 1e6:,.1f} MB)"


def _copy(part: Path, file: BinaryIO) -> bool:
    """Copy the whole lines of a part. Returns whether the last line was whole too."""
    with part.open("rb") as source:
        nbytes = os.fstat(source.fileno()).st_size
        source.seek(max(0, nbytes - PIECE_NBYTES))
        tail = source.read()
        whole = nbytes - (len(tail) - 1 - tail.rfind(b"\n"))
        if b"\n" not in tail:
            whole = 0
        source.seek(0)
        start = file.tell()
        shutil.copyfileobj(source, file, 1 << 20)
        file.seek(start + whole)
        file.truncate()
    return whole == nbytes
