"""What a prefill and a decode rank have in common: an engine, a segment, and three kinds of neighbours.

Built by `assemble.py`, used by the roles. Messages go to the conductor and to gateways over ZeroMQ, KV to
and from the pool through the transfer engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mooncake_lite.config import ServeConfig
from mooncake_lite.engine import Engine, Sequence
from mooncake_lite.messages import (
    Decode,
    GatewayAt,
    Message,
    Preempted,
    Prefill,
    PrefillDone,
    RequestFailed,
    Stop,
)
from mooncake_lite.roles.kv_mover import Staging
from mooncake_lite.roles.rank_metrics import REPORT_EVERY_S, rank_stats
from transport.channel import Spoke
from transport.engine import TransferEngine
from transport.errors import WireError


class ComputeRank:
    """One rank with an engine.

    conductor      the spoke to the conductor's hub
    open_gateway   connects to a gateway's token endpoint
    must_stop      true when the conductor is gone
    stop           the first Stop message, once it has come; may_leave: the second one came with it
    """

    def __init__(
        self,
        number: int,
        role: str,
        config: ServeConfig,
        engine: Engine,
        max_len: int,
        transfers: TransferEngine,
        staging: Staging,
        conductor: Spoke,
        open_gateway: Callable[[str], Spoke],
        must_stop: Callable[[], bool],
    ) -> None:
        self.number = number
        self.role = role
        self.config = config
        self.engine = engine
        self.max_len = max_len
        self.transfers = transfers
        self.staging = staging
        self._conductor = conductor
        self._open_gateway = open_gateway
        self._must_stop = must_stop
        self._gateways: dict[str, Spoke] = {}
        self.stop: Stop | None = None
        self.may_leave = False
        self._reported_at = 0.0
        self._counters: dict[str, float] = {}

    @property
    def stopping(self) -> bool:
        """The role's loop has to end: a Stop has come, or the conductor is gone."""
        return self.stop is not None or self._must_stop()

    # ------------------------------------------------------------------------------ neighbours

    def receive(self, wait_s: float) -> list[Message]:
        """Messages from the conductor, those for every role already handled. Waits wait_s at most."""
        self._report_when_due()
        rest = []
        for message in self._conductor.receive(wait_s):
            if isinstance(message, Stop):
                self.may_leave = self.stop is not None  # the second one; the first says why
                self.stop = self.stop or message
            elif isinstance(message, GatewayAt):
                if message.gateway not in self._gateways:
                    self._gateways[message.gateway] = self._open_gateway(message.endpoint)
            else:
                rest.append(message)
        return rest

    def tell(self, message: Message) -> None:
        """Send to the conductor; a request whose message is too large has failed, alone."""
        try:
            self._conductor.send(message)
        except WireError as error:
            if not isinstance(message, PrefillDone | Preempted):
                raise
            self._conductor.send(RequestFailed(message.request_id, str(error)))

    def to_gateway(self, gateway: str, message: Message) -> None:
        """Send to a gateway; a gateway that never said hello is our own bug."""
        self._gateways[gateway].send(message)

    def close(self) -> None:
        """Close the connections to gateways; the conductor's belongs to the caller."""
        for spoke in self._gateways.values():
            spoke.close()

    def new_sequence(self, job: Prefill | Decode, token_ids: list[int], answered: int) -> Sequence:
        """The engine's view of a request."""
        return Sequence(
            request_id=job.request_id,
            token_ids=list(token_ids),
            sampling=job.sampling,
            max_tokens=job.max_tokens,
            stop_ids=frozenset(job.stop_ids),
            max_len=self.max_len,
            answered=answered,
        )

    # ------------------------------------------------------------------------------ metrics

    def count_prefill(self, computed: int, cached: int, seconds: float) -> None:
        """A prefill has ended: prompt tokens computed and reused, seconds of computing."""
        self._add("prefill_computed_tokens_total", computed)
        self._add("prefill_cached_tokens_total", cached)
        self._add("prefill_seconds_total", seconds)
        self._add("prefills_total", 1)

    def count_decode(self, tokens: int, seconds: float) -> None:
        """An iteration of the running batch has ended."""
        self._add("generation_tokens_total", tokens)
        self._add("decode_seconds_total", seconds)
        self._add("decode_iterations_total", 1)

    def count_preemption(self) -> None:
        """A request was sent back for want of pages."""
        self._add("num_preemptions_total", 1)

    def report(self, running: int, waiting: int, dropped_puts: int) -> None:
        """Gauges of a decode rank; sent with the next report."""
        self._counters["decode_requests_running"] = running
        self._counters["decode_requests_waiting"] = waiting
        self._counters["decode_puts_dropped_total"] = dropped_puts

    def _add(self, name: str, amount: float) -> None:
        self._counters[name] = self._counters.get(name, 0.0) + amount

    def _report_when_due(self) -> None:
        now = time.monotonic()
        if now - self._reported_at < REPORT_EVERY_S:
            return
        self._reported_at = now
        pages = self.engine.pages
        values = dict(self._counters)
        values["kv_cache_usage_perc"] = 1.0 - pages.num_free / pages.num_pages
        values["kv_cache_pages_used"] = pages.num_pages - pages.num_free
        self.tell(rank_stats(self.number, self.role, values, self.transfers))
