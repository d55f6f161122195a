"""The connections of a computing rank: to the conductor and to the gateway, over ZeroMQ.

Built by `ranks.assemble`, used by `loop.py`. Sends the metrics of the rank when they are due.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mooncake_lite.messages import GatewayAt, MarkLost, Message, Report, RequestFailed, Stop
from mooncake_lite.ranks.computing.machine import ComputingRank, NewTerm, Order
from mooncake_lite.ranks.metrics import REPORT_EVERY_S, rank_stats
from scheduler.instance import DECODE
from transport.channel import Spoke
from transport.engine import TransferEngine
from transport.errors import WireError


class Connections:
    """The connections of one computing rank.

    rank           its machine, for metrics
    roles          of all ranks, by number
    conductor      the spoke to the conductor's hub
    open_gateway   connects to a gateway's token endpoint
    must_stop      true when the conductor is gone
    new_term       the number of a conductor that is new, once, after connecting to it; 0 without one
    stop           the first Stop message; may_leave: the second one has arrived too
    """

    def __init__(
        self,
        rank: ComputingRank,
        roles: Sequence[str],
        transfers: TransferEngine,
        conductor: Spoke,
        open_gateway: Callable[[str], Spoke],
        must_stop: Callable[[], bool],
        new_term: Callable[[], int] = lambda: 0,
    ) -> None:
        self.rank = rank
        self._roles = roles
        self._transfers = transfers
        self._conductor = conductor
        self._open_gateway = open_gateway
        self._must_stop, self._new_term = must_stop, new_term
        self._gateways: dict[str, Spoke] = {}  # the one that lives, by name
        self.stop: Stop | None = None
        self.may_leave = False
        self._reported_at = 0.0

    @property
    def stopping(self) -> bool:
        """Tell whether the loop must end: a Stop has arrived, or the conductor is gone."""
        return self.stop is not None or self._must_stop()

    def receive(self, wait_s: float) -> list[Order]:
        """Return the conductor's orders about the rank's work. Waits wait_s at most."""
        self._report_when_due()
        orders: list[Order] = []
        if term := self._new_term():
            orders.append(NewTerm(term))
            wait_s = 0.0
        for message in self._conductor.receive(wait_s):
            if isinstance(message, Stop):
                self.may_leave = self.stop is not None  # the second one; the first says why
                self.stop = self.stop or message
            elif isinstance(message, MarkLost):
                self._transfers.mark_lost(message.rank, message.reason)
            elif isinstance(message, GatewayAt):
                if message.gateway not in self._gateways:
                    self._replace_gateway(message)
            else:
                orders.append(message)
        return orders

    def tell(self, message: Message) -> None:
        """Send to the conductor. If a report about a request is too large, fail that request only."""
        try:
            self._conductor.send(message)
        except WireError as error:
            event = message.event if isinstance(message, Report) else None
            request_id, attempt = getattr(event, "request_id", ""), getattr(event, "attempt", 0)
            if not request_id:
                raise
            about = self.rank.number, self.rank.epoch, request_id, attempt
            self._conductor.send(RequestFailed(*about, str(error)))

    def _replace_gateway(self, at: GatewayAt) -> None:
        """Connect to the gateway that lives. An earlier one has died, and what waits for it is lost."""
        for spoke in self._gateways.values():
            spoke.renew()  # otherwise close() would try to deliver that first
            spoke.close()
        self._gateways = {at.gateway: self._open_gateway(at.endpoint)}

    def to_gateway(self, gateway: str, message: Message) -> None:
        """Send to the gateway. Drop and count what is for an earlier one: its clients are gone."""
        if gateway in self._gateways:
            self._gateways[gateway].send(message)
        else:
            self.rank.counters["token_messages_dropped_total"] += 1

    def close(self) -> None:
        """Close the connection to the gateway. The conductor's belongs to the caller."""
        for spoke in self._gateways.values():
            spoke.close()

    # ------------------------------------------------------------------------------ metrics

    def _report_when_due(self) -> None:
        now = time.monotonic()
        if now - self._reported_at < REPORT_EVERY_S:
            return
        self._reported_at = now
        rank = self.rank
        values = {**rank.counters, **self._gauges()}
        self.tell(rank_stats(rank.number, self._roles, values, self._transfers, rank.reused))

    def _gauges(self) -> dict[str, float]:
        """Measure what the planner's books hold now."""
        state = self.rank.state
        used = len(state.pages.held)
        values: dict[str, float] = {
            "kv_cache_usage_perc": used / state.pages.num_pages,
            "kv_cache_pages_used": used,
            "kv_cache_pages": state.pages.num_pages,
        }
        if DECODE in state.duties:
            values["decode_requests_running"] = len(state.running)
            values["decode_requests_waiting"] = state.num_waiting
            values["decode_puts_dropped_total"] = state.dropped_puts
        return values
