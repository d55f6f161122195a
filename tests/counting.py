"""Counts what the tests start, and the CPU seconds of all their processes. `make test` asserts the counts.

    python -m pytest -p tests.counting ...      counts, says what it counted, and leaves it in $TEST_COUNTS
    python -m tests.counting FOLDER             adds what several runs have left; exit code 1 above a limit

A plugin of pytest. Python tells it of every child that a process of pytest starts. Whatever these start in
turn is only seen in their CPU seconds.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import kernels_numba.runtime  # noqa: F401 - says where the cache is
from tests.conftest import SPREAD

VARIABLE = "TEST_COUNTS"
"""Names the folder for the counts of a run, in the environment."""

KINDS = {
    "starts of clusters": re.compile(r"mooncake[-_]lite\S* serve\b"),
    "mpirun jobs of their own": re.compile(r"\bmpirun -n\b"),
    "gateway processes": re.compile(r"mooncake_lite\.gateway(?: |$)"),
    "lab interpreters": re.compile(r"mooncake_lite\.labs\.plugin|labs/confine\.py|lab\d\d/\w+\.py"),
}
"""What is counted -> what its command line looks like."""

COMPILED, DIVIDED = "compiled kernels", "divided files"
LIMITS = {
    "starts of clusters": 49,
    "gateway processes": 30,
    "lab interpreters": 66,
    COMPILED: 320,
    DIVIDED: 0,
}
"""The most that one `make test` may start. Some starts of clusters are refused before there is a rank. What
children start, and what warm.py of the labs forks, is not seen here. Tests of a divided file ran in several
workers, each of which made the fixtures of the file."""

SOAK = "only soak"
CPU = "CPU seconds"

_BEGAN = time.time()
_counts: Counter[str] = Counter()
_of_workers: Counter[str] = Counter()
_workers: dict[str, set[str]] = {}


def kind_of(command: str) -> str:
    """Return what a command line starts; "" for what is not counted."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(command)), "")


def _started(event: str, args: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and (kind := kind_of(" ".join(map(str, args[1])))):
        _counts[kind] += 1


def pytest_configure() -> None:
    """Begin to count, in each process of pytest."""
    sys.addaudithook(_started)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count tests that only `make soak` runs, and note where files run. Workers leave it to their parent."""
    if hasattr(report, "node"):
        _workers.setdefault(report.nodeid.partition("::")[0], set()).add(report.node.gateway.id)
    if report.skipped and "make soak" in str(report.longrepr):
        _of_workers[SOAK] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells its parent what it has counted; the parent sees its seconds, as those of any child."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["counts"] = dict(_counts)


def pytest_testnodedown(node: Any) -> None:
    """The parent adds what a worker has told."""
    _of_workers.update(getattr(node, "workeroutput", {}).get("counts", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was counted, and leave it for the sum."""
    if hasattr(terminalreporter.config, "workeroutput"):
        return
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(one.ru_utime + one.ru_stime for one in used)
    divided = sum(len(workers) > 1 for file, workers in _workers.items() if file not in SPREAD)
    counts = _counts + _of_workers + Counter({COMPILED: _compiled(), DIVIDED: divided, CPU: round(seconds)})
    terminalreporter.write_line(_said(counts))
    if folder := os.environ.get(VARIABLE):
        (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(counts))


def _said(counts: Counter[str]) -> str:
    names = (*KINDS, COMPILED, DIVIDED, SOAK, CPU)
    return "counted: " + ", ".join(f"{name} {counts[name]}" for name in names)


def _compiled() -> int:
    """How many kernels have been compiled into the cache since then: Numba writes a file for each."""
    files = Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*.nbc")
    return sum(path.stat().st_mtime >= _BEGAN for path in files)


def main(folder: Path) -> int:
    """Add the counts of a folder, and compare them with their limits."""
    total = sum((Counter(json.loads(path.read_text())) for path in folder.glob("*.json")), Counter())
    print("all runs,", _said(total))
    above = [
        f"{name}: {total[name]}, at most {limit}" for name, limit in LIMITS.items() if total[name] > limit
    ]
    for line in above:
        print(f"more was started than one run of the tests may start: {line}", file=sys.stderr)
    return bool(above)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
