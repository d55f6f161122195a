"""One MPI rank from its first line to its last: start, role, end.

Called by `mooncake-lite serve` when it finds itself inside an MPI job. Signals are blocked before MPI or
torch start threads; `assemble.py` builds the role from its parts. Explained in docs/lifecycle.md.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

import xxhash

from mooncake_lite.config import ServeConfig
from mooncake_lite.errors import ConfigError, UserError
from mooncake_lite.launch.machine import usable_cores
from mooncake_lite.launch.place import Place, ranks_near, world_from_environment
from mooncake_lite.launch.rank_process import (
    RankFile,
    block_stop_signals,
    die_with_parent,
    exit_within,
    hard_exit,
    leave_together,
    shield_output,
    watch_signals,
)
from mooncake_lite.launch.run_dir import ENVIRONMENT, RunDir, bases
from mooncake_lite.launch.threads import set_thread_environment, threads_for

FINISH_LIMIT_S = 1.0
"""MPI_Finalize takes a few milliseconds; with UCX it was seen to hang."""


class RankProcess:
    """What a rank owns besides its role: its folder, its file, its reasons to end.

    on_end   called once, from any thread, before a hurried exit (a store rank seals its tier)
    """

    def __init__(self, place: Place, config: ServeConfig, run_dir: RunDir) -> None:
        self.place = place
        self.config = config
        self.run_dir = run_dir
        self.role = config.role_of(place.rank)
        self.file = RankFile(run_dir, place.rank, self.role)
        self.on_end: Callable[[], None] = lambda: None
        self.file.write("starting", "joining MPI")
        self._deadline = threading.Timer(config.start_timeout_s, self._start_took_too_long)
        self._deadline.daemon = True
        self._deadline.start()

    def _start_took_too_long(self) -> None:
        self.fail(f"was not ready after {self.config.start_timeout_s:.0f} s")

    def ready(self) -> None:
        """Everything is loaded; from now on no start limit applies."""
        self._deadline.cancel()
        self.file.write("ready")

    def on_signal(self, name: str) -> None:
        """mpirun kills a quarter of a second after this: only what protects data is done."""
        self.on_end()
        self.file.write("stopped", name)
        leave_together(self.run_dir)
        hard_exit(0)

    def fail(self, reason: str) -> None:
        """End this process now, leaving the reason in the rank file and on stderr."""
        self.file.write("failed", reason)
        print(f"mooncake-lite: error: rank {self.place.rank} ({self.role}): {reason}", file=sys.stderr)
        self.on_end()
        self.run_dir.leave()
        hard_exit(1)

    def leave(self, reason: str, finish: Callable[[float], bool], code: int = 0) -> int:
        """The ordinary end: finalise MPI within a limit. Returns the exit code."""
        exit_within(FINISH_LIMIT_S + 1.0, code)
        clean = finish(FINISH_LIMIT_S)
        self.file.write("failed" if code else "stopped", reason)
        self.run_dir.leave()
        if not clean:
            hard_exit(code)
        return code


def run(config: ServeConfig) -> int:
    """Play this rank's part in the cluster; returns the exit code, or does not return at all."""
    place = world_from_environment()
    assert place is not None, "a rank is started by an MPI launcher"
    if place.size != config.ranks:
        return _refuse(place, ConfigError(_wrong_count(place.size, config)))
    block_stop_signals()
    die_with_parent()
    shield_output()
    try:
        process = RankProcess(place, config, _open_run_dir())
    except UserError as error:
        return _refuse(place, error)
    watch_signals(process.on_signal)
    set_thread_environment(_threads(config, process.role))
    try:
        from mooncake_lite.roles.assemble import play

        return play(process)
    except UserError as error:
        process.fail(str(error))
    except Exception as error:
        if os.environ.get("MOONCAKE_LITE_DEBUG"):
            traceback.print_exc()
        process.fail(f"{type(error).__name__}: {error}".splitlines()[0])
    return 1


def _threads(config: ServeConfig, role: str) -> int:
    """As many as can be told before MPI has started; compute ranks correct it once they know their node."""
    near = ranks_near()
    roles = None if near is None else [config.role_of(rank) for rank in near]
    return threads_for(config, usable_cores(), role, roles)


def _open_run_dir() -> RunDir:
    """The launcher's folder; under a user's own mpirun one that all ranks name after the job."""
    given = os.environ.get(ENVIRONMENT)
    if given:
        return RunDir.join(given)
    job = [os.environ.get(name, "") for name in ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMI_ID")]
    digest = xxhash.xxh3_64_hexdigest("/".join(job).encode())
    return RunDir.join(bases()[0] / f"mooncake-lite.{os.getuid()}.{digest}")


def _wrong_count(size: int, config: ServeConfig) -> str:
    return (
        f"mpirun started {size} ranks, but 1 conductor + {config.prefill} prefill + {config.decode} decode + "
        f"{config.store} store are {config.ranks}; use mpirun -n {config.ranks}, or other role counts"
    )


def _refuse(place: Place, error: UserError) -> int:
    """Say it once, not once per rank."""
    if place.rank == 0:
        print(f"mooncake-lite: error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(0.3)  # mpirun ends the job at the first exit; let rank 0 speak before
    return 2
