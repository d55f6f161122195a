"""Joins the parts of a run into one file that Perfetto and chrome://tracing open.

Called at the end of a run by the launcher, or by rank 0 under a user's own mpirun, and after a run that was
killed by `mooncake-lite join-trace`. It copies bytes and parses nothing: 256 MiB take half a second.
See docs/how-to/trace.md.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

import mooncake_lite
from mooncake_lite.errors import TracingError
from mooncake_lite.tracing.tracer import parts_folder

COMMAND = "mooncake-lite join-trace"

PIECE_NBYTES = 64 << 10
"""A line is much shorter: that of a step names at most eight requests."""


class Merged(NamedTuple):
    """What a merge has written. torn: parts whose last line was incomplete and was left out."""

    parts: int
    nbytes: int
    torn: int


def merge(trace: Path) -> Merged:
    """Join all parts of a trace, in the order of their processes, and remove them.

    Raises TracingError when there are no parts, or when the file cannot be made; the parts are kept then.
    """
    folder = parts_folder(trace)
    parts = sorted(folder.glob("*.part"), key=lambda path: int(path.stem))
    if not parts:
        raise TracingError(f"there is no trace {trace}: {folder} has no parts")
    if trace.exists():
        raise TracingError(f"{trace} exists already; move it away, then: {COMMAND} {trace}")
    try:
        done = _join(parts, folder / "joined")
        (folder / "joined").replace(trace)
    except OSError as error:
        raise TracingError(
            f"the trace {trace} cannot be written ({error.strerror}); its parts are in {folder}; "
            f"join them later with: {COMMAND} {trace}"
        ) from None
    shutil.rmtree(folder, ignore_errors=True)
    return done


def merged_line(trace: Path) -> str:
    """Join the parts of a trace, and say in a line for the terminal what has become of it."""
    try:
        done = merge(trace)
    except TracingError as error:
        return str(error)
    return f"trace of {done.parts} processes: {trace} ({done.nbytes / 1e6:,.1f} MB)"


def _join(parts: Sequence[Path], target: Path) -> Merged:
    """Write the parts to a file with the head and the end of the format."""
    head = {"displayTimeUnit": "ms", "otherData": {"version": f"mooncake-lite {mooncake_lite.__version__}"}}
    torn = 0
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(head)[:-1] + b',"traceEvents":[\n')
        for part in parts:
            torn += not _copy(part, file)
        # Lines end with a comma; this one does not.
        file.write(b'{"ph":"M","pid":0,"tid":0,"name":"trace_end"}\n]}\n')
        return Merged(len(parts), file.tell(), torn)


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
