"""Programs of tests of the kernels that need a Python of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def run_python(program: str, **environment: str) -> str:
    """Output of a child Python that must succeed within four minutes: where nothing is compiled yet, the
    kernels of one test here have taken 34 s to compile on a machine with other work."""
    inherited = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        env=inherited | environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
