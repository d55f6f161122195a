"""What the models of ranks and clients need of their world.

Implemented by `world.py`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from random import Random
from typing import Protocol

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.simulator.clock import Clock
from mooncake_lite.simulator.faults import Faults
from mooncake_lite.simulator.hardware import Hardware
from mooncake_lite.simulator.memory import Memory
from mooncake_lite.simulator.shapes import Shape
from mooncake_lite.simulator.workload import Request


class Surroundings(Protocol):
    """A world, as its models see it.

    requests   all that were sent
    dice       of the models and of faults
    ready      the control plane takes requests
    stopped    the control plane has said Stop
    """

    clock: Clock
    hardware: Hardware
    memory: Memory
    dice: Random
    faults: Faults
    shape: Shape
    requests: dict[str, Request]
    ready: bool
    stopped: fx.Stop | None

    def answer(self, event: ev.RankEvent) -> None:
        """Send an event from a rank to the control plane."""

    def from_clients(self, event: ev.Event) -> None:
        """Send an event from a gateway or a command to the control plane."""

    def tell(self, event: ev.Event) -> None:
        """Have an event reach the control plane now."""
