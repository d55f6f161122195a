"""How many threads each rank may take, and how it is told before torch and Numba are imported.

Called by the roles at their start and by `doctor`. Pure but for `set_thread_environment`. It knows
counts of ranks and cores, no MPI. Explained in docs/explain/lifecycle.md, "Before the first request".
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from mooncake_lite.config import ServeConfig
from mooncake_lite.modes import COMPUTE_ROLES

ROOMY_CORES = 4
"""From this many cores per compute rank on, ranks get cores of their own."""

SPINS = 2000
"""How often a waiting thread of libgomp looks for work before it sleeps: 20 to 110 us, by the processor's
pause instruction. Between two parallel regions of a decode step a few tens of microseconds pass. Waking a
sleeping thread of an idle core takes as long, more than 100 times a step. A thread that spins for
milliseconds, as libgomp does by default, holds the core that another rank's thread needs."""


def threads_for(config: ServeConfig, cores: int, role: str, ranks_here: list[str] | None = None) -> int:
    """Threads that a rank of `role` computes with on a node of `cores` cores.

    ranks_here   the roles of all ranks on this node; by default the whole cluster is here

    The conductor, store ranks and emulated ranks wait or copy, with one thread. --threads decides where it
    is given. Where there are ROOMY_CORES cores per compute rank, each takes its share and
    they never meet. On smaller nodes the ranks of one role share all cores: prefill and decode then take
    turns, which costs decode nothing measurable as long as waiting threads sleep (OMP_WAIT_POLICY=passive:
    p99 of a decode step 5 ms with 2 threads each on 2 cores; 24 ms when they spin; 6 ms with 1 thread each),
    and a prompt is prefilled with every core while nothing is decoded.
    """
    if role not in COMPUTE_ROLES or config.engine == "emulated":
        return 1
    if config.threads > 0:
        return config.threads
    roles = ranks_here if ranks_here is not None else config.roles
    computing = max(1, sum(name in COMPUTE_ROLES for name in roles))
    share = cores // computing
    if share >= ROOMY_CORES:
        return share
    return max(1, min(ROOMY_CORES, cores // max(1, roles.count(role))))


def set_thread_environment(threads: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Tell OpenMP, Numba and the BLAS libraries, before any of them is loaded.

    torch takes one thread under mpirun unless told otherwise, Numba all cores. Waiting threads sleep after
    SPINS looks, which leaves the cores to the rank that computes. A user's OMP_WAIT_POLICY and GOMP_SPINCOUNT
    stand.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
        environment[name] = str(threads)
    if environment.setdefault("OMP_WAIT_POLICY", "passive").lower() == "passive":
        environment.setdefault("GOMP_SPINCOUNT", str(SPINS))
