"""The process of a rank, apart from its role: its folder, its status file, and its ends.

Made by `rank.py`, used by `assemble.py`. It may not know what a role does.
Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.launch.place import Place
from mooncake_lite.launch.rank_process import RankFile, exit_within, hard_exit, leave_together
from mooncake_lite.launch.run_dir import ENDS, RunDir
from transport.threads import start_thread

START_THRESHOLD = 100_000
"""New objects between two searches for garbage while a rank starts. Imports leave nearly none, and with
Python's 700 the searches are a seventh of the time in which torch is loaded. Compiling leaves some."""

FINISH_LIMIT_S = 1.0
"""MPI_Finalize takes a few milliseconds; with UCX it was seen to hang."""


class RankProcess:
    """The process of a rank, apart from its role: its folder, its status file, and its ends.

    on_end          called once, from any thread, before a hurried exit (a store rank seals its tier)
    before_leaving  called once, before this process leaves the run folder, however it ends
    """

    def __init__(self, place: Place, config: ServeConfig, run_dir: RunDir) -> None:
        self.place = place
        self.config = config
        self.run_dir = run_dir
        self.role = config.role_of(place.rank)
        self.file = RankFile(run_dir, place.rank, self.role)
        self.on_end: Callable[[], None] = lambda: None
        self.before_leaving: Callable[[], None] = lambda: None
        self.file.write("starting", "joining MPI")
        self._is_ready = threading.Event()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(START_THRESHOLD)
        start_thread("start limit", self._limit_start, on_death=self.fail)

    def _limit_start(self) -> None:
        if not self._is_ready.wait(self.config.start_timeout_s):
            self.fail(f"was not ready after {self.config.start_timeout_s:.0f} s")

    def at_end(self, do: Callable[[], None]) -> None:
        """Have `do` called before a hurried exit, after what `on_end` does already."""
        earlier = self.on_end

        def both() -> None:
            earlier()
            do()

        self.on_end = both

    def _before_leaving_once(self) -> None:
        do, self.before_leaving = self.before_leaving, lambda: None
        do()

    def compiling(self, done: int, total: int, name: str) -> None:
        """Note that `done` of `total` groups of kernels are ready; `name` is compiled now ("" at the end)."""
        if name:
            self.file.write("starting", f"compiling kernels {done + 1} of {total}: {name}")

    def starting(self, what: str) -> None:
        """Note what is done before this rank is ready."""
        self.file.write("starting", what)

    def ready(self) -> None:
        """Note that everything is loaded, and stays. The start limit no longer applies."""
        gc.freeze()
        gc.set_threshold(*self._thresholds)
        self._is_ready.set()
        self.file.write("ready")

    def on_signal(self, name: str) -> None:
        """Seal files and end at once: mpirun kills a quarter of a second after its signal."""
        self.on_end()
        self.file.write("stopped", name)
        leave_together(self.run_dir, self._before_leaving_once)
        hard_exit(0)

    def fail(self, reason: str, code: int = 1) -> None:
        """End this process now with exit code 1 or 2, leaving the reason in the rank file and on stderr."""
        self.file.write(ENDS[code], reason)
        print(f"mooncake-lite: error: rank {self.place.rank} ({self.role}): {reason}", file=sys.stderr)
        try:
            self.on_end()
            self._before_leaving_once()
            self.run_dir.leave()
        finally:
            hard_exit(code)

    def leave(self, reason: str, finish: Callable[[float], bool], code: int = 0) -> int:
        """End in order: finalise MPI within a limit. Returns the exit code."""
        exit_within(FINISH_LIMIT_S + 1.0, code)
        clean = finish(FINISH_LIMIT_S)
        self.file.write(ENDS[code], reason)
        self._before_leaving_once()
        self.run_dir.leave()
        if not clean:
            hard_exit(code)
        return code
