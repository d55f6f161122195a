"""Work in processes of their own, watched by another: what gpu_report does its parts with.

A part is a list of items (title, action). `run_items` is the inside: it says what it begins and prints each
result as soon as it is there. `results_of` is the outside: a process that dies, hangs or breaks its device
loses the item that it was at, and the next process goes on behind it. Knows no kernel and no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Item = tuple[str, Callable[[], list[Record]]]
MARK = "@result "
BROKEN = 3
"""Exit code of a part whose device does not work any more, after it has reported the item that broke it."""
ITEM_S = 60.0
"""The longest that one item may take, the process's start and its first compilations included."""
POLL_S = 0.05
KILLED_S = 10.0
"""What a killed process gets to disappear; one that hangs in the driver does not."""
LEAST_S = 15.0
"""With less time than this another process is not worth starting."""


def emit(kind: str, **fields: Any) -> None:
    """One line for the watcher; kind: "start" of an item, "check", "row" or "kernel"."""
    print(MARK + json.dumps({"kind": kind, **fields}), flush=True)


def failed(name: str, detail: str, seconds: float = 0.0) -> Record:
    """A check that did not pass."""
    return {"kind": "check", "name": name, "passed": False, "detail": detail, "seconds": round(seconds, 2)}


def run_items(items: Iterable[Item], skip: int, device_works: Callable[[], bool]) -> int:
    """Run all items but the first `skip`; returns the exit code.

    An item that raises becomes a failed check of its title. device_works is asked after each failure.
    """
    for number, (title, action) in enumerate(items):
        if number < skip:
            continue
        emit("start", name=title, number=number)
        started = time.perf_counter()
        try:
            for record in action():
                emit(**record)
        except Exception as error:
            traceback.print_exc()
            detail = f"{type(error).__name__}: {error}"[:500]
            emit(**failed(title, detail, time.perf_counter() - started))
            if not device_works():
                return BROKEN
    return 0


def results_of(name: str, command: list[str], limit_s: float, item_s: float = ITEM_S) -> Iterator[Record]:
    """Results of part `name`, whose process is `command --skip N`; a failed check for all that was lost.

    Ends after limit_s and KILLED_S at the latest.
    """
    deadline, skip = time.monotonic() + limit_s, 0
    while True:
        begun: Record | None = None
        reported = False
        with Child([*command, "--skip", str(skip)]) as child:
            for record in child.records(deadline, item_s):
                if record["kind"] == "start":
                    begun, reported = record, False
                else:
                    reported = True
                    yield record
            trouble = child.trouble()
        if not trouble:
            return
        if not (reported and child.process.returncode == BROKEN):
            where = f"part {name}" if begun is None else begun["name"]
            yield failed(f"{where}, then" if reported else where, trouble)
        left = deadline - time.monotonic()
        if begun is None:
            return
        if left < LEAST_S:
            yield failed(
                f"part {name}", f"not done after {limit_s:.0f} s: nothing behind {begun['name']!r} ran"
            )
            return
        skip = begun["number"] + 1


class Child:
    """A process and what it prints, on its way through files: a pipe could be held open by a grandchild."""

    def __init__(self, command: list[str]):
        self.folder = tempfile.TemporaryDirectory(prefix="gpu-report-")
        self.out, self.err = (Path(self.folder.name) / name for name in ("out", "err"))
        self.late = ""
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.folder.cleanup()

    def records(self, deadline: float, item_s: float) -> Iterator[Record]:
        """What it reports, until it ends, `deadline` passes or nothing comes for item_s; then it is dead."""
        heard, rest = time.monotonic(), b""
        with self.out.open("rb") as out:
            while True:
                ended = self.process.poll() is not None  # before the last look: then nothing is missed
                rest += out.read()
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    if (record := _parsed(line)) is not None:
                        heard = time.monotonic()
                        yield record
                now = time.monotonic()
                if ended:
                    return
                if now >= deadline or now - heard >= item_s:
                    self.late = "time is up" if now >= deadline else f"nothing for {item_s:.0f} s"
                    self.kill()
                    return
                time.sleep(POLL_S)

    def kill(self) -> None:
        """Ends the process and what it started; gives up on it after KILLED_S."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILLED_S)

    def trouble(self) -> str:
        """What went wrong with it, and its last words; empty when it ended well."""
        if not self.late and self.process.returncode == 0:
            return ""
        words = self.err.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()[-4:]
        return " | ".join([self.late or f"exit code {self.process.returncode}", *words])[:800]


def _parsed(line: bytes) -> Record | None:
    """A line of `emit`; None for anything else, such as one cut off by the process's death."""
    text = line.decode(errors="replace")
    if not text.startswith(MARK):
        return None
    try:
        record = json.loads(text[len(MARK) :])
    except ValueError:
        print(f"unreadable: {text[:200]}", file=sys.stderr)
        return None
    return record if isinstance(record, dict) and "kind" in record else None
