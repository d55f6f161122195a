"""Running: the tests of a lab against the code of a tree, in a pytest process of their own.

Used by `labs check`, `grade` and `dev check`. It takes a tree as it is; who strips and fills it in is another
file. Explained in docs/explain/labs.md, "The judge".
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from mooncake_lite.errors import LabError
from mooncake_lite.labs.judging import Outcome, Run
from mooncake_lite.labs.lab import Lab
from mooncake_lite.labs.sandbox import Level

NOTHING_COLLECTED = 5
SECONDS = 900.0
"""A run that takes longer has a judge that hangs: the children have limits of their own."""


def run_tests(
    root: Path,
    lab: Lab,
    tasks: Sequence[str],
    tree: Path,
    seeds: Mapping[str, int],
    *,
    level: Level,
    only: Sequence[str] = (),
    gpu: bool = False,
) -> Outcome:
    """Run the tests of these tasks.

        root   where the tests and lab.toml are
        tree   whose code is tested
        only   names of tests, all when empty
        gpu    run kernels on a GPU, in place of the simulator

    Raises LabError if nothing is collected, or if the judge itself fails.
    """
    files = [path for task in tasks for path in sorted((root / lab.tests).glob(f"test_{task}_*.py"))]
    if not files:
        raise LabError(f"{lab.tests} has no tests for {' '.join(tasks) or 'no task'}; nothing was tested")
    with tempfile.TemporaryDirectory(prefix="mlab") as folder:
        results = Path(folder) / "results.json"
        run = Run(str(tree), lab.number, dict(seeds), level, str(results), gpu)
        (Path(folder) / "run.json").write_bytes(msgspec.json.encode(run))
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-q", "-c", f"{folder}/pytest.ini", f"--rootdir={root}"]
        command += ["-p", "mooncake_lite.labs.plugin", "--lab-run", f"{folder}/run.json"]
        command += ["-p", "no:cacheprovider"]
        command += [f"--confcutdir={root / 'tests/labs'}", *(["-k", " or ".join(only)] if only else [])]
        try:
            done = subprocess.run(
                [*command, *map(str, files)],
                cwd=root,
                env=_environment(root),
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LabError(f"the tests of lab {lab.number} took more than {SECONDS:.0f} s") from None
        if done.returncode == NOTHING_COLLECTED or not results.exists():
            raise LabError(f"nothing was tested: {_last_words(done.stdout + done.stderr)}")
        outcome = msgspec.json.decode(results.read_bytes(), type=Outcome)
    if done.returncode not in (0, 1) or not outcome.cases:
        raise LabError(f"the tests of lab {lab.number} cannot run: {_last_words(done.stdout + done.stderr)}")
    return outcome


def _environment(root: Path) -> dict[str, str]:
    """The parent imports its tests from `root`, and loads no plugin but its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return kept | {
        "PYTHONPATH": str(root),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _last_words(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return " | ".join(lines[-6:]) or "pytest said nothing; pip install 'mooncake-lite[test]' has it"
