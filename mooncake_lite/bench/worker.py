"""A child process of a benchmark: takes one JSON order a line on stdin and gives one answer a line on stdout.

Used by `store_objects` and `engine_peers`. It may not know what the orders are.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mooncake_lite.errors import ClusterError

STOP_LIMIT_S = 10.0


class Worker:
    """One child process that runs a program of this folder.

    program       name of the file. It is passed as text: beside the file lie modules named as ours are
    arguments     of the program
    python        the interpreter
    limit_s       longest wait for an answer
    """

    def __init__(
        self, program: str, arguments: list[str], python: str, environment: Mapping[str, str], limit_s: float
    ):
        self._name = program.removesuffix(".py")
        self._limit_s = limit_s
        self._process = subprocess.Popen(
            [python, "-c", Path(__file__).with_name(program).read_text(), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )
        self._heard = b""

    def tell(self, do: str, **values: Any) -> None:
        """Give an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **values}).encode() + b"\n")

    def answer(self) -> Any:
        """Return the answer to the oldest order. Raises ClusterError when none comes within limit_s."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + self._limit_s
        while True:
            line, newline, rest = self._heard.partition(b"\n")
            if newline:
                self._heard = rest
                if line.startswith(b"ANSWER"):
                    return json.loads(line[6:])
                continue  # a word of a library
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._process.stdout.fileno(), 2**16) if ready else b""
            if not data:
                raise ClusterError(f"{self._name} did not answer within {self._limit_s:.0f} s, or ended")
            self._heard += data

    def ask(self, do: str, **values: Any) -> Any:
        """Give an order and return its answer."""
        self.tell(do, **values)
        return self.answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_LIMIT_S)
        self._process.stdout.close()
