"""Runs as a process of its own: it has imported pytest, and forks one child for each run of a lab's tests.

    python -P warm.py

running.py starts it. It imports nothing of ours: each child imports the judge and the tests from the tree of
its own run, and no state of a module survives a run. A student's code never runs in these processes.
Explained in docs/explain/labs.md, "The judge".
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from typing import Any, NoReturn

import msgspec  # noqa: F401
import pytest


def run(wanted: dict[str, Any]) -> NoReturn:
    """Run pytest once, and end this process.

    Writes the id of this process, and at the end the exit code, as lines to the named pipe `ended`.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ended = os.open(wanted["ended"], os.O_WRONLY)
    os.write(ended, b"%d\n" % os.getpid())
    code = 2
    try:
        for stream, path in enumerate((os.devnull, wanted["output"], wanted["output"])):
            os.dup2(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), stream)
        os.chdir(wanted["root"])
        os.environ.clear()
        os.environ.update(wanted["env"])
        tempfile.tempdir = None
        sys.path.insert(0, wanted["root"])
        code = int(pytest.main(wanted["arguments"]))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os.write(ended, b"%d\n" % code)
        os._exit(code)


def main() -> None:
    """Fork a child for each line on stdin, until it is closed. Then wait a second for children that end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a run that is interrupted ends by itself
    for line in sys.stdin.buffer:
        if os.fork() == 0:
            run(json.loads(line))
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    signal.alarm(1)
    with contextlib.suppress(ChildProcessError):
        while os.wait():
            pass


if __name__ == "__main__":
    main()
