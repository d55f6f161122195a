"""The result of a benchmark: rows of (ours, peer, limit), and the machine they were measured on.

Used by all benchmarks. Pure but for asking for the machine and the commit.
Explained in docs/reference/cli.md.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mooncake_lite.launch.machine import available_memory, usable_cores

LOWER_IS_BETTER = ("ms", "us", "s", "pages", "% off")

BUSY_SHARE = 0.5
"""Of the cores, wanted by others when a benchmark begins; above it the figures are not worth quoting."""


@dataclass(frozen=True, slots=True)
class Other:
    """What a figure is held against: a peer's figure, a limit of the machine, or a published figure."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, in one unit: ours and the peer's are medians of `runs` runs. The limit is the best run of a
    kernel, and the median too where it is a program as easily disturbed as ours.

    note        why a peer is missing that should be there
    published   figures that other projects have published, measured on their machines with their work. They
                are not comparable, so they have no ratio.
    """

    name: str
    unit: str
    ours: float
    peer: Other | None
    limit: Other | None
    runs: int
    note: str = ""
    published: tuple[Other, ...] = ()

    def ratio(self, other: Other | None) -> float | None:
        """Above 1: ours is better. Against a limit, 1 is the limit. None without one."""
        if other is None or not self.ours or not other.value:
            return None
        return other.value / self.ours if self.unit in LOWER_IS_BETTER else self.ours / other.value

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the JSON."""
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": self.ours,
            "peer": None if self.peer is None else asdict(self.peer),
            "limit": None if self.limit is None else asdict(self.limit),
            "ratio_to_peer": self.ratio(self.peer),
            "ratio_to_limit": self.ratio(self.limit),
            "runs": self.runs,
            **({"note": self.note} if self.note else {}),
            **({"published": [asdict(other) for other in self.published]} if self.published else {}),
        }


def median_seconds(runs: int, *actions: Callable[[], object]) -> list[float]:
    """Median seconds of each action."""
    return [statistics.median(taken) for taken in _times(runs, actions)]


def against(
    runs: int, ours: Callable[[], object], peer: Callable[[], object], limit: Callable[[], object]
) -> tuple[float, float, float]:
    """Seconds of ours and of the peer (medians), and of the limit: its best run.

    A limit is what the machine can do, so a moment in which somebody else had the core must not lower it:
    a median would let ours come out better than the limit.
    """
    mine, theirs, bound = _times(runs, (ours, peer, limit))
    return statistics.median(mine), statistics.median(theirs), min(bound)


@dataclass(frozen=True, slots=True)
class Action:
    """Something to be timed, and what it is called."""

    name: str
    run: Callable[[], object]


def compare(
    name: str,
    unit: str,
    figure: Callable[[float], float],
    runs: int,
    ours: Callable[[], object],
    peers: Sequence[Action],
    limit: Action | None = None,
) -> list[Row]:
    """One row for each peer, all timed in turns in the same run.

    figure   seconds -> the figure in `unit`
    """
    others = [*peers, limit] if limit else [*peers]
    mine, *taken = _times(runs, [ours, *(other.run for other in others)])
    bound = Other(limit.name, figure(min(taken[-1]))) if limit else None
    own = figure(statistics.median(mine))
    return [
        Row(name, unit, own, Other(peer.name, figure(statistics.median(seconds))), bound, runs)
        for peer, seconds in zip(peers, taken)
    ]


def milliseconds(seconds: float) -> float:
    """For `compare`."""
    return seconds * 1e3


def gigabytes_per_second(nbytes: int) -> Callable[[float], float]:
    """For `compare`: what moving so many bytes in some seconds comes to."""
    return lambda seconds: nbytes / 1e9 / seconds


def _times(runs: int, actions: Sequence[Callable[[], object]]) -> list[list[float]]:
    """Seconds of each run. Actions take turns, so that a slow moment of the machine hits all alike."""
    times: list[list[float]] = [[] for _ in actions]
    for action in actions:
        action()  # compiles, touches pages
    for _ in range(runs):
        for action, taken in zip(actions, times):
            started = time.perf_counter()
            action()
            taken.append(time.perf_counter() - started)
    return times


def report(rows: list[Row], measured_on: dict[str, Any]) -> dict[str, Any]:
    """The whole result, ready for JSON. measured_on: `machine()`, taken before the measurement."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": measured_on,
        "commit": commit(),
        "rows": [row.to_dict() for row in rows],
    }


def machine() -> dict[str, Any]:
    """What the figures depend on. load: processes that wanted a core, mean of the last minute."""
    cpu = platform.processor() or platform.machine()
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": cpu,
        "cores": usable_cores(),
        "load": round(os.getloadavg()[0], 2),
        "memory_bytes": available_memory(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def busy(found: dict[str, Any]) -> str:
    """A warning when others used the machine before the measurement began, else "".

    With more processes than cores a message between two ranks waits for the scheduler, milliseconds instead
    of microseconds: such figures say nothing about MPI or about us.
    """
    load, cores = found["machine"]["load"], found["machine"]["cores"]
    if load <= BUSY_SHARE * cores:
        return ""
    return f"the machine was busy (load {load} on {cores} cores): do not quote these figures, measure again"


def commit() -> str:
    """The commit of the source tree, "" outside of one; "+" when files differ from it."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the JSON. Raises OSError."""
    path.write_text(json.dumps(result, indent=2) + "\n")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
