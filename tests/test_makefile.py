"""Which Pythons are taken: by the Makefile, by pip and by `doctor` the same ones."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from mooncake_lite.tools.doctor import command as doctor

ROOT = Path(__file__).resolve().parent.parent

AS_ANOTHER = """#!/bin/sh
case $1 in
--version) echo "Python {}.{}.1" ;;
-c) exec '{}' -c 'import sys; sys.version_info = ({}, {}, 1); exec(sys.argv[1])' "$2" ;;
-m) echo made ;;
esac
"""
"""A program that answers as another version of Python does."""


@pytest.mark.parametrize(("minor", "taken"), [(10, False), (11, True), (99, True)])
def test_every_python_from_3_11_on_is_taken(
    minor: int, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(AS_ANOTHER.format(3, minor, sys.executable, 3, minor))
    python.chmod(0o700)
    command = ["make", "-s", f"PYTHON={python}", f"VENV={tmp_path}/venv", f"{tmp_path}/venv/bin/python"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    refused = f"make: Python 3.{minor}.1 is too old; use 3.11 or later: make PYTHON=/path/to/python3.12\n"
    assert (done.returncode == 0, done.stdout) == (taken, "made\n" if taken else "")
    assert taken == (done.stderr == "")
    assert taken != done.stderr.startswith(refused)

    monkeypatch.setattr(doctor, "sys", SimpleNamespace(version_info=(3, minor, 1)))
    (found,) = [finding for finding in doctor._system() if finding.name == "Python"]
    assert found.state == ("ok" if taken else "missing")

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
