"""Asking: the parent's side of the conversation with one child.

Used by the tests of labs. It starts the child, sends inputs, and reads typed observations of limited size. A
child that exceeds a limit is killed, and every later question gets the same reason. Knows nothing of scores.
Explained in docs/explain/labs.md, "The judge".
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from mooncake_lite.labs.child import GPU, Call, CallAnswer, Raised
from mooncake_lite.labs.lab import Resources
from mooncake_lite.labs.sandbox import OUT_OF_TIME, SAMPLE_S, Confined, Level, Limits

MOST_REPLY_BYTES = 4 << 20
KEPT_OUTPUT_BYTES = 4 << 10
"""Prints of a student's code that a message may show."""
MOST_SAID = 600
"""Characters of an exception in a message: Numba's go on for pages."""
JUDGES = ("tutorials/labs/", "mooncake_lite/labs/", "kernels_numba/gpu/simulator_blocks.py")
"""Files of a child that are not the student's: a driver, the race checker, the simulator."""

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "MKL_NUM_THREADS")
ENVIRONMENT = {
    **dict.fromkeys(_THREADS, "1"),
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "OMPI_MCA_btl": "self",
}
"""Variables of a child: one thread for each library, no .pyc files."""

T = TypeVar("T")


class Stopped(Exception):
    """The child could not answer: it died or was killed. The message says why, to the student."""


class Child:
    """A child process of one task.

    files    {file: digest} of the tree's files that it has loaded, after the first question
    printed  the first bytes that the student's code has printed since this was last emptied
    stopped  why it answers no more; empty while it does
    """

    def __init__(
        self,
        tree: Path,
        driver: str,
        limits: Limits,
        *,
        level: Level,
        gpu: bool = False,
        task_s: float = math.inf,
    ) -> None:
        """Start it in a tree.

            driver  its path from the root of the tree
            task_s  how long its answers may take on the clock, all together

        Raises SandboxRefused.
        """
        self.files: dict[str, str] = {}
        self.printed = b""
        self.stopped = ""
        self._limits = limits
        self._task_s, self._left_s = task_s, task_s
        self._buffer = bytearray()
        self._output = 0
        command = [sys.executable, "-m", "mooncake_lite.labs.child", driver]
        env = ENVIRONMENT | ({GPU: "1"} if gpu else {})
        self._confined = Confined(command, tree, limits, level=level, env=env)
        self._ready = False

    def ask(self, call: str, inputs: object, kind: type[T]) -> T | Raised:
        """Return the observation of a call, or the exception that the call raised.

        Raises Stopped if there is no answer, or none of this type.
        """
        if not self._ready:
            self._begin()
        said = self._exchange(msgspec.json.encode(Call(call, inputs)) + b"\n")
        if said.raised is not None:
            return said.raised
        try:
            return msgspec.convert(said.value, kind)
        except msgspec.ValidationError as error:
            raise Stopped(f"the answer has another type than asked: {error}") from None

    def close(self) -> None:
        """Kill the child and what it started, and delete its files."""
        self._confined.end()

    def _begin(self) -> None:
        self._ready = True
        said = self._exchange(b"")
        self.files = said.files
        if said.raised is not None:
            self.stopped = f"the code cannot be imported: {in_words(said.raised)}"
            raise Stopped(self.stopped)

    def _exchange(self, line: bytes) -> CallAnswer:
        if self.stopped:
            raise Stopped(self.stopped)
        self._confined.restart_clock()
        began = time.monotonic()
        self._deadline = began + self._left_s
        try:
            self._send(line)
            return msgspec.json.decode(self._line(), type=CallAnswer)
        except Stopped as error:
            self.stopped = str(error)
            self._confined.end()
            raise
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.stopped = "the child wrote something that is no answer"
            self._confined.end()
            raise Stopped(self.stopped) from None
        finally:
            self._left_s -= time.monotonic() - began

    def _send(self, line: bytes) -> None:
        """Write to the child without waiting for it forever: it may not be reading."""
        pipe = self._confined.process.stdin
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        while line:
            self._read([pipe.fileno()])
            try:
                line = line[os.write(pipe.fileno(), line) :]
            except BlockingIOError:
                continue
            except OSError:
                raise Stopped(self._end_in_words()) from None

    def _line(self) -> bytes:
        while b"\n" not in self._buffer:
            self._read([])
            if len(self._buffer) > MOST_REPLY_BYTES:
                raise Stopped(f"the answer has more than {MOST_REPLY_BYTES:,} bytes")
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return line

    def _read(self, writable: list[int]) -> None:
        """Read what is there, for at most one sample; look at the limits."""
        out, err = self._confined.process.stdout, self._confined.process.stderr
        assert out is not None
        assert err is not None
        ready, _, _ = select.select([out, err], writable, [], SAMPLE_S)
        if reason := self._confined.over():
            raise Stopped(f"it {reason}")
        if time.monotonic() > self._deadline:
            raise Stopped(f"its answers took longer than {self._task_s:g} s together")
        if err in ready:
            part = os.read(err.fileno(), 1 << 16)
            self._output += len(part)
            self.printed = (self.printed + part)[:KEPT_OUTPUT_BYTES]
            if self._output > self._limits.output_bytes:
                raise Stopped(f"it printed more than {self._limits.output_bytes:,} bytes")
        if out in ready:
            part = os.read(out.fileno(), 1 << 16)
            if not part:
                raise Stopped(self._end_in_words())
            self._buffer += part

    def _end_in_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):  # its stream is closed: it is about to end
            self._confined.process.wait(2.0)
        code = self._confined.end()
        if code == OUT_OF_TIME:
            return f"it used more than {self._limits.cpu_s} s of processor time"
        return f"its process ended with exit code {code} before it answered"


def in_words(raised: Raised) -> str:
    """Return an exception as one line that names the place: the innermost one of the student's, if any."""
    where = [frame for frame in raised.where if not frame[0].startswith(JUDGES)] or raised.where
    place = f" in {where[-1][0]}:{where[-1][1]}" if where else ""
    message = raised.message if len(raised.message) <= MOST_SAID else f"{raised.message[:MOST_SAID]} ..."
    return f"{raised.type}: {message}{place}"


def task_child(tree: Path, driver: str, given: Resources, *, level: Level, gpu: bool) -> Child:
    """Return a child with the limits of one task of a lab. Raises SandboxRefused.

    The clock runs ten times as long as the processor may: a busy machine must not cost a student points. The
    driver of a GPU maps far more memory than there is, and keeps some of it.
    """
    limits = Limits(
        seconds=10.0 * given.seconds, cpu_s=given.seconds, memory_mb=given.memory_mb, tasks=given.tasks
    )
    if gpu:
        limits = replace(limits, memory_mb=4 * given.memory_mb, address_mb=1 << 24)
    return Child(tree, driver, limits, level=level, gpu=gpu, task_s=given.task_seconds)
