"""The messages of a modelled cluster: they come late, twice, in another order, or not at all.

The part of `world.py` between its processes. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from random import Random

from msgspec.structs import replace

from mooncake_lite import messages as m
from mooncake_lite.control import events as ev
from mooncake_lite.simulator.clients import Clients
from mooncake_lite.simulator.clock import Clock, Links
from mooncake_lite.simulator.custody import Custody
from mooncake_lite.simulator.faults import Faults
from mooncake_lite.simulator.hardware import Hardware

CONDUCTOR, CLIENTS = 0, -1
"""Ends of links; ranks have their own numbers."""

STARTS = m.RankHello | ev.TierIndexed | ev.Inventory
"""Messages that come in their order, once: a rank that is not heard while it starts ends the cluster."""

ONCE = STARTS | ev.BlocksSaved
"""Messages that do not come twice: a second BlocksSaved could be about a block that was put again since."""


class Post(ABC):
    """Delivers messages to the control plane, and tokens to clients.

    _heard   request -> what ranks have said of it
    """

    clock: Clock
    dice: Random
    faults: Faults
    exact: bool
    dead: set[int]
    clients: Clients
    hardware: Hardware
    custody: Custody
    _links: Links
    _heard: dict[str, list[m.Message]]

    @property
    @abstractmethod
    def term(self) -> int:
        """Return the number of the present conductor."""

    @abstractmethod
    def tell(self, message: m.Message, *, stale: bool = False) -> None:
        """Have an event reach the control plane now."""

    def answer(self, message: m.Message) -> None:
        """Send an event from a rank to the control plane. It may be delayed, and come again much later."""
        faults, dice = self.faults, self.dice
        event = message.event if isinstance(message, m.Report) else message
        assert isinstance(event, ev.RankEvent | m.RankHello)
        if event.rank in self.dead:
            return
        deliver = partial(self._tell_of, event, message)
        if isinstance(event, STARTS):
            self._links.send(event.rank, CONDUCTOR, self._delay_s(), deliver)
            return
        assert isinstance(event, ev.RankEvent)
        if self.exact and dice.random() < faults.wrong_epoch:
            self.clock.after(0.0, partial(self.tell, self._of_other_start(message, event), stale=True))
        if dice.random() < faults.dropped:
            if event.epoch == self.term:
                self.custody.unheard(event)
            return
        if dice.random() < faults.reordered:
            self.clock.at(delivered := self.clock.now + self._delay_s(), deliver)
        else:
            delivered = self._links.send(event.rank, CONDUCTOR, self._delay_s(), deliver)
        if dice.random() < faults.doubled and not isinstance(event, ONCE):
            seconds = dice.choice((0.0, 0.1, 3.0, 200.0)) * dice.random()
            self.clock.at(delivered + seconds, lambda: self._tell_again(event.rank, message))
        if self.exact and (request_id := getattr(event, "request_id", "")):
            self._heard.setdefault(request_id, []).append(message)

    def _tell_of(self, event: ev.RankEvent | m.RankHello, message: m.Message) -> None:
        """Deliver a message of a rank. If its rank or conductor has died, it may have died with that."""
        is_stale = event.epoch != self.term
        if not (is_stale or event.rank in self.dead) or self.dice.random() < 0.5:
            self.tell(message, stale=is_stale)

    def _tell_again(self, rank: int, message: m.Message) -> None:
        """Deliver a message that was delivered before, unless its rank has died."""
        if rank not in self.dead:
            self.tell(message, stale=True)

    def _of_other_start(self, message: m.Message, event: ev.RankEvent) -> m.Message:
        """Return a message as another start of its rank would send it."""
        other = replace(event, epoch=event.epoch + self.dice.choice((-1, 1)))
        return replace(message, event=other) if isinstance(message, m.Report) else other

    def tokens(self, rank: int, message: m.Message, times_s: Sequence[float]) -> None:
        """Send tokens from a rank to the gateway. times_s: when the rank drew them."""
        assert isinstance(message, m.Tokens)
        if self.exact:
            deliver = partial(self._deliver_tokens, rank, message, times_s)
            self._links.send(rank, CLIENTS, self._delay_s(), deliver)
        else:
            self._deliver_tokens(rank, message, times_s)

    def _deliver_tokens(self, rank: int, message: m.Tokens, times_s: Sequence[float]) -> None:
        """Deliver tokens. If their rank has died, they may have died with it."""
        if rank not in self.dead or self.dice.random() < 0.5:
            self.clients.on_tokens(message, times_s)

    def _repeat(self, request_id: str) -> None:
        """Deliver again what ranks have said of a request, while an order that follows is carried out."""
        for message in self._heard.get(request_id, ()):
            if self.dice.random() < self.faults.doubled:
                event = message.event if isinstance(message, m.Report) else message
                assert isinstance(event, ev.RankEvent)
                seconds = 0.2 * self.dice.random()
                self.clock.after(seconds, partial(self._tell_again, event.rank, message))

    def from_clients(self, message: m.Message) -> None:
        """Send a message from a gateway or a command. It dies with the conductor: its connection is lost."""
        term = self.term

        def deliver() -> None:
            if term == self.term:
                self.tell(message)

        spent_s = self.hardware.request_s if isinstance(message, m.Submit) else 0.0
        self._links.send(CLIENTS, CONDUCTOR, spent_s + self._delay_s(), deliver)

    def _delay_s(self) -> float:
        if self.dice.random() < self.faults.slow_link:
            return self.dice.random() * self.faults.slow_link_s
        return self.dice.random() * self.hardware.message_s
