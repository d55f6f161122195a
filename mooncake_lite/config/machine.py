"""What this machine has to offer a cluster: cores, memory, shared memory, mpirun.

Read by preflight, `doctor`, profiles and benchmarks. It looks and never changes anything,
and imports no MPI: importing mpi4py outside of mpirun leaves a file in
/dev/shm. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_lite.errors import LaunchError

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Figures of one host at one moment.

    cores                 this process may use, by affinity and by the container's quota
    memory_bytes          that can be had without swapping, the container's limit included
    shared_memory_bytes   free in /dev/shm; -1 where there is none
    """

    cores: int
    memory_bytes: int
    shared_memory_bytes: int

    @classmethod
    def here(cls) -> Machine:
        """This host, now."""
        return cls(
            cores=usable_cores(),
            memory_bytes=available_memory(),
            shared_memory_bytes=free_shared_memory(),
        )


def usable_cores() -> int:
    """Cores by affinity mask, lowered by a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def available_memory() -> int:
    """Bytes that new processes can take; a container's limit counts, its page cache does not."""
    import psutil

    available = psutil.virtual_memory().available
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        lines = dict(line.split() for line in _read(_CGROUP / "memory.stat").splitlines())
        reclaimable = int(lines.get("inactive_file", 0)) + int(lines.get("active_file", 0))
        available = min(available, max(0, int(limit) - int(used) + reclaimable))
    return int(available)


def free_shared_memory() -> int:
    """Free bytes in /dev/shm, where Open MPI puts windows; -1 where there is no such folder."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return -1


def why_unwritable(folder: Path) -> str:
    """Why no file can be made in a folder; "" when it can. Asking is not enough for root: one is made."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".mooncake-lite-", dir=folder))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def machine() -> dict[str, Any]:
    """What the figures depend on. load: processes that wanted a core, mean of the last minute."""
    cpu = first_core().get("model name") or platform.processor() or platform.machine()
    return {
        "cpu": cpu,
        "cores": usable_cores(),
        "load": round(os.getloadavg()[0], 2),
        "memory_bytes": available_memory(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def first_core() -> dict[str, str]:
    """What Linux tells of the first core, by name; empty elsewhere."""
    lines = _read(Path("/proc/cpuinfo")).partition("\n\n")[0].splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def commit() -> str:
    """The commit of the source tree, "" outside of one; "+" when files differ from it."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def now() -> str:
    """Return the date and time, in UTC, as files of results have it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def signed(measured_on: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return what was measured, with the date, the commit and the machine. measured_on: see `machine`."""
    return {"date": now(), "machine": measured_on, "commit": commit(), **found}


def find_mpirun() -> Path:
    """mpirun beside this Python first (the wheel's), then on PATH. Raises LaunchError when there is none."""
    for candidate in (Path(sys.executable).parent / "mpirun", Path(shutil.which("mpirun") or "/nonexistent")):
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    raise LaunchError(
        "mpirun is neither beside this Python nor on PATH; pip install 'mooncake-lite[mpi]' brings Open MPI, "
        "or load the site's own"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
