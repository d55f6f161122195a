"""What simulated ranks and clients need of their world.

Implemented by `world.py`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from mooncake_lite import messages as m
from mooncake_lite.control import effects as fx
from mooncake_lite.simulator.clock import Clock
from mooncake_lite.simulator.faults import Faults
from mooncake_lite.simulator.hardware import Hardware
from mooncake_lite.simulator.memory import Memory
from mooncake_lite.simulator.shapes import Shape
from mooncake_lite.simulator.workload import Request


class Surroundings(Protocol):
    """A world, as its ranks and clients see it.

    requests   all that were sent
    dice       of ranks and of faults
    exact      tokens and KV are followed; otherwise prompts are lengths
    dead       ranks that were killed
    """

    clock: Clock
    hardware: Hardware
    memory: Memory
    dice: Random
    faults: Faults
    shape: Shape
    requests: dict[str, Request]
    exact: bool
    dead: set[int]

    @property
    def ready(self) -> bool:
        """Return whether the conductor takes requests."""

    @property
    def stopped(self) -> fx.Stop | None:
        """Return the Stop of the conductor."""

    @property
    def term(self) -> int:
        """Return the number of the present conductor."""

    def forget(self, request: Request) -> None:
        """Keep of a request that has ended when its client had its tokens, where prompts are lengths."""

    def end_conductor(self) -> None:
        """Have the conductor die soon, and the next one take over."""

    def answer(self, message: m.Message) -> None:
        """Send an event or a report from a rank to the control plane."""

    def tokens(self, rank: int, message: m.Message, times_s: Sequence[float]) -> None:
        """Send tokens from a rank to the gateway. times_s: when the rank drew them."""

    def kill(self, rank: int, *, ended: bool) -> None:
        """Kill a rank. The control plane hears of it soon. ended: its end was seen."""

    def from_clients(self, message: m.Message) -> None:
        """Send a message from a gateway or a command to the control plane."""

    def tell(self, message: m.Message) -> None:
        """Have a message reach the conductor now."""
