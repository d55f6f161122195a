"""Work in processes of their own, watched by another: what gpu_report does its parts with.

A part is a list of items (title, action). `run_items` is the inside: it says what it begins and prints each
result as soon as it is there. `results_of` is the outside: a process that dies, hangs or breaks its device
loses the item that it was at, and the next process goes on behind it. `together` runs several parts at once.
What time ran out for is reported as late, and not as failed. Knows no kernel and no torch.
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
    """One line for the watcher; kind: "start" of an item, "check", "row", "kernel" or "late"."""
    print(MARK + json.dumps({"kind": kind, **fields}), flush=True)


def failed(name: str, detail: str, seconds: float = 0.0) -> Record:
    """A check that did not pass."""
    return {"kind": "check", "name": name, "passed": False, "detail": detail, "seconds": round(seconds, 2)}


def late(name: str, detail: str) -> Record:
    """Something that did not run, or did not end, because time ran out: neither passed nor failed."""
    return {"kind": "late", "name": name, "detail": detail}


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


def together(parts: Iterable[Iterator[Record | None]], at_once: int) -> Iterator[Record]:
    """The results of several parts, as they come; `at_once` of them run at a time."""
    waiting = list(parts)
    running: list[Iterator[Record | None]] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(waiting.pop(0))
            idle = True
            for part in list(running):
                try:
                    record = next(part)
                except StopIteration:
                    running.remove(part)
                    continue
                if record is not None:
                    idle = False
                    yield record
            if idle:
                time.sleep(POLL_S)
    finally:
        for part in running:
            part.close()  # type: ignore[attr-defined]


def results_of(
    name: str, command: list[str], limit_s: float, item_s: float = ITEM_S
) -> Iterator[Record | None]:
    """Results of part `name`, whose process is `command --skip N`; None while there is nothing new.

    A failed check for every item that ended its process, or was silent for item_s. Ends after limit_s and
    KILLED_S at the latest; a late record says what did not run then.
    """
    deadline, skip = time.monotonic() + limit_s, 0
    while True:
        begun: Record | None = None
        reported = False
        with Child([*command, "--skip", str(skip)]) as child:
            for record in child.records(deadline, item_s):
                if record is None:
                    yield None
                elif record["kind"] == "start":
                    begun, reported = record, False
                else:
                    reported = True
                    yield record
            trouble = child.trouble()
        if not trouble:
            return
        if child.out_of_time:
            where = "" if begun is None else f" with {begun['name']!r}"
            yield late(f"part {name}", f"not done after {limit_s:.0f} s{where}: {trouble}")
            return
        if not (reported and child.process.returncode == BROKEN):
            where = f"part {name}" if begun is None else begun["name"]
            yield failed(f"{where}, then" if reported else where, trouble)
        left = deadline - time.monotonic()
        if begun is None:
            return
        if left < LEAST_S:
            yield late(f"part {name}", f"no time left for what comes after {begun['name']!r}")
            return
        skip = begun["number"] + 1


class Child(contextlib.AbstractContextManager["Child"]):
    """A process and what it prints, on its way through files: a pipe could be held open by a grandchild."""

    def __init__(self, command: list[str]):
        self.folder = tempfile.TemporaryDirectory(prefix="gpu-report-")
        self.out, self.err = (Path(self.folder.name) / name for name in ("out", "err"))
        self.stopped = ""
        self.out_of_time = False
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.folder.cleanup()

    def records(self, deadline: float, item_s: float) -> Iterator[Record | None]:
        """What it reports, None while that is nothing, until it ends, `deadline` passes or nothing comes for
        item_s; then it is dead."""
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
                    self.out_of_time = now >= deadline
                    self.stopped = "time is up" if self.out_of_time else f"nothing for {item_s:.0f} s"
                    self.kill()
                    return
                yield None

    def kill(self) -> None:
        """Ends the process and what it started; gives up on it after KILLED_S."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILLED_S)

    def trouble(self) -> str:
        """What went wrong with it, and its last words; empty when it ended well."""
        if not self.stopped and self.process.returncode == 0:
            return ""
        words = self.err.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()[-4:]
        return " | ".join([self.stopped or f"exit code {self.process.returncode}", *words])[:800]


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
