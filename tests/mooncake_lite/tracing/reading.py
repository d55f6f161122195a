"""Reads a trace as a viewer does, and refuses what a viewer would show wrongly."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Slice:
    """One slice: its process and lane by name, its times in seconds, and its depth in the lane."""

    process: str
    lane: str
    name: str
    began_s: float
    ended_s: float
    args: dict[str, Any]
    depth: int = 0


@dataclass
class Trace:
    """A trace that keeps the rules of the format.

    processes   names, in the order of their numbers
    labels      what a process says of itself
    """

    processes: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    instants: list[dict[str, Any]] = field(default_factory=list)
    arrows: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    def of(self, process: str, lane: str = "") -> list[Slice]:
        """The slices of a process whose name contains `process`, on lanes whose name begins with `lane`."""
        return [one for one in self.slices if process in one.process and one.lane.startswith(lane)]


def read(path: Path) -> Trace:
    """Open a trace. Fails when a process or lane has no name, when slices of a lane cross, when a B has no
    E, or when the events of a lane are not in the order of their times."""
    events = json.loads(path.read_text())["traceEvents"]
    trace = Trace()
    names: dict[tuple[int, int], str] = {}
    at: dict[tuple[int, int], float] = {}
    stacks: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for event in events:
        kind, pid, lane = event["ph"], event["pid"], (event["pid"], event["tid"])
        if kind == "M":
            if event["name"] == "process_name":
                names[pid, 0] = event["args"]["name"]
                trace.processes.append(event["args"]["name"])
            elif event["name"] == "process_labels":
                trace.labels[names[pid, 0]] = event["args"]["labels"]
            elif event["name"] == "thread_name":
                names[lane] = event["args"]["name"]
            continue
        time_s = event["ts"] / 1e6
        assert time_s >= at.get(lane, 0.0), f"{event} comes before what stands before it on its lane"
        at[lane] = time_s
        args = event.get("args", {})
        if kind == "X":
            ended_s = time_s + event["dur"] / 1e6
            assert not stacks[lane], f"{event} lies on a lane of nested slices"
            at[lane] = ended_s - 1e-6  # doubles of microseconds
            trace.slices.append(Slice(names[pid, 0], names[lane], event["name"], time_s, ended_s, args))
        elif kind == "B":
            depth = len(stacks[lane])
            stacks[lane].append(Slice(names[pid, 0], names[lane], event["name"], time_s, -1.0, args, depth))
        elif kind == "E":
            ended = stacks[lane].pop()
            ended.ended_s, ended.args = time_s, ended.args | args
            trace.slices.append(ended)
        elif kind == "i":
            trace.instants.append(event)
        else:
            assert kind in "stf", f"{event} is of no known kind"
            assert stacks[lane], f"the arrow {event} leads to no slice"
            trace.arrows[event["id"]].append(event)
    open_ones = [one for stack in stacks.values() for one in stack]
    assert open_ones == [], "a B without its E"
    return trace
