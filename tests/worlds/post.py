"""The post of the fault world: messages come late, twice, in another order, or not at all.

Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from mooncake_lite import messages as m
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.simulator.post import CLIENTS, CONDUCTOR, STARTS, Post, event_of

ONCE = STARTS | ev.BlocksSaved
"""Messages that do not come twice: a second BlocksSaved could be about a block that was put again since.
Those of STARTS come in their order, too: a rank that is not heard while it starts ends the cluster."""


class FaultyPost(Post):
    """Loses, doubles and reorders messages. It is part of FaultWorld, which has what it uses.

    _heard   request -> what ranks have said of it
    """

    def skip(self, draws: int) -> None:
        """Take none: here they decide something."""

    def answer(self, message: m.Message) -> None:
        """Send an event from a rank to the control plane. It may be delayed, and come again much later."""
        faults, dice, event = self.faults, self.dice, event_of(message)
        if event.rank in self.dead:
            return
        deliver = partial(self._tell_of, event, message)
        if isinstance(event, STARTS):
            self._links.send(event.rank, CONDUCTOR, self._delay_s(), deliver)
            return
        if dice.random() < faults.wrong_epoch:
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
            self.clock.at(delivered + seconds, partial(self._tell_again, message))
        if request_id := getattr(event, "request_id", ""):
            self._heard.setdefault(request_id, []).append(message)

    def _tell_of(self, event: ev.RankEvent | m.RankHello, message: m.Message) -> None:
        """Deliver a message of a rank. If its rank or conductor has died, it may have died with that."""
        is_stale = event.epoch != self.term
        if not (is_stale or event.rank in self.dead) or self.dice.random() < 0.5:
            self.tell(message, stale=is_stale)

    def _tell_again(self, message: m.Message) -> None:
        """Deliver a message that was delivered before, unless its rank has died."""
        if event_of(message).rank not in self.dead:
            self.tell(message, stale=True)

    def _of_other_start(self, message: m.Message, event: ev.RankEvent) -> m.Message:
        """Return a message as another start of its rank would send it."""
        other = replace(event, epoch=event.epoch + self.dice.choice((-1, 1)))
        return replace(message, event=other) if isinstance(message, m.Report) else other

    def tokens(self, rank: int, message: m.Message, times_s: Sequence[float]) -> None:
        """Send tokens from a rank to the gateway. times_s: when the rank drew them."""
        deliver = partial(super().tokens, rank, message, times_s)
        self._links.send(rank, CLIENTS, self._delay_s(), deliver)

    def order(self, order: fx.Order, message: m.Message) -> str | None:
        """Send an order to its rank. What ranks have said of its request may come again meanwhile."""
        if isinstance(order, fx.StartOrder):
            for heard in self._heard.get(order.request_id, ()):
                if self.dice.random() < self.faults.doubled:
                    self.clock.after(0.2 * self.dice.random(), partial(self._tell_again, heard))
        if self.dice.random() < self.faults.unsent:
            return "its queue is full"
        if self.dice.random() < self.faults.dropped:
            self.custody.never_came(order)
            return None
        model, term = self.ranks[order.rank], self.term

        def deliver() -> None:
            if model.term == term:  # otherwise it was lost with the connection
                model.on(message)

        self._links.send(CONDUCTOR, order.rank, self._delay_s(), deliver)
        return None

    def recall(self, recall: fx.Recall) -> None:
        """Ask the gateway what a client has."""
        if self.dice.random() >= self.faults.dropped:
            super().recall(recall)

    def from_clients(self, message: m.Message) -> None:
        """Send a message from a gateway or a command. It dies with the conductor: its connection is lost."""
        term = self.term

        def deliver() -> None:
            if term == self.term:
                self.tell(message)

        self._links.send(CLIENTS, CONDUCTOR, self._delay_s(), deliver)

    def _delay_s(self) -> float:
        if self.dice.random() < self.faults.slow_link:
            return self.dice.random() * self.faults.slow_link_s
        return super()._delay_s()
