"""Lowering: gate 3, the parent's side. A CUDA region must compile for a GPU, although no GPU is there.

Used by `labs check`, `grade` and `dev check`. Numba's simulator runs any Python; a GPU does not. The compiler
runs in a child of its own, on the student's file. Explained in docs/explain/labs.md, "Gates".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from mooncake_lite.labs.asking import Stopped, in_words, task_child
from mooncake_lite.labs.child import Raised
from mooncake_lite.labs.lab import Lab, LabTask
from mooncake_lite.labs.sandbox import Level

DRIVER = "mooncake_lite/labs/lowering_drive.py"
MOST_SHOWN = 300
FAILED = "a kernel must compile for a GPU, and it does not lower to PTX"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Lowered:
    """problems: {task: why it does not lower to PTX}; skipped: why none was tried, empty when they were."""

    problems: dict[str, str]
    skipped: str = ""


class Device(msgspec.Struct):
    """The GPU of this machine: its name, or why there is none."""

    name: str = ""
    error: str = ""


def lower(tree: Path, lab: Lab, tasks: Sequence[LabTask], *, level: Level) -> Lowered:
    """Lower the kernels of these tasks in a tree. A task without kernels has no problem."""
    wanted = {name: task.id for task in tasks for name in task.kernels}
    if not wanted:
        return Lowered({})
    try:
        found = _asked(tree, lab, "lower", list(wanted), dict[str, str], level=level)
    except Stopped as error:
        return Lowered(dict.fromkeys(wanted.values(), f"{FAILED}: {error}"))
    if "" in found:
        return Lowered({}, found[""])
    problems: dict[str, str] = {}
    for name, task in wanted.items():
        if why := found.get(name, f"gpu_lowering has no kernel {name!r}"):
            problems.setdefault(task, f"{FAILED}: {' '.join(why.split())[:MOST_SHOWN]}")
    return Lowered(problems)


def device(tree: Path, lab: Lab) -> Device:
    """Return the GPU of this machine."""
    try:
        return _asked(tree, lab, "device", None, Device, level="none", gpu=True)
    except Stopped as error:
        return Device(error=str(error))


def _asked(
    tree: Path, lab: Lab, call: str, inputs: object, kind: type[T], *, level: Level, gpu: bool = False
) -> T:
    """Ask a child once. Raises Stopped when there is no answer."""
    child = task_child(tree, DRIVER, lab.resources, level=level, gpu=gpu)
    try:
        said = child.ask(call, inputs, kind)
    finally:
        child.close()
    if isinstance(said, Raised):
        raise Stopped(in_words(said))
    return said
