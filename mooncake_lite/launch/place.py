"""Whether this process is a rank of an MPI job, told from its environment alone.

Asked by the command line and the ranks; it may not import MPI, which would join the job.
Explained in docs/how-to/launch.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


class Place(NamedTuple):
    """Where this process stands in an MPI job that somebody has launched."""

    rank: int
    size: int
    launched_by: str


SOURCES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpirun"),
    ("PMI_RANK", "PMI_SIZE", "PMI"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "srun"),
    ("PMIX_RANK", "SLURM_NTASKS", "srun"),
    ("PMI_RANK", "SLURM_NTASKS", "srun"),
)
"""Variables with rank and size, and who sets them. SLURM_PROCID is not among them: a batch script has
it too, and is no rank."""


def ranks_near(environment: Mapping[str, str] = os.environ) -> range | None:
    """The ranks on this rank's host, before MPI has started; None where the launcher does not tell.

    Open MPI's mpirun tells how many they are and the how-manieth this one is. It places ranks by slot
    unless told otherwise, so neighbours have neighbouring numbers. MPI itself knows for sure, later.
    """
    place = world_from_environment(environment)
    index = environment.get("OMPI_COMM_WORLD_LOCAL_RANK", "")
    count = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    if place is None or not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        return None
    first = max(0, place.rank - int(index))
    return range(first, min(first + int(count), place.size))


def world_from_environment(environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place in the job that launched it; None outside of a job."""
    for rank_name, size_name, launcher in SOURCES:
        rank, size = environment.get(rank_name, ""), environment.get(size_name, "")
        if rank.isdigit() and size.isdigit() and int(rank) < int(size):
            return Place(int(rank), int(size), launcher)
    return None
