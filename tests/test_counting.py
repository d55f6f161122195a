"""What a run of the tests starts is counted in all its processes, and a count above its limit is told."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.counting import CPU, LIMITS, SOAK, VARIABLE, kind_of, main

ROOT = Path(__file__).resolve().parents[1]

STARTING = """
import subprocess, sys, time
import pytest

@pytest.mark.parametrize("number", [1, 2])
def test_starts(number):
    subprocess.run([sys.executable, "-c", "while __import__('time').process_time() < 0.6: pass",
                    "-m", "mooncake_lite.gateway", "folder"], check=True)

def test_skips():
    pytest.skip("takes long; make soak does it")
"""


@pytest.mark.parametrize("workers", [["-n", "2"], []])
def test_processes_seconds_and_what_only_soak_runs_are_counted(workers: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_starting.py").write_text(STARTING)
    command = [sys.executable, "-m", "pytest", "-p", "tests.counting", f"--rootdir={tmp_path}", *workers]
    environment = os.environ | {VARIABLE: str(tmp_path)}
    quiet = subprocess.DEVNULL
    before = _seconds_of_children()
    subprocess.run([*command, tmp_path], cwd=ROOT, env=environment, stdout=quiet, timeout=120, check=True)
    (counts,) = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert {"gateway processes": 2, SOAK: 1}.items() <= counts.items()
    assert 1 <= counts[CPU] <= _seconds_of_children() - before + 1  # each process once


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.quick
@pytest.mark.parametrize("kind", LIMITS)
def test_the_sum_of_all_runs_must_be_within_the_limit(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "1.json").write_text(json.dumps({kind: LIMITS[kind], CPU: 5}))
    assert main(tmp_path) == 0
    (tmp_path / "2.json").write_text(json.dumps({kind: 1, CPU: 7}))
    assert main(tmp_path) == 1
    said = capsys.readouterr()
    assert f"{kind}: {LIMITS[kind] + 1}, at most {LIMITS[kind]}" in said.err
    assert f"{CPU} 12" in said.out


@pytest.mark.quick
@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("python -m mooncake_lite serve --port 1", "starts of clusters"),
        ("bash -c mooncake-lite serve default", "starts of clusters"),
        ("/venv/bin/mpirun -n 3 python program.py", "mpirun jobs of their own"),
        ("python -m mooncake_lite.gateway /run", "gateway processes"),
        ("python -m pytest -p mooncake_lite.labs.plugin", "lab interpreters"),
        ("python -m mooncake_lite simulate cluster", ""),
    ],
)
def test_commands_are_told_apart(command: str, kind: str) -> None:
    assert kind_of(command) == kind
