"""A few ranks that run a module of ours for a moment, and the one file that rank 0 writes.

Used by `bench transport` and `doctor --links`. Ranks are started like those of a cluster, and are all gone
when it returns. Explained in docs/reference/cli.md.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mooncake_lite.config.machine import find_mpirun
from mooncake_lite.errors import ClusterError
from mooncake_lite.launch.child import start_child
from mooncake_lite.launch.mpirun import AS_ROOT, COMMON, PROFILES


def run_ranks(
    ranks: int,
    module: str,
    arguments: Sequence[str],
    limit_s: float,
    *,
    profile: str = "ft",
    prefix: Sequence[str] = (),
    mpirun_args: Sequence[str] = (),
) -> bytes:
    """Run `python -m MODULE FILE ARGUMENTS...` in each of so many ranks; what is in FILE at the end.

    prefix        a command to run mpirun under (another namespace)
    mpirun_args   additional, before the program
    Raises ClusterError when they fail, write nothing or do not end in time; LaunchError without mpirun.
    """
    with tempfile.TemporaryDirectory(prefix="mooncake-lite-ranks-") as folder:
        result = Path(folder) / "result"
        line = [*prefix, str(find_mpirun()), "-n", str(ranks), *COMMON, *PROFILES[profile], *mpirun_args]
        line += [sys.executable, "-m", module, str(result), *arguments]
        environment = {**os.environ, **(AS_ROOT if os.getuid() == 0 else {}), "TMPDIR": folder}
        process = start_child(
            line, env=environment, new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _stop(process)
            raise ClusterError(f"{ranks} ranks of {module} did not end within {limit_s:.0f} s") from None
        except BaseException:
            _stop(process)
            raise
        if process.returncode != 0 or not result.exists():
            why = _reason(output.decode(errors="replace")) or f"exit code {process.returncode}"
            raise ClusterError(f"{ranks} ranks of {module} failed: {why}")
        return result.read_bytes()


def _reason(output: str) -> str:
    """One line: the error of a rank that raised one, else the first thing that mpirun says."""
    lines = [line.strip() for line in output.splitlines() if line.strip(" -")]
    if any(line.startswith("Traceback") for line in lines):
        return lines[-1]
    return " ".join(lines[:3])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """mpirun passes SIGTERM on, and kills its ranks half a second later."""
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate(timeout=5)
