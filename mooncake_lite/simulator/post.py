"""The messages of a simulated cluster. They come a little late, and those between two ends in their order.

The part of `world.py` between its processes. In the fault world of the tests messages are also lost, doubled
and reordered. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

from mooncake_lite import messages as m
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.simulator.clients import Clients
from mooncake_lite.simulator.clock import Clock, Links
from mooncake_lite.simulator.hardware import Hardware

CONDUCTOR, CLIENTS = 0, -1
"""Ends of links; ranks have their own numbers."""

STARTS = m.RankHello | ev.TierIndexed | ev.Inventory
"""What a rank says while it starts."""


def event_of(message: m.Message) -> ev.RankEvent | m.RankHello:
    """Return what a rank says with a message: an event, a report about one, or that it joins."""
    event = message.event if isinstance(message, m.Report) else message
    assert isinstance(event, ev.RankEvent | m.RankHello)
    return event


class Post(ABC):
    """Delivers messages to the control plane and to ranks, and tokens to clients."""

    clock: Clock
    dice: Random
    dead: set[int]
    clients: Clients
    hardware: Hardware
    ranks: dict[int, Any]
    _links: Links

    def skip(self, draws: int) -> None:
        """Take draws that decide nothing, so that a seed gives what it gave when faults were drawn here."""
        for _ in range(draws):
            self.dice.random()

    @abstractmethod
    def tell(self, message: m.Message) -> None:
        """Have a message reach the conductor now."""

    def answer(self, message: m.Message) -> None:
        """Send an event from a rank to the control plane."""
        event = event_of(message)
        if event.rank in self.dead:
            return
        starts = isinstance(event, STARTS)
        self.skip(0 if starts else 2)
        deliver = partial(self._tell_of, event, message)
        delay_s = self._delay_s() + self.hardware.away_s(event.rank)
        self._links.send(event.rank, CONDUCTOR, delay_s, deliver)
        self.skip(0 if starts else 1)

    def _tell_of(self, event: ev.RankEvent | m.RankHello, message: m.Message) -> None:
        """Deliver a message of a rank. If its rank has died, it may have died with that."""
        if event.rank not in self.dead or self.dice.random() < 0.5:
            self.tell(message)

    def tokens(self, rank: int, message: m.Message, times_s: Sequence[float]) -> None:
        """Give tokens of a rank to their client. times_s: when the rank drew them.

        If their rank has died, they may have died with it.
        """
        assert isinstance(message, m.Tokens)
        if rank not in self.dead or self.dice.random() < 0.5:
            self.clients.on_tokens(message, times_s)

    def order(self, order: fx.Order, message: m.Message) -> str | None:
        """Send an order to its rank, as this message. Returns why it cannot be sent, or None."""
        self.skip(2)
        deliver = partial(self.ranks[order.rank].on, message)
        delay_s = self._delay_s() + self.hardware.away_s(order.rank)
        self._links.send(CONDUCTOR, order.rank, delay_s, deliver)
        return None

    def recall(self, recall: fx.Recall) -> None:
        """Ask the gateway what a client has."""
        self.skip(1)
        self._links.send(CONDUCTOR, CLIENTS, self._delay_s(), partial(self.clients.on_recall, recall))

    def from_clients(self, message: m.Message) -> None:
        """Send a message from a gateway."""
        spent_s = self.hardware.request_s if isinstance(message, m.Submit) else 0.0
        self._links.send(CLIENTS, CONDUCTOR, spent_s + self._delay_s(), partial(self.tell, message))

    def _delay_s(self) -> float:
        self.skip(1)
        return self.dice.random() * self.hardware.message_s
