"""What importing the store costs: next to nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.quick
def test_importing_any_module_of_the_store_loads_no_heavy_library() -> None:
    modules = [
        "keys",
        "layout",
        "allocator",
        "policies",
        "directory",
        "general",
        "allocation",
        "tier",
        "tier_folder",
        "tier_writer",
        "segment_file",
        "errors",
    ]
    program = "; ".join(f"import store.{name}" for name in modules)
    heavy = ("torch", "mpi4py", "numba", "h5py", "zmq")
    program += f"; import sys; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, check=True, text=True
    )
    assert run.stdout.strip() == "[]"
