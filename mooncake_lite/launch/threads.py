"""How many threads each rank may take, and how it is told before torch and Numba are imported.

Called by the roles at their start and by `doctor`. Pure but for `set_thread_environment`. It knows
counts of ranks and cores, no MPI. Explained in docs/explain/lifecycle.md, "Before the first request".
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from mooncake_lite.config.instances import leading_roles
from mooncake_lite.config.modes import COMPUTE_ROLES
from mooncake_lite.config.serve import ServeConfig

ROOMY_CORES = 4
"""From this many cores per compute rank on, ranks get cores of their own."""

SPINS = 1500
"""How often a waiting thread of libgomp looks for work before it sleeps. A look takes 10 ns (libgomp's
estimate) to 54 ns (measured), as the processor's pause instruction does. It covers most waits within a decode
step, which has more than 100 parallel regions. With more, a decode step waits longer for threads whose core
computes a prompt. libgomp's default is 300,000. Measured: docs/how-to/launch.md."""


def threads_for(config: ServeConfig, cores: int, role: str, ranks_here: list[str] | None = None) -> int:
    """Threads that a rank of `role` computes with on a node of `cores` cores.

    role         of a rank that follows another one: that of the first one of its instance
    ranks_here   likewise of all ranks on this node; by default the whole cluster is here

    The conductor, store ranks and emulated ranks wait or copy, with one thread. --threads decides where it
    is given. Where there are ROOMY_CORES cores per compute rank, each takes its share and
    they never meet. On smaller nodes the ranks of one role share all cores: prefill and decode then take
    turns, which costs decode little as long as waiting threads soon sleep (p99 of a decode step with 2
    threads each on 2 cores: 5 ms when they sleep at once, 24 ms when they spin for milliseconds; 6 ms with 1
    thread each), and a prompt is prefilled with every core while nothing is decoded.
    """
    if role not in COMPUTE_ROLES or config.engine == "emulated":
        return 1
    if config.threads > 0:
        return config.threads
    roles = leading_roles(config.roles) if ranks_here is None else ranks_here
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
