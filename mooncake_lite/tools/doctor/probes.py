"""Short tries in child processes, each with a limit: what works here, not only what is installed.

Called by `doctor`. A child that hangs or crashes is a finding, never an end of the doctor; MPI is never
loaded in this process, where it would leave a file in /dev/shm. Explained in docs/reference/cli.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mooncake_lite.launch.mpirun import AS_ROOT, COMMON

LIMIT_S = 60.0

PROGRAMS: dict[str, str] = {
    "torch": """
import torch
device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
answer = {"version": torch.__version__, "built_for": torch.version.cuda, "device": device}
""",
    "numba": """
import numba, importlib
answer = {"version": numba.__version__, "layer": "workqueue"}
for layer in ("tbbpool", "omppool"):
    try:
        importlib.import_module("numba.np.ufunc." + layer)
        answer["layer"] = {"tbbpool": "tbb", "omppool": "omp"}[layer]
        break
    except ImportError:
        pass
""",
    "nvvm": """
from numba import cuda
ptx, _ = cuda.compile_ptx(lambda x: x + 1, "int32(int32)", device=True, cc=(9, 0))
answer = {"sm_90": ".target sm_90" in ptx}
""",
    "h5py": """
import h5py
answer = {"version": h5py.__version__, "hdf5": h5py.version.hdf5_version}
""",
    "mpi4py": """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
answer = {"version": mpi4py.__version__, "library": MPI.Get_library_version().split(",")[0].strip()}
""",
}
"""Each sets `answer`; it is printed as JSON."""


def try_all() -> dict[str, dict[str, Any]]:
    """Run the programs side by side; a failed one gives {"error": its last line}."""
    with ThreadPoolExecutor(len(PROGRAMS)) as pool:
        return dict(zip(PROGRAMS, pool.map(try_program, PROGRAMS.values())))


def try_program(program: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """What a program in a child process finds out; {"error": why} when it fails or takes too long."""
    source = f"{program}\nimport json\nprint('\\n' + json.dumps(answer))"
    environment = {**os.environ, "OMPI_MCA_btl": "self", "PYTHONWARNINGS": "ignore"}
    environment.pop("NUMBA_ENABLE_CUDASIM", None)  # the simulator lowers nothing
    done = _run([sys.executable, "-c", source], environment, limit_s)
    if "error" in done:
        return done
    try:
        answer: dict[str, Any] = json.loads(done["output"].strip().splitlines()[-1])
        return answer
    except (ValueError, IndexError):
        return {"error": "the try printed no answer"}


def try_mpirun(mpirun: Path, limit_s: float = 20.0) -> str:
    """Start two processes that do nothing; "" when that works, else why not."""
    with tempfile.TemporaryDirectory(prefix="mooncake-lite-doctor-") as folder:
        environment = {**os.environ, "TMPDIR": folder}
        if os.getuid() == 0:
            environment.update(AS_ROOT)
        done = _run([str(mpirun), "-n", "2", *COMMON, "true"], environment, limit_s)
    return f"starting two processes failed: {done['error']}" if "error" in done else ""


def _run(command: list[str], environment: Mapping[str, str], limit_s: float) -> dict[str, Any]:
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer after {limit_s:.0f} s"}
    except OSError as error:
        return {"error": str(error.strerror)}
    if done.returncode != 0:
        words = [line for line in (done.stderr + done.stdout).splitlines() if line.strip(" -")]
        return {"error": words[-1].strip() if words else f"exit code {done.returncode}"}
    return {"output": done.stdout}
