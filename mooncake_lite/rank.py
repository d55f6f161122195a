"""One MPI rank from start to end.

Called by `mooncake-lite serve` when it finds itself inside an MPI job. Signals are blocked before MPI or
torch start threads. Rank 0 is then assembled in `ranks/steward/`, any other in `ranks/`. Explained in
docs/explain/lifecycle.md.
"""

from __future__ import annotations

import os
import sys
import time
import traceback

import xxhash

from mooncake_lite.config.instances import leading_roles
from mooncake_lite.config.machine import usable_cores
from mooncake_lite.config.modes import ROLES
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ConfigError, UserError
from mooncake_lite.launch.place import Place, ranks_near, world_from_environment
from mooncake_lite.launch.rank_process import (
    block_stop_signals,
    die_with_parent,
    shield_output,
    watch_signals,
)
from mooncake_lite.launch.run_dir import ENVIRONMENT, RunDir, bases
from mooncake_lite.launch.threads import set_thread_environment, threads_for
from mooncake_lite.ranks.process import RankProcess


def run(config: ServeConfig) -> int:
    """Run this rank's role. Returns the exit code, or does not return."""
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
    watch_signals(process.on_signal, process.fail)
    set_thread_environment(_threads(config, process.place.rank))
    try:
        return _play(process)
    except UserError as error:
        process.fail(str(error), 2)
    except Exception as error:
        if os.environ.get("MOONCAKE_LITE_DEBUG"):
            traceback.print_exc()
        process.fail(f"{type(error).__name__}: {error}".splitlines()[0])
    return 1


def _play(process: RankProcess) -> int:
    """Start, serve, and end. Returns the exit code. Raises when the rank cannot continue."""
    if process.place.rank == 0:
        from mooncake_lite.ranks.steward.assemble import work
    else:
        from mooncake_lite.ranks.assemble import work

    return work(process)


def _threads(config: ServeConfig, rank: int) -> int:
    """Choose the number of threads before MPI starts. Compute ranks correct it once they know their node."""
    near = ranks_near()
    leading = leading_roles(config.roles)
    roles = None if near is None else [leading[rank] for rank in near]
    return threads_for(config, usable_cores(), leading[rank], roles)


def _open_run_dir() -> RunDir:
    """Open the launcher's folder, or, under a user's own mpirun, a folder named after the job."""
    given = os.environ.get(ENVIRONMENT)
    if given:
        return RunDir.join(given)
    job = [os.environ.get(name, "") for name in ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMI_ID")]
    digest = xxhash.xxh3_64_hexdigest("/".join(job).encode())
    return RunDir.join(bases()[0] / f"mooncake-lite.{os.getuid()}.{digest}")


def _wrong_count(size: int, config: ServeConfig) -> str:
    counts = " + ".join(f"{getattr(config, role)} {role}" for role in ROLES if getattr(config, role))
    return (
        f"mpirun started {size} ranks, but 1 steward + {counts} are {config.ranks}; "
        f"use mpirun -n {config.ranks}, or other role counts"
    )


def _refuse(place: Place, error: UserError) -> int:
    """Print the reason on rank 0 only, and return the exit code."""
    if place.rank == 0:
        print(f"mooncake-lite: error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(0.3)  # mpirun ends the job at the first exit; let rank 0 speak before
    return 2
