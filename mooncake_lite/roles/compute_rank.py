"""The connections and the metrics of a compute rank.

Built by `assemble.py`, used by the compute role. Sends messages to the conductor and gateways over ZeroMQ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from mooncake_lite.messages import GatewayAt, Message, Preempted, PrefillDone, RequestFailed, Stop, Swapped
from mooncake_lite.roles.rank_metrics import REPORT_EVERY_S, rank_stats
from scheduler.instance import DECODE, State
from transport.channel import Spoke
from transport.engine import TransferEngine
from transport.errors import WireError


class ComputeRank:
    """The connections of one compute rank, and its counters.

    roles          of all ranks, by number
    state          the books of the planner, for reports
    epoch          number of this start of the rank; reports to the conductor carry it
    conductor      the spoke to the conductor's hub
    open_gateway   connects to a gateway's token endpoint
    must_stop      true when the conductor is gone
    stop           the first Stop message; may_leave: the second one has arrived too
    """

    epoch = 0

    def __init__(
        self,
        number: int,
        roles: Sequence[str],
        state: State,
        transfers: TransferEngine,
        conductor: Spoke,
        open_gateway: Callable[[str], Spoke],
        must_stop: Callable[[], bool],
    ) -> None:
        self.number = number
        self._roles = roles
        self.state = state
        self.transfers = transfers
        self._conductor = conductor
        self._open_gateway = open_gateway
        self._must_stop = must_stop
        self._gateways: dict[str, Spoke] = {}
        self.stop: Stop | None = None
        self.may_leave = False
        self._reported_at = 0.0
        self._counters: dict[str, float] = {}
        self._reused: dict[str, int] = {}  # prompt tokens by tier

    @property
    def stopping(self) -> bool:
        """Tell whether the role's loop must end: a Stop has arrived, or the conductor is gone."""
        return self.stop is not None or self._must_stop()

    # ------------------------------------------------------------------------------ neighbours

    def receive(self, wait_s: float) -> list[Message]:
        """Return the conductor's messages, except those that all roles handle alike. Waits wait_s at most."""
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
        """Send to the conductor. If the message is too large, fail its request only."""
        try:
            self._conductor.send(message)
        except WireError as error:
            if not isinstance(message, PrefillDone | Preempted | Swapped):
                raise
            failed = RequestFailed(message.request_id, str(error), False, message.attempt, message.epoch)
            self._conductor.send(failed)

    def to_gateway(self, gateway: str, message: Message) -> None:
        """Send to a gateway. A gateway that sent no hello is a bug of ours."""
        self._gateways[gateway].send(message)

    def close(self) -> None:
        """Close the connections to gateways. The conductor's belongs to the caller."""
        for spoke in self._gateways.values():
            spoke.close()

    # ------------------------------------------------------------------------------ metrics

    def count_prefill(self, computed: int, seconds: float) -> None:
        """Count a prefill: tokens and seconds of computing."""
        self._add("prefill_computed_tokens_total", computed)
        self._add("prefill_seconds_total", seconds)
        self._add("prefills_total", 1)

    def count_prompt(self, tokens: int, reused: Mapping[str, int]) -> None:
        """Count each token of a prompt once: those that were reused by their tier, the others in the sum."""
        self._add("prefix_cache_queries_total", tokens)
        for tier, count in reused.items():
            self._reused[tier] = self._reused.get(tier, 0) + count

    def count_decode(self, tokens: int, seconds: float) -> None:
        """Count an iteration of the running batch."""
        self._add("decode_tokens_total", tokens)
        self._add("decode_seconds_total", seconds)
        self._add("decode_iterations_total", 1)

    def count_preemption(self, *, swapped: bool = False) -> None:
        """Count a sequence that was sent back because no page was free. swapped: the pool has its KV."""
        self._add("num_preemptions_total", 1)
        self._add("num_swaps_total", swapped)

    def _add(self, name: str, amount: float) -> None:
        self._counters[name] = self._counters.get(name, 0.0) + amount

    def _report_when_due(self) -> None:
        now = time.monotonic()
        if now - self._reported_at < REPORT_EVERY_S:
            return
        self._reported_at = now
        values = {**self._counters, **self._gauges()}
        self.tell(rank_stats(self.number, self._roles, values, self.transfers, self._reused))

    def _gauges(self) -> dict[str, float]:
        """Measure what the planner's books hold now."""
        used = len(self.state.pages.held)
        values: dict[str, float] = {
            "kv_cache_usage_perc": used / self.state.pages.num_pages,
            "kv_cache_pages_used": used,
            "kv_cache_pages": self.state.pages.num_pages,
        }
        if DECODE in self.state.duties:
            values["decode_requests_running"] = len(self.state.running)
            values["decode_requests_waiting"] = self.state.num_waiting
            values["decode_puts_dropped_total"] = self.state.dropped_puts
        return values
