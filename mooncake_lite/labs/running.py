"""Running: the tests of a lab against the code of a tree, in a pytest process of their own.

warm.py forks that process, because an interpreter and pytest take longer to start than most tests take.
Used by `labs check`, `grade` and `dev check`. It takes a tree as it is; who strips and fills it in is another
file. Explained in docs/explain/labs.md, "The judge".
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

from mooncake_lite.errors import LabError
from mooncake_lite.labs.judging import Outcome, Run, Variant
from mooncake_lite.labs.lab import FOLDER, Lab, LabTask
from mooncake_lite.labs.sandbox import Level

NOTHING_COLLECTED = 5
SECONDS = 900.0
"""A run that takes longer has a judge that hangs: the children have limits of their own."""
_OUTCOME = msgspec.json.Decoder(Outcome)
_START = threading.Lock()
"""Submissions are graded in several threads."""


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
    with tempfile.TemporaryDirectory(prefix="mlab") as folder:
        run = Run(str(tree), lab.number, dict(seeds), level, f"{folder}/results.json", gpu)
        (outcome,) = _outcomes(root, lab, tasks, run, Path(folder), only)
    return outcome


def run_variants(
    root: Path,
    lab: Lab,
    task: LabTask,
    tree: Path,
    texts: Sequence[str],
    seeds: Mapping[str, int],
    *,
    seconds: int,
    only: Sequence[str] = (),
    first: bool = False,
) -> list[Outcome]:
    """Run the tests of a task once with each text of its file, whose last one stays in the tree.

        seconds  processor time of each
        only     names of tests, all when empty
        first    end with the first test that fails

    Raises LabError, as `run_tests` does.
    """
    with tempfile.TemporaryDirectory(prefix="mlab") as folder:
        variants = [Variant(task.file, text, f"{folder}/{number}.json") for number, text in enumerate(texts)]
        run = Run(str(tree), lab.number, dict(seeds), "none", "", seconds=seconds, variants=variants)
        return _outcomes(root, lab, [task.id], run, Path(folder), only, first=first)


def _outcomes(
    root: Path,
    lab: Lab,
    tasks: Sequence[str],
    run: Run,
    folder: Path,
    only: Sequence[str],
    *,
    first: bool = False,
) -> list[Outcome]:
    """Run pytest, and return what it came to: for each variant of the run, or for its tree as it is."""
    files = [path for task in tasks for path in sorted((root / lab.tests).glob(f"test_{task}_*.py"))]
    if not files:
        raise LabError(f"{lab.tests} has no tests for {' '.join(tasks) or 'no task'}; nothing was tested")
    (folder / "run.json").write_bytes(msgspec.json.encode(run))
    (folder / "pytest.ini").write_text("[pytest]\n")
    arguments = ["-q", "-c", f"{folder}/pytest.ini", f"--rootdir={root}", "-p", "no:cacheprovider"]
    arguments += ["-p", "mooncake_lite.labs.plugin", "--lab-run", f"{folder}/run.json"]
    arguments += [f"--confcutdir={root / FOLDER}", *(["-k", " or ".join(only)] if only else [])]
    arguments += ["-x"] if first else []
    code, said = _pytest(root, folder, [*arguments, *map(str, files)])
    if code is None:
        raise LabError(f"the tests of lab {lab.number} took more than {SECONDS:.0f} s")
    results = [Path(variant.results) for variant in run.variants] or [Path(run.results)]
    if code == NOTHING_COLLECTED or not all(path.exists() for path in results):
        raise LabError(f"nothing was tested: {_last_words(said)}")
    outcomes = [_OUTCOME.decode(path.read_bytes()) for path in results]
    if broken := next((outcome.broken for outcome in outcomes if outcome.broken), ""):
        raise LabError(f"the tests of lab {lab.number} cannot run: {broken}")
    if code not in (0, 1) or not all(outcome.cases for outcome in outcomes):
        raise LabError(f"the tests of lab {lab.number} cannot run: {_last_words(said)}")
    return outcomes


def _pytest(root: Path, folder: Path, arguments: list[str]) -> tuple[int | None, str]:
    """Run pytest in a child of the warmed parent. Return its exit code, None out of time, and its output."""
    ended, output = folder / "ended", folder / "output"
    os.mkfifo(ended)
    wanted = {"root": str(root), "env": _environment(root), "arguments": arguments}
    wanted |= {"ended": str(ended), "output": str(output)}
    lines, deadline, closed = b"", time.monotonic() + SECONDS, False
    with open(os.open(ended, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as told:
        with _START:
            if (parent := _warmed()).poll() is not None:  # it was killed
                _warmed.cache_clear()
                parent = _warmed()
            assert parent.stdin is not None
            parent.stdin.write(msgspec.json.encode(wanted) + b"\n")
            parent.stdin.flush()
        try:
            while not closed and time.monotonic() < deadline and parent.poll() is None:
                if select.select([told], [], [], 1.0)[0]:
                    part = told.read(64)
                    closed, lines = not part, lines + part
        finally:
            pid, *codes = map(int, lines.split() or [b"0"])
            if pid and not closed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    said = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    out_of_time = not closed and parent.poll() is None
    return None if out_of_time else codes[0] if codes else -1, said


@cache
def _warmed() -> subprocess.Popen[bytes]:
    """Start the warmed parent. It ends with this process."""
    environment = _environment(Path("/"))
    del environment["PYTHONPATH"]
    command = [sys.executable, "-P", str(Path(__file__).with_name("warm.py"))]
    parent = subprocess.Popen(command, cwd="/", env=environment, stdin=subprocess.PIPE)
    atexit.register(parent.communicate)
    return parent


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
