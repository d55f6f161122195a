"""Starts a cluster with mpirun, watches it, and ends all of it within five seconds.

Called by `mooncake-lite serve` outside of MPI. It knows processes, files and one message (Stop), never
KV or requests. Explained in docs/explain/lifecycle.md, "Before the first request" and "Stopping".

Exit codes: 0 after a stop that was asked for (SIGTERM, SIGHUP, Ctrl-C); 130 when a second one had to
kill; a cluster that ends on its own is a ClusterError.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import selectors
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from mooncake_lite.config.machine import find_mpirun
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ClusterError, UserError
from mooncake_lite.launch.job import MpirunJob
from mooncake_lite.launch.mpirun import rank_command
from mooncake_lite.launch.progress import Progress
from mooncake_lite.launch.rank_process import STOP_SIGNALS
from mooncake_lite.launch.run_dir import RankState, RunDir, sweep
from mooncake_lite.launch.running import ready_line
from mooncake_lite.launch.verdict import why_ended
from mooncake_lite.tracing.merge import merged_line

if TYPE_CHECKING:
    from transport.channel import Spoke

GRACE_S = 3.0
"""What ranks get to flush; the conductor adds a second for the last word, MPI_Finalize a moment."""

TERM_AT_S = 4.2
"""When mpirun is told: it passes SIGTERM on after 0.25 s and kills at 0.5 s."""

TERM_EARLY_AT_S = 1.0
"""The same while a rank is still starting: nothing to flush, and one that compiles hears nothing."""

KILL_AT_S = 4.75
"""When everything of this job that is left is killed, so that the command ends within 5 s."""

MPIRUN_SLOWER_S = 0.3
"""Ranks can be seen to end before the mpirun whose death they followed; its exit code tells them apart."""

AFTERMATH_S = 2.5
"""How long ranks may take to end after mpirun has ended, or after the conductor has."""

START_SLACK_S = 5.0
"""Ranks watch the start limit themselves and say what they were doing; the launcher is the second watch."""

TURN_S = 0.1


class Launcher:
    """One cluster from mpirun's start to the last process's end.

    command   what each rank runs; by default the serve command itself (tests give a small program)
    """

    def __init__(self, config: ServeConfig, *, command: list[str] | None = None):
        self._config = config
        self._command = command or rank_command(config)
        self._signals: list[str] = []
        self._ready = False

    def run(self) -> int:
        """Start, serve until something ends it, clean up. Returns the exit code.

        Raises ClusterError when the cluster ended on its own, LaunchError when it cannot be started.
        """
        sweep()
        mpirun = find_mpirun()
        with self._signals_taken() as wake:
            job = MpirunJob(self._config, mpirun, self._command, os.environ)
            self._progress = Progress(self._config)
            try:
                job.selector.register(wake, selectors.EVENT_READ, "signal")
                return self._watch(job)
            finally:
                self._progress.stop()
                job.end_processes()
                if self._config.trace:
                    self._progress.line(merged_line(Path(self._config.trace)))
                job.clean_up()

    @contextlib.contextmanager
    def _signals_taken(self) -> Iterator[int]:
        """Signals become entries in a list, and a byte in a pipe (yielded) that ends a wait."""
        readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(signal.Signals(number).name)
            with contextlib.suppress(BlockingIOError):
                os.write(writable, b"\0")

        before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
        try:
            yield readable
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(readable)
            os.close(writable)

    # --------------------------------------------------------------------------------- watch

    def _watch(self, job: MpirunJob) -> int:
        """Until a signal asks for the end, or the cluster ends. Returns the exit code."""
        deadline = time.monotonic() + self._config.start_timeout_s + START_SLACK_S
        conductor_gone_at = 0.0
        while True:
            self._pump(job, TURN_S)
            if self._signals:
                return self._stop(job)
            states = job.look()
            if job.mpirun_code() is not None:
                return self._ended(job)
            if not self._ready:
                self._progress.show(states)
                self._ready = self._check_start(job, states, deadline)
            if 0 in job.lost or (0 in states and states[0].ended):
                conductor_gone_at = conductor_gone_at or time.monotonic()
                if time.monotonic() - conductor_gone_at > AFTERMATH_S:
                    return self._ended(job)

    def _check_start(self, job: MpirunJob, states: dict[int, RankState], deadline: float) -> bool:
        """True once the cluster serves. Raises ClusterError when it never will.

        A rank that ends early leaves the others in MPI_Init, where nothing wakes them: all are ended. A rank
        that is lost when the cluster serves already, which is not known here yet, ends nothing.
        """
        gone = [*job.lost, *(rank for rank, state in states.items() if state.ended)]
        serves = (gone or job.served) and answers(self._config)
        if gone and not serves:
            self._raise_cause(job)
            raise ClusterError(f"{self._name(gone[0])} died: it ended before the cluster was ready")
        if time.monotonic() > deadline:
            busy = [f"{s.name}: {s.reason or s.state}" for s in states.values() if s.state != "ready"]
            self._end(job)
            raise ClusterError(
                f"not ready after {self._config.start_timeout_s:.0f} s "
                f"({', '.join(busy) or 'the gateway does not answer'}); --start-timeout-s gives it longer"
            )
        if not serves:
            return False
        self._progress.stop()
        print(ready_line(self._config, job.run_dir.path), flush=True)
        return True

    def _pump(self, job: MpirunJob, timeout_s: float) -> None:
        """Wait a little; show what ranks have printed."""
        for line in job.pump(timeout_s):
            self._progress.line(f"{job.output.name(line.rank)}: {line.text}")

    # ----------------------------------------------------------------------------------- end

    def _ended(self, job: MpirunJob) -> int:
        """The cluster has ended by itself, or its conductor has. Raises an error unless in order."""
        self._raise_cause(job)
        self._progress.line(self._stopped(job))
        return 0

    def _raise_cause(self, job: MpirunJob) -> None:
        """End what is left. Raises UserError or ClusterError with the first cause, unless in order."""
        reason, code = self._end(job)
        if code:
            raise (UserError if code == 2 else ClusterError)(reason)

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._config.role_of(rank)})"

    def _stopped(self, job: MpirunJob) -> str:
        """Say which ranks have stopped, and which were lost or killed. A new start fills their places."""
        states = job.run_dir.states()
        killed = [rank for rank, state in states.items() if not state.ended and rank not in job.lost]
        told = {"lost before": [*job.lost], "killed": killed}
        parts = [f"{how}: {', '.join(map(self._name, ranks))}" for how, ranks in told.items() if ranks]
        if any(state.ended for state in states.values()):
            parts.insert(0, "every other rank has stopped" if parts else "every rank has stopped")
        return "; ".join(parts) or "no rank had started"

    def _end(self, job: MpirunJob) -> tuple[str, int]:
        """End what is left: a moment, mpirun's signals, SIGKILL. Returns why all this happened: why_ended."""
        started = time.monotonic()
        while job.mpirun_code() is None and time.monotonic() - started < MPIRUN_SLOWER_S:
            self._pump(job, 0.05)
        mpirun_code = job.mpirun_code()
        started = time.monotonic()
        job.terminate()
        while job.running() and time.monotonic() - started < AFTERMATH_S:
            self._pump(job, 0.05)
        job.kill()
        self._pump(job, 0.0)
        return why_ended(self._config, job.facts(mpirun_code or 0))

    def _stop(self, job: MpirunJob) -> int:
        """Ranks first, then mpirun, then force; all of it within five seconds."""
        started = time.monotonic()
        self._progress.line(f"stopping: {self._signals[0]}")
        job.look()
        term_at_s = TERM_AT_S if job.served else TERM_EARLY_AT_S
        spoke = _ask_to_stop(job.run_dir, f"{self._signals[0]} to the launcher")
        told_mpirun = spoke is None
        if told_mpirun:
            job.terminate()
        runs = True
        while runs:
            self._pump(job, 0.05)
            runs = job.running()
            if not (told_mpirun or job.killed):  # after that, ranks are killed and not lost
                job.look()
            elapsed = time.monotonic() - started
            if spoke is not None and elapsed > 1.0:  # delivered by now: so that closing waits here, if at all
                spoke.close()
                spoke = None
            if runs and elapsed > term_at_s and not told_mpirun:
                told_mpirun = True
                self._progress.line(
                    f"ranks had not left by themselves after {elapsed:.1f} s; mpirun ends them"
                )
                job.terminate()
            if runs and (elapsed > KILL_AT_S or len(self._signals) > 1):
                job.kill()
        if spoke is not None:
            spoke.close()
        if job.killed:
            self._progress.line(f"{job.killed} processes were killed")
        if job.lost or job.killed or (told_mpirun and job.served):
            self._progress.line(self._stopped(job))
        return 130 if len(self._signals) > 1 else 0


def _ask_to_stop(run_dir: RunDir, reason: str) -> Spoke | None:
    """Ask the conductor to stop; None when it does not listen yet."""
    if not (run_dir.path / "control").exists():
        return None
    from mooncake_lite.messages import TO_LAUNCHER, StopRequested
    from transport.channel import Spoke
    from transport.wire import Decoder

    spoke = Spoke(run_dir.control, "launcher", Decoder(TO_LAUNCHER))
    spoke.send(StopRequested(reason, GRACE_S))
    return spoke


def answers(config: ServeConfig) -> bool:
    """Whether /health says that the cluster serves, or that it did until it lost the last rank of a duty."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    connection = http.client.HTTPConnection(host, config.port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        return response.status == 200 or b'"status":"unavailable"' in response.read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
