"""The lines on a terminal while ranks start, and the error line when some of them fail."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from typing import Any

import pytest

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ClusterError
from mooncake_lite.launch import ranks_program
from mooncake_lite.launch.progress import Progress
from mooncake_lite.launch.ranks_program import run_ranks
from mooncake_lite.launch.run_dir import RankState

pytestmark = pytest.mark.quick


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def state(rank: int, said: str, reason: str = "") -> RankState:
    return RankState(rank, "role", 1, 1, "here", said, reason)


def test_a_terminal_gets_one_line_that_moves_and_others_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    progress = Progress(ServeConfig())
    progress.show({1: state(1, "starting", "compiling kernels"), 2: state(2, "ready")})
    assert progress._summary() == "1 of 4 ranks ready; prefill-1 compiling kernels"
    progress.line("[a line] of a rank")
    progress.stop()
    assert "[a line] of a rank\n" in terminal.getvalue()
    progress.stop()
    progress.line("later")
    assert terminal.getvalue().endswith("later\n")


def test_a_pipe_gets_a_line_for_each_change(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(ServeConfig())
    for _ in range(2):
        progress.show({1: state(1, "starting", "loading"), 2: state(2, "starting")})
    progress.show({1: state(1, "ready", "loading")})
    assert capsys.readouterr().err == "rank 1 (role): loading\nrank 1 (role): ready\n"


class Ended:
    """An mpirun: what it does when it is waited for, one after the other, and its output."""

    def __init__(self, *waits: BaseException | bytes, code: int = 0):
        self.waits, self.returncode = list(waits), code
        self.signals: list[object] = []

    def start(self, line: list[str], **_: Any) -> Ended:
        return self

    def communicate(self, timeout: float) -> tuple[bytes, None]:
        wait = self.waits.pop(0)
        if isinstance(wait, BaseException):
            raise wait
        return wait, None

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.signals.append("kill")


LATE = subprocess.TimeoutExpired("mpirun", 1.0)
CRASH = b"-----\nTraceback (most recent call last):\n  File\nKeyError: 5\n"


@pytest.mark.parametrize(
    ("mpirun", "why", "signals"),
    [
        (Ended(LATE, b""), "2 ranks of a.module did not end within 7 s", [signal.SIGTERM]),
        (Ended(LATE, LATE, b""), "did not end within 7 s", [signal.SIGTERM, "kill"]),
        (Ended(b"", code=9), "2 ranks of a.module failed: exit code 9", []),
        (Ended(CRASH, code=1), "failed: KeyError: 5", []),
        (Ended(b"one\n\n---\ntwo\nthree\nfour"), "failed: one two three", []),
        (Ended(KeyboardInterrupt("Ctrl-C"), b""), "Ctrl-C", [signal.SIGTERM]),
    ],
)
def test_ranks_that_fail_or_hang_are_ended_and_told(
    mpirun: Ended, why: str, signals: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_program, "find_mpirun", lambda: "mpirun")
    monkeypatch.setattr(ranks_program, "start_child", mpirun.start)
    with pytest.raises((ClusterError, KeyboardInterrupt), match=why):
        run_ranks(2, "a.module", ["argument"], 7.0)
    assert (mpirun.signals, mpirun.waits) == (signals, [])
