"""Child processes in sessions of their own, with limits, and nothing left behind.

Called by `runner`. Knows nothing of pages. A session is ended as a whole because Open MPI gives each rank a
process group of its own, so that killing one group would leave ranks behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

POLL_S = 0.02
STOP_LIMIT_S = 10.0


class Session:
    """A shell command in a session of its own; its output goes to a file."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str], output: Path) -> None:
        self.command = command
        self._output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        """Everything printed so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def members(self) -> list[int]:
        """Living processes of this session, zombies left out."""
        return [pid for pid in _pids() if _session_of(pid) == self.process.pid]

    def wait(self, limit_s: float) -> int | None:
        """The exit code, or None when it is still running at the limit."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def left_behind(self, limit_s: float = 2.0) -> list[int]:
        """Processes that outlive the command by more than the limit."""
        end = time.monotonic() + limit_s
        while (alive := self.members()) and time.monotonic() < end:
            time.sleep(POLL_S)
        return alive

    def stop(self, number: int = signal.SIGTERM, limit_s: float = STOP_LIMIT_S) -> bool:
        """Signal the command and wait; whatever is left at the limit is killed, and False returned."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        in_time = self.wait(limit_s) is not None and not self.left_behind()
        if not in_time:
            for pid in self.members():
                _kill(pid)
            self.process.wait(STOP_LIMIT_S)
            self.left_behind(STOP_LIMIT_S)  # SIGKILL takes a moment
        return in_time


class PythonWorker:
    """A Python process that runs blocks of code one after the other in one namespace."""

    def __init__(self, page: Path, folder: Path, environment: dict[str, str]) -> None:
        read_end, write_end = os.pipe()
        worker = Path(__file__).with_name("python_worker.py")
        self._results = read_end
        self._process = subprocess.Popen(
            [sys.executable, str(worker), str(page), str(write_end)],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            pass_fds=[write_end],
            start_new_session=True,
        )
        os.close(write_end)

    def run(self, source: str, line: int, limit_s: float) -> dict[str, Any]:
        """{"output": str, "error": str | None} of one block. Raises TimeoutError, EOFError when it dies."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"source": source, "line": line}).encode() + b"\n")
        self._process.stdin.flush()
        end = time.monotonic() + limit_s
        received = b""
        while not received.endswith(b"\n"):
            ready, _, _ = select.select([self._results], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"not finished within {limit_s:.0f} s")
            piece = os.read(self._results, 65536)
            if not piece:
                raise EOFError(f"Python ended with exit code {self._process.wait(STOP_LIMIT_S)}")
            received += piece
        return json.loads(received)

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        for pid in [pid for pid in _pids() if _session_of(pid) == self._process.pid]:
            _kill(pid)
        self._process.wait(STOP_LIMIT_S)
        os.close(self._results)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _session_of(pid: int) -> int | None:
    """The session of a living process: field 6 of its stat line; None for a zombie or one that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, _, _, session = stat.rpartition(")")[2].split()[:4]
    return None if state in "ZX" else int(session)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
