"""What a rank does about being a process: its place, its signals, its file, its end.

Called by `mooncake_lite.ranks` before MPI is imported, and nothing here imports MPI or torch. It may
not know roles' work. Explained in docs/explain/lifecycle.md, "Before the first request" and "Stopping".
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import msgspec

from mooncake_lite.config.files import replace_file
from mooncake_lite.launch import processes
from mooncake_lite.launch.exec_child import follow_parent
from mooncake_lite.launch.run_dir import RankState, RunDir, remove_segments
from transport.threads import start_thread

REMOVAL_S = 0.05
"""Part of the quarter second that removing the run folder may take."""

STOP_EXTRA_S = 1.0
"""Time after the grace in which the conductor still waits for the last rank's report of its flush."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

MPIRUN_PID = "MOONCAKE_LITE_MPIRUN_PID"
"""Set by our launcher: the pid of mpirun, the parent of every rank on the launcher's host."""


def die_with_parent() -> None:
    """End with SIGTERM when the parent (mpirun, its daemon) dies, also when it has died already.

    Under our own launcher on its host the parent is known by its pid; elsewhere an adopted process is
    one whose parent changed while we asked.
    """
    mpirun = os.environ.get(MPIRUN_PID, "")
    orphaned = not follow_parent(os.getppid())
    if mpirun.isdigit() and int(mpirun) != os.getppid():
        orphaned |= processes.start_time(int(mpirun)) == 0
    if orphaned:
        os.kill(os.getpid(), signal.SIGTERM)


def block_stop_signals() -> None:
    """Block SIGTERM, SIGINT and SIGHUP in this thread and all later ones, so that no call is interrupted.

    Call it before MPI, torch or numba start threads.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def watch_signals(
    on_signal: Callable[[str], None], on_death: Callable[[str], object] | None = None
) -> threading.Thread:
    """Call `on_signal("SIGTERM")` or the like from a daemon thread, once for every stop signal.

    A kernel of seconds delays a handler in Python, but not this thread. Linux may deliver a signal to any
    thread that has not blocked it, such as one that OpenBLAS started before block_stop_signals. A process
    without a handler would then end at once, so there is one, whose C part tells this thread.

    on_death    called with the reason when that thread dies, because the process then hears no signal
    """
    readable, writable = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)

    def loop() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        while True:
            (number,) = os.read(readable, 1)
            if number in STOP_SIGNALS:
                on_signal(signal.Signals(number).name)

    return start_thread("signals", loop, on_death=on_death)


class RankFile:
    """RUN_DIR/rank-<n>.json, rewritten as a whole at each change so that readers never see half of it.

    Writing is best effort: a rank does not fail because its folder is gone.
    """

    def __init__(self, run_dir: RunDir | Path, rank: int, role: str):
        self._folder = run_dir.path if isinstance(run_dir, RunDir) else Path(run_dir)
        self._state = RankState(
            rank=rank,
            role=role,
            pid=os.getpid(),
            start_time=processes.start_time(os.getpid()),
            host=socket.gethostname(),
            state="starting",
        )
        self._turn = threading.Lock()

    def write(self, state: str, reason: str = "") -> None:
        """Say what this rank does: "starting", "ready", "stopped" or "failed" (see RankState).

        A final state is not overwritten: the first reason for the end is the one that counts.
        """
        with self._turn:
            if self._state.ended:
                return
            segments = processes.mapped_segments() or self._state.segments
            self._state = msgspec.structs.replace(
                self._state,
                state=state,
                reason=" ".join(reason.split()),
                segments=segments,
                said_at=time.time(),
            )
            self._store()

    def _store(self) -> None:
        with contextlib.suppress(OSError):
            replace_file(self._folder / f"rank-{self._state.rank}.json", msgspec.json.encode(self._state))


def forget_shared_memory() -> None:
    """Unlink the names of the shared-memory files that Open MPI made for this job on this node.

    To be called after MPI has started and all ranks have met in a barrier: every rank has mapped the
    files by then, so their names are needed no more, and no kind of death can leave them behind.
    """
    remove_segments(processes.mapped_segments())


def leave_together(
    run_dir: RunDir, before_leaving: Callable[[], None] = lambda: None, limit_s: float = 0.2
) -> None:
    """Leave the run folder after SIGTERM from mpirun, and return when this rank may exit.

    mpirun kills the other ranks within milliseconds of the first one's exit, else 0.25 s after its SIGTERM
    (measured with 5.0.11): a rank that has nothing to save would cut short one that is sealing its
    files. So each waits until all rank files have their last word, then until the last one to leave has
    removed the folder.

    before_leaving   called when all ranks have their last word, or have had the time for it
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline - REMOVAL_S and not all(s.ended for s in run_dir.states().values()):
        time.sleep(0.005)
    before_leaving()
    run_dir.leave()
    while time.monotonic() < deadline and run_dir.path.exists():
        time.sleep(0.005)


class _Unbreakable:
    """A text stream that goes on when nobody reads it any more."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """As TextIO.write; a broken pipe swallows the text."""
        with contextlib.suppress(OSError, ValueError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As TextIO.flush; a broken pipe is not an error."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def shield_output() -> None:
    """Make printing safe after mpirun has died: a broken pipe must not end the clean-up."""
    sys.stdout = _Unbreakable(sys.stdout)  # type: ignore[assignment]
    sys.stderr = _Unbreakable(sys.stderr)  # type: ignore[assignment]


def exit_within(limit_s: float, code: int) -> None:
    """Make sure that this process is gone after limit_s, whatever hangs (a peer that never finalises).

    A thread ends it with `code`; when even that cannot run, the kernel's timer kills it half a second
    later. Calling it again moves nothing: the first limit stands.
    """
    if any(thread.name == "exit-limit" for thread in threading.enumerate()):
        return

    def end() -> None:
        time.sleep(limit_s)
        hard_exit(code)

    with contextlib.suppress(ValueError):  # only the main thread may set a disposition
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s + 0.5)
    start_thread("exit-limit", end)


def hard_exit(code: int) -> None:
    """End this process at once: no MPI_Finalize, no destructors; its shared-memory names go first."""
    remove_segments(processes.mapped_segments())
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
