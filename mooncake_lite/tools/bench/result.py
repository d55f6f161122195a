"""The result of a benchmark: rows of (ours, peer, limit), and the machine they were measured on.

Used by all benchmarks. Pure but for asking for the commit.
Explained in docs/reference/cli.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from mooncake_lite.config.machine import signed

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
        ratios = {"ratio_to_peer": self.ratio(self.peer), "ratio_to_limit": self.ratio(self.limit)}
        found = asdict(self) | ratios
        return {name: value for name, value in found.items() if value or name not in ("note", "published")}


Figure = TypeVar("Figure")


@dataclass(frozen=True, slots=True)
class Side:
    """What ours is compared with: a peer, or a limit.

    measure   measures once and returns the figure; None where a peer is missing. `note` then says why.
    """

    name: str
    measure: Callable[[], float] | None
    note: str = ""


def compare(
    name: str,
    unit: str,
    runs: int,
    ours: Callable[[], float],
    peers: Sequence[Side],
    limit: Side | None = None,
) -> list[Row]:
    """Return one row for each peer, or one without a peer. All figures are in `unit`, measured in turns."""
    there = [side for side in (*peers, limit) if side and side.measure]
    mine, *found = in_turns(runs, ours, *(side.measure for side in there if side.measure))
    figures = dict(zip((side.name for side in there), found))
    best = min if unit in LOWER_IS_BETTER else max
    bound = Other(limit.name, best(figures[limit.name])) if limit else None
    own, rows = statistics.median(mine), []
    for peer in peers:
        beside = Other(peer.name, statistics.median(figures[peer.name])) if peer.measure else None
        rows.append(Row(name, unit, own, beside, bound, runs, peer.note))
    return rows or [Row(name, unit, own, None, bound, runs)]


def in_turns(runs: int, *actions: Callable[[], Figure]) -> list[list[Figure]]:
    """Return what each action returned. They take turns, so that a slow moment of the machine hits all."""
    figures: list[list[Figure]] = [[] for _ in actions]
    for _ in range(runs):
        for action, found in zip(actions, figures):
            found.append(action())
    return figures


def medians(runs: int, *actions: Callable[[], float]) -> list[float]:
    """Return the median of each action's figures. They take turns."""
    return [statistics.median(figures) for figures in in_turns(runs, *actions)]


def timed(action: Callable[[], object]) -> Callable[[], float]:
    """Return a measurement of the seconds of an action.

    The action runs once before, which does not count: that compiles it and touches its pages.
    """
    action()

    def measure() -> float:
        began = time.perf_counter()
        action()
        return time.perf_counter() - began

    return measure


def median_seconds(runs: int, *actions: Callable[[], object]) -> list[float]:
    """Return the median seconds of each action."""
    return medians(runs, *map(timed, actions))


def report(rows: list[Row], measured_on: dict[str, Any]) -> dict[str, Any]:
    """The whole result, ready for JSON. measured_on: `machine()`, taken before the measurement."""
    return signed(measured_on, {"rows": [row.to_dict() for row in rows]})


def busy(found: dict[str, Any]) -> str:
    """A warning when others used the machine before the measurement began, else "".

    With more processes than cores a message between two ranks waits for the scheduler, milliseconds instead
    of microseconds: such figures say nothing about MPI or about us.
    """
    load, cores = found["machine"]["load"], found["machine"]["cores"]
    if load <= BUSY_SHARE * cores:
        return ""
    return f"the machine was busy (load {load} on {cores} cores): do not quote these figures, measure again"
