"""The live picture in a terminal: keys and signals end it and leave the terminal as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.mooncake_lite.tools.top.samples import ONLY
from tests.mooncake_lite.tools.top.server import hang_up, serving, text
from tests.patience import patient

LIMIT_S = 20.0
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


class Terminal:
    """A terminal of 80 columns and 24 lines with the command in it."""

    def __init__(self, url: str) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(theirs)
        argv = [sys.executable, "-m", "mooncake_lite", "top", "--url", url, "--interval", "0.1"]
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm"}
        )
        self._theirs = theirs
        self.output = ""

    def wait_for(self, words: str) -> None:
        """Read until these words come, after those that were waited for last."""
        until = time.monotonic() + patient(LIMIT_S)
        seen = ""
        while words not in seen:
            ready, _, _ = select.select([self.ours], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"{words!r} does not come; the end of what came: {seen[-500:]!r}"
            seen += os.read(self.ours, 65536).decode(errors="replace")
        self.output += seen

    def end(self) -> int:
        """The exit code of the command; what it wrote last is read."""
        self.wait_for(LEAVE)
        code = self.process.wait(patient(LIMIT_S))
        assert termios.tcgetattr(self._theirs) == self.before, "the terminal is not as it was"
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self._theirs)


@contextmanager
def terminal(url: str) -> Iterator[Terminal]:
    """The command in a terminal, watching this URL."""
    shown = Terminal(url)
    try:
        yield shown
    finally:
        shown.close()


@pytest.mark.parametrize("how", ["q", signal.SIGINT, signal.SIGTERM])
def test_a_key_or_a_signal_ends_the_watch(how: str | signal.Signals) -> None:
    with serving(text(ONLY)) as server, terminal(server.url) as shown:
        shown.wait_for("● ready")
        if isinstance(how, str):
            os.write(shown.ours, how.encode())
        else:
            shown.process.send_signal(how)
        assert shown.end() == 0
    assert shown.output.index(ENTER) < shown.output.index("tiny-model")
    assert "Traceback" not in shown.output


def test_a_server_that_goes_away_is_waited_for() -> None:
    with (
        serving(text(ONLY), text(ONLY), *[hang_up] * 15, text(ONLY)) as server,
        terminal(server.url) as shown,
    ):
        shown.wait_for("● ready")
        shown.wait_for("no answer since")
        shown.wait_for("disconnected")
        shown.wait_for("● ready")
        os.write(shown.ours, b"q")
        assert shown.end() == 0
    assert re.search(r"no answer since \d+ s", shown.output)


def test_a_server_that_wants_another_key_ends_the_watch_with_an_error() -> None:
    with serving(text(ONLY), text("{}", status=401)) as server, terminal(server.url) as shown:
        assert shown.end() == 2
