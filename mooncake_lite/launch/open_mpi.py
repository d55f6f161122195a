"""What the installed Open MPI can do, asked from its own ompi_info (60 ms, nothing is initialised).

Used by preflight and by `doctor`. It may not import mpi4py. Explained in docs/how-to/launch.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from mooncake_lite.errors import LaunchError

ASK_LIMIT_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenMPI:
    """One installation.

    components   "pml/ucx", "osc/sm", ... as ompi_info lists them
    ulfm         ranks may die without ending the job
    """

    mpirun: Path
    version: str
    components: frozenset[str]
    ulfm: bool

    @property
    def ucx(self) -> bool:
        """Messages and windows can go over UCX."""
        return {"pml/ucx", "osc/ucx"} <= self.components

    def refusal(self, profile: str) -> str:
        """Why a launch profile cannot be used with this Open MPI; "" when it can."""
        if int(self.version.split(".")[0]) < 5:
            return f"Open MPI {self.version} is too old; 5.0 or later is needed"
        if profile == "fast" and not self.ucx:
            return "this Open MPI has no UCX (pml and osc components); use --mpi-profile ft"
        if profile == "ft" and not self.ulfm:
            return "this Open MPI was built without ULFM; use --mpi-profile fast, or one built --with-ft=mpi"
        return ""


def inspect_open_mpi(mpirun: Path) -> OpenMPI:
    """Ask the ompi_info that belongs to `mpirun`. Raises LaunchError when it is no Open MPI."""
    beside = mpirun.parent / "ompi_info"
    program = str(beside) if beside.exists() else shutil.which("ompi_info") or ""
    if not program:
        raise LaunchError(f"{mpirun} has no ompi_info beside it: Open MPI 5 is needed, not another MPI")
    try:
        answer = subprocess.run(
            [program, "--parsable"],
            capture_output=True,
            text=True,
            timeout=ASK_LIMIT_S,
            check=True,
            env=os.environ | {"OMPI_MCA_btl": "self"},
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"{program} does not work: {str(error).splitlines()[0]}") from None
    version = re.search(r"^ompi:version:full:(\d+\S*)$", answer, re.MULTILINE)
    if version is None:
        raise LaunchError(f"{program} is not Open MPI's; Open MPI 5 is needed")
    return OpenMPI(
        mpirun=mpirun,
        version=version[1],
        components=frozenset(
            "/".join(pair) for pair in re.findall(r"^mca:(\w+):(\w+):version", answer, re.MULTILINE)
        ),
        ulfm="options:ft_mpi_support:yes" in answer,
    )
