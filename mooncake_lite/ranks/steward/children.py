"""The conductor and the gateway as child processes of rank 0: their settings files, starts and ends.

Neither is an MPI rank. The first gateway is started before MPI, so that it shares nothing with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any, Literal

import msgspec

from mooncake_lite.launch.child import last_word, start_child
from mooncake_lite.launch.processes import how_it_ended
from mooncake_lite.launch.run_dir import RunDir

MOST_STARTS, WITHIN_S = 5, 60.0
"""A process that ends by itself more often than this would end again: the cluster stops."""


class Child:
    """A running conductor or gateway.

    name     of the present process, "gateway-0" and so on: its messages are not those of an earlier one
    number   in that name
    refusal  why the last process that refused to start did so: the user's folder or flags; "" without one
    """

    def __init__(
        self, kind: Literal["conductor", "gateway"], run_dir: RunDir, settings: dict[str, Any]
    ) -> None:
        self._kind, self._run_dir = kind, run_dir
        self._settings = settings | {"parent_pid": os.getpid()}
        self._starts: list[float] = []
        self.number = -1
        self.refusal = ""

    def start(self, **settings: Any) -> None:
        """Start a process, the first or the next one, with these settings besides."""
        self._starts.append(time.monotonic())
        self.number += 1
        self.name = f"{self._kind}-{self.number}"
        path = self._run_dir.path / f"{self._kind}.json"
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode({**self._settings, **settings, "name": self.name}))
        command = [sys.executable, "-m", f"mooncake_lite.{self._kind}", str(self._run_dir.path)]
        # A session of its own: mpirun kills the process group of a rank 0.25 s after its SIGTERM, and clients
        # are still to read why their answers end. The child follows rank 0's death in any case.
        self._child = start_child(command, new_session=True, stdin=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._child.pid

    @property
    def runs(self) -> bool:
        """Tell whether the process has not ended."""
        return self._child.poll() is None

    @property
    def may_start_again(self) -> bool:
        """Tell whether it has not refused to start, nor ended too often."""
        self._starts = [at for at in self._starts if time.monotonic() - at < WITHIN_S]
        return not self.refusal and len(self._starts) <= MOST_STARTS

    def end_of(self, seen: str) -> str:
        """Return how the process has ended. seen: why it was killed, if it was silent."""
        self.stop(1.0)
        how = f"gave {seen}" if seen.startswith("no sign of life") else how_it_ended(self._child.returncode)
        file = last_word(self._run_dir.path, self.pid)
        said = " ".join(file.read_text().split()) if file.exists() else ""
        if said and self._child.returncode == 2:
            self.refusal = said
            return said
        return f"the {self._kind} process {self.pid} {how}" + (f": {said}" if said else "")

    def terminate(self) -> None:
        """Ask it to end, if it runs."""
        self._child.terminate()

    def stop(self, limit_s: float) -> None:
        """Wait for its end. After limit_s, kill it."""
        try:
            self._child.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(5.0)
