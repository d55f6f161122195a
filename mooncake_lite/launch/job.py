"""One running mpirun with its ranks, as processes and files: start, look, signal, kill, clean up.

Used by the launcher, which decides; this only does. It knows no messages and no reasons.
Explained in docs/explain/lifecycle.md, "Stopping".
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.launch import processes
from mooncake_lite.launch.child import start_child
from mooncake_lite.launch.mpirun import mpirun_environment, mpirun_line
from mooncake_lite.launch.output import Output, RankLine
from mooncake_lite.launch.place import world_from_environment
from mooncake_lite.launch.rank_process import MPIRUN_PID
from mooncake_lite.launch.run_dir import ENVIRONMENT, RankState, RunDir, remove_segments
from mooncake_lite.launch.verdict import Facts

SPAWN_S = 2.0
"""Longest time between the starts of mpirun's first and last rank on one host. Each takes milliseconds."""

CLEAN_LIMIT_S = 1.0
"""How long cleaning up goes on killing; only a process stuck in the kernel outlives it."""


class MpirunJob:
    """mpirun and all that it has started on this host.

    lost     {rank: time.time() at which it was seen gone without a last word}, in this order
    served   every rank of this host was ready at one time
    killed   processes that had to be killed
    """

    def __init__(self, config: ServeConfig, mpirun: Path, command: list[str], environment: Mapping[str, str]):
        self.run_dir = RunDir.create()
        self.lost: dict[int, float] = {}
        self.served = False
        self.killed = 0
        self._config = config
        self._born: dict[tuple[int, int], int] = {}
        self._all_born_at = math.inf
        self.selector = selectors.DefaultSelector()
        self._segments: set[str] = set()
        try:
            self._guard = self.run_dir.guard()
            full = mpirun_environment(config, self.run_dir.path, environment)
            line = mpirun_line(mpirun, config, command, full)
            self.output = Output(config, self.run_dir.log)
            self._mpirun = start_child(
                line,
                env=full,
                announce=MPIRUN_PID,
                new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except BaseException:
            self.run_dir.remove()
            raise
        self._streams = {"stdout": self._mpirun.stdout, "stderr": self._mpirun.stderr}
        for name, stream in self._streams.items():
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self.selector.register(stream, selectors.EVENT_READ, name)

    def mpirun_code(self) -> int | None:
        """mpirun's exit code, negative for a signal; None while it runs."""
        return self._mpirun.poll()

    def pump(self, timeout_s: float) -> list[RankLine]:
        """Wait for output (or whatever else is in the selector), at most timeout_s; lines of ranks."""
        lines: list[RankLine] = []
        for key, _ in self.selector.select(timeout_s):
            try:
                data = os.read(key.fd, 65536)
            except BlockingIOError:
                continue
            if key.data not in self._streams:
                continue
            if not data:
                self.selector.unregister(key.fileobj)
            lines += self.output.feed(key.data, data)
        return lines

    def look(self) -> dict[int, RankState]:
        """The rank files; notes in `lost` who has gone, in `served` whether all serve, and shared memory."""
        vanished = set() if self.served else self._vanished()
        states = self.run_dir.states()
        host = socket.gethostname()
        gone = vanished - states.keys()
        for rank, state in states.items():
            if state.host != host:
                continue
            self._segments.update(state.segments)
            if not (rank in self.lost or state.ended or processes.alive(state.pid, state.start_time)):
                gone.add(rank)
        # A rank may have written its last word between our two looks: look once more.
        ended = {rank for rank, state in self.run_dir.states().items() if state.ended} if gone else set()
        for rank in sorted(gone - ended - self.lost.keys()):
            self.lost[rank] = time.time()
        expected = 1 if self._config.hosts else self._config.ranks
        ready = 0 in states and len(states) >= expected
        self.served |= ready and all(state.state == "ready" for state in states.values())
        return states

    def _vanished(self) -> set[int]:
        """Ranks of this host without a process: the environment of a process tells its rank.

        On one host mpirun starts all ranks at once, so that one that was never seen has ended as well.
        """
        if len({*self._born.values()}) < self._config.ranks:
            for pid, started in self.processes().items():
                place = world_from_environment(processes.environment(pid))
                if place is not None:
                    self._born[pid, started] = place.rank
                    self._all_born_at = min(self._all_born_at, time.monotonic() + SPAWN_S)
        all_born = time.monotonic() > self._all_born_at and not self._config.hosts
        ranks = {*range(self._config.ranks)} if all_born else {*self._born.values()}
        return ranks - {rank for process, rank in self._born.items() if processes.alive(*process)}

    def facts(self, mpirun_code: int) -> Facts:
        """What is known of the cluster. mpirun_code: before it was told to end, or 0."""
        survives = self.served and self._config.mpi_profile == "ft"
        signals = {rank: said for rank in self.lost if (said := self.output.signal_of(rank))}
        printed = self.output.errors, list(self.output.last_lines)
        return Facts(self.run_dir.states(), self.lost, survives, mpirun_code, signals, *printed)

    def processes(self) -> dict[int, int]:
        """{pid: start time} of everything of this job on this host: mpirun, ranks, gateway."""
        return processes.processes_with(ENVIRONMENT, str(self.run_dir.path))

    def running(self) -> bool:
        """Something of the job is left."""
        return self._mpirun.poll() is None or bool(self.processes())

    def terminate(self) -> None:
        """SIGTERM to mpirun: ranks get it after 0.25 s and are killed at 0.5 s."""
        if self._mpirun.poll() is None:
            self._mpirun.terminate()

    def kill(self) -> None:
        """SIGKILL what is left, after a look at the shared memory that it maps."""
        for pid, started in self.processes().items():
            self._segments.update(processes.mapped_segments(pid))
            processes.send(pid, started, signal.SIGKILL)
            self.killed += 1
        if self._mpirun.poll() is None:
            self._mpirun.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._mpirun.wait(0.2)

    def end_processes(self) -> None:
        """Kill whatever is left of this job. The run folder stays."""
        deadline = time.monotonic() + CLEAN_LIMIT_S
        while self.running() and time.monotonic() < deadline:
            self.kill()

    def clean_up(self) -> None:
        """Leave nothing: no process, no shared memory, no socket, no folder."""
        self.end_processes()
        for stream in self._streams.values():
            assert stream is not None
            stream.close()
        self.selector.close()
        self.output.close()
        remove_segments(sorted(self._segments))
        self.run_dir.remove()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process stuck in the kernel keeps the guard
            self._guard.wait(CLEAN_LIMIT_S)
