"""What mpirun prints, sorted: lines of ranks for the user, its own words for the log.

Called by the launcher with raw bytes. Pure but for the log file. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import NamedTuple

from mooncake_lite.config.serve import ServeConfig

KEPT_LINES = 20
LOG_LIMIT_BYTES = 16 * 2**20
"""A rank that prints without end fills no disk: the log stops growing here."""

_TAGGED = re.compile(r"^\[[^\]]*?,(\d+)\]<std(?:out|err)>: ?(.*)$")
_SIGNALLED = re.compile(r"rank (\d+) .*?exited on signal (\d+) \(([^)]+)\)", re.DOTALL)

_BAR = re.compile(r"^-{60,}$")
BOX_LINES = 40
"""Open MPI frames what it has to say by two bars; what is longer than this is no box."""

HIDDEN_BOXES = ("is not tested for post-failure",)
"""Boxes that go to the log alone. This one comes with every window under ULFM, and no parameter stops it;
that windows of survivors go on working after a failure is tested in tests/transport."""

HIDDEN_LINES = ("NBC_Progress: an error 75 ",)
"""Lines that go to the log alone. Open MPI prints this one where a lost rank ends a collective call."""

ERROR_PREFIX = "mooncake-lite: error:"


class RankLine(NamedTuple):
    """One line that a rank has printed."""

    rank: int
    text: str


class Output:
    """Splits mpirun's two streams into lines, and remembers the last ones.

    mpirun is started with `--output tag`, so a rank's line carries its rank; a line without a tag is
    mpirun's own: about killed processes and the like, of use only when something went wrong.
    """

    def __init__(self, config: ServeConfig, log: Path):
        self._config = config
        self._log = log.open("ab")
        self._rest: dict[str, bytes] = {}
        self._boxes: dict[int, list[str]] = {}
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.errors: dict[int, str] = {}

    def feed(self, stream: str, data: bytes) -> list[RankLine]:
        """Take bytes of one stream ("stdout", "stderr"); the complete lines of ranks that are in them.

        Errors that ranks report are held back: the launcher says at the end what happened, once. mpirun puts
        zero bytes before some lines, which would hide what the lines begin with.
        """
        data = data.replace(b"\0", b"")
        self._write_log(data)
        *lines, self._rest[stream] = (self._rest.get(stream, b"") + data).split(b"\n")
        found = []
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            tagged = _TAGGED.match(text)
            body = tagged[2] if tagged else text
            if body.strip():
                self.last_lines.append(body)
            if tagged and body.startswith(ERROR_PREFIX):
                self.errors.setdefault(int(tagged[1]), body.removeprefix(ERROR_PREFIX).strip())
            elif tagged and not any(words in body for words in HIDDEN_LINES):
                rank = int(tagged[1])
                found += [RankLine(rank, shown) for shown in self._unboxed(rank, body)]
        return found

    def _unboxed(self, rank: int, text: str) -> list[str]:
        """The lines to show now: none while a box is open, then the whole box, unless it is a hidden one."""
        box = self._boxes.get(rank)
        if box is None:
            if not _BAR.match(text):
                return [text]
            self._boxes[rank] = [text]
            return []
        box.append(text)
        if not _BAR.match(text) and len(box) < BOX_LINES:
            return []
        del self._boxes[rank]
        return [] if any(words in line for line in box for words in HIDDEN_BOXES) else box

    def _write_log(self, data: bytes) -> None:
        if self._log.tell() < LOG_LIMIT_BYTES:
            self._log.write(data)
            self._log.flush()

    def name(self, rank: int) -> str:
        """ "prefill-1" for the prefill rank 1: what stands before its lines."""
        return f"{self._config.role_of(rank)}-{rank}" if rank < self._config.ranks else f"rank-{rank}"

    def signal_of(self, rank: int) -> str:
        """ "signal 9 (Killed)" when mpirun has reported that a signal ended this rank, else ""."""
        for found in _SIGNALLED.finditer(" ".join(self.last_lines)):
            if int(found[1]) == rank:
                return f"signal {found[2]} ({found[3]})"
        return ""

    def close(self) -> None:
        """Close the log."""
        self._log.close()
