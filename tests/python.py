"""Python in a process of its own: for a fresh start, or for another environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python(*arguments: str, limit_s: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the repository's root; `environment` comes on top of that of this process."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=limit_s,
    )  # fmt: skip


def printed_by(*arguments: str, limit_s: float = 60, **environment: str) -> str:
    """Run Python, which must succeed; return what it printed."""
    done = python(*arguments, limit_s=limit_s, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
