"""What a run of the world is about: the cluster, its machines and its requests.

Made by `cluster.py`. The fault world of the tests draws all of it, and what goes wrong. Explained in
docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from mooncake_lite.simulator.clock import Clock
from mooncake_lite.simulator.hardware import Hardware
from mooncake_lite.simulator.shapes import Shape
from mooncake_lite.simulator.workload import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One run.

    hardware   makes the hardware of the run, which needs its clock
    source     of its requests
    dice       decides how long messages take, and which of them a rank takes with it when it dies
    """

    shape: Shape
    hardware: Callable[[Clock], Hardware]
    source: Source
    dice: Random
