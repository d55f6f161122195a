"""What simulated ranks and clients need of their world.

Implemented by `world.py`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from mooncake_lite import messages as m
from mooncake_lite.simulator.bytes import Bytes
from mooncake_lite.simulator.clock import Clock
from mooncake_lite.simulator.hardware import Hardware
from mooncake_lite.simulator.shapes import Shape
from mooncake_lite.simulator.workload import Request
from mooncake_lite.workloads.metrics import Record


class Surroundings(Protocol):
    """A world, as its ranks and clients see it.

    requests   that were sent and have not ended; records: what became of the others
    dead       ranks that were killed
    """

    clock: Clock
    hardware: Hardware
    bytes: Bytes
    dice: Random
    shape: Shape
    requests: dict[str, Request]
    records: list[Record]
    dead: set[int]

    @property
    def ready(self) -> bool:
        """Return whether the conductor takes requests."""

    def skip(self, draws: int) -> None:
        """Take draws of the dice that decide nothing."""

    def answer(self, message: m.Message) -> None:
        """Send an event or a report from a rank to the control plane."""

    def tokens(self, rank: int, message: m.Message, times_s: Sequence[float]) -> None:
        """Send tokens from a rank to the gateway. times_s: when the rank drew them."""

    def from_clients(self, message: m.Message) -> None:
        """Send a message from a gateway to the control plane."""

    def tell(self, message: m.Message) -> None:
        """Have a message reach the conductor now."""
