"""Starts `mpirun -n N python PROGRAM` in a session of its own, with a time limit, and leaves nothing behind.

Used by tests (pytest itself never runs under mpirun). Every process of a run is known by a mark in its
environment: Open MPI gives each rank a process group of its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from mooncake_lite.launch.mpirun import COMMON, PROFILES
from mooncake_lite.launch.open_mpi import inspect_open_mpi
from tests.patience import patient

ROOT = Path(__file__).resolve().parent.parent
MARK = "MOONCAKE_LITE_TEST_RUN"
FLAGS: dict[str, tuple[str, ...]] = PROFILES | {"plain": ()}
"""What the launcher gives to mpirun, by profile; "plain": nothing, as somebody else's mpirun line may do."""


@dataclass(frozen=True, slots=True)
class MpiRun:
    """How a run ended. output: of all ranks, both streams; left_behind: processes that had to be killed,
    and files in /dev/shm that ranks had open and that are still there (removed by now)."""

    returncode: int | None
    output: str
    seconds: float
    left_behind: list[str]

    @property
    def timed_out(self) -> bool:
        return self.returncode is None

    def check(self) -> MpiRun:
        """Self, if it ended in time, with 0, and left nothing; otherwise the test fails with the output."""
        assert not self.timed_out, f"no end after {self.seconds:.0f} s:\n{self.output}"
        assert self.returncode == 0, f"exit code {self.returncode}:\n{self.output}"
        assert not self.left_behind, f"left behind: {self.left_behind}\n{self.output}"
        return self


def find_mpirun() -> str:
    """The mpirun beside this Python, else the one of the PATH; skips the test when there is none."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("there is no mpirun; install mooncake-lite[mpi]")
    return found


def skip_without_ucx() -> None:
    """Skip the test where ompi_info lists no UCX."""
    if refusal := inspect_open_mpi(Path(find_mpirun())).refusal("fast"):
        pytest.skip(refusal)


def mpi_environment(folder: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables for mpirun: nothing of an outer job, temporary files in `folder`, one thread per rank."""
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PRTE_"))
    }
    env |= dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    env |= dict.fromkeys(("PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    env |= {"TMPDIR": folder, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    return env | dict(extra or {})


def run_mpi(
    n: int,
    program: str | Path,
    args: Sequence[object] = (),
    timeout_s: float = 60.0,
    *,
    profile: str = "ft",
    env: Mapping[str, str] | None = None,
    mpirun_args: Sequence[str] = (),
    prefix: Sequence[str] = (),
) -> MpiRun:
    """Run a Python program on n ranks and reap everything that it started.

    mpirun_args   additional, before the program
    prefix        a command to run mpirun under (another namespace)
    """
    mark = secrets.token_hex(8)
    # Not pytest's folder: paths of Unix sockets may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="mlt") as folder:
        command = [*prefix, find_mpirun(), "-n", str(n), *COMMON]
        command += ["--prtemca", "prte_tmpdir_base", folder, *FLAGS[profile], *mpirun_args]
        command += [sys.executable, str(program), *map(str, args)]
        start = time.monotonic()
        files: set[str] = set()
        with open(Path(folder) / "output", "w+b") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=mpi_environment(folder, env) | {MARK: mark},
                start_new_session=True,
                cwd=ROOT,
            )
            try:
                returncode = _wait(process, mark, start + patient(timeout_s), files)
            finally:
                killed = reap(mark)
                process.wait()
            seconds = time.monotonic() - start
            output.seek(0)
            text = output.read().decode(errors="replace")
    left = [*killed, *(file for file in sorted(files) if os.path.exists(file))]
    for file in files:
        Path(file).unlink(missing_ok=True)
    return MpiRun(returncode, text, seconds, left)


def _wait(process: subprocess.Popen, mark: str, deadline: float, files: set[str]) -> int | None:
    """The exit code, or None at the deadline; notes the shared files that are seen on the way."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=0.1)
        for pid in marked(mark):
            files |= shared_files(pid)
        if time.monotonic() > deadline:
            return None


def marked(mark: str) -> list[int]:
    """Processes whose environment carries the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def shared_files(pid: int) -> set[str]:
    """Files in /dev/shm that a process has mapped and that have a name."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {
        line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line and "(deleted)" not in line
    }


def reap(mark: str, grace_s: float = 1.0) -> list[str]:
    """Kill what still runs after grace_s. Returns the command lines of what had to be killed."""
    deadline = time.monotonic() + patient(grace_s)
    while (pids := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    killed = []
    for pid in pids:
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            os.kill(pid, signal.SIGKILL)
            killed.append(f"{pid}: {line}")
    return killed
