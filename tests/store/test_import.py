"""What importing the store costs: next to nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITH_A_MASTER = ("mooncake_store",)
"""Of a store with a master of its own, which listens with ZeroMQ."""


@pytest.mark.quick
def test_importing_any_module_of_the_store_loads_no_heavy_library() -> None:
    paths = (path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / "store").rglob("*.py")))
    modules = [".".join(path.parts) for path in paths if path.parts[1] not in WITH_A_MASTER]
    assert len(modules) > 40
    program = "import " + ", ".join(modules)
    heavy = ("torch", "mpi4py", "numba", "h5py", "zmq")
    program += f"; import sys; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, check=True, text=True
    )
    assert run.stdout.strip() == "[]"
