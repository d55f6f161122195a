"""The conductor without clock, sockets or printing: `on(peer, message, now) -> [Sent]`.

Driven by `loop.py` (live) and by `mooncake_lite.simulator.world` (virtual time). It passes events to the
control plane, and its effects to ranks and gateways. It decides nothing: it keeps what the control plane may
not see (`open_bodies.py`), and answers queries that only read. See docs/explain/lifecycle.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from mooncake_lite import messages as m
from mooncake_lite.conductor.cluster_metrics import ClusterMetrics, cluster_samples
from mooncake_lite.conductor.gateways import Gateways
from mooncake_lite.conductor.open_bodies import OpenBodies, OpenBody
from mooncake_lite.conductor.pool_answers import PoolAnswers
from mooncake_lite.config.instances import FOLLOWERS
from mooncake_lite.config.modes import DUTIES, without_pool
from mooncake_lite.control import Control
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from store.objects import BlockRemoved, BlockStored

STEWARD = "steward"
"""The name of the steward's connection."""

UNREACHABLE = ""
"""The problem of a message whose peer has no connection."""

SHOWN_RANKS = 16
"""Missing ranks that a gateway names, at most."""

NOTHING_SENT = (fx.Moved, BlockStored, BlockRemoved)
"""Effects that become no message. `watch` and the observers see them."""


OfRank = (ev.RankEvent, m.RankHello, m.Degraded, m.RankStats)
"""Messages that only the rank which they name may send. Its name may have more words: "rank-3 last word"."""


class Facts(msgspec.Struct, frozen=True):
    """What a conductor knows of its cluster besides the configuration of its control plane.

    prompts, sequences   that a rank computes, and decodes, at once
    reuse                prefixes are reused at all
    host                 address at which other hosts reach this one; "" on one host
    """

    prompts: int
    sequences: int
    reuse: bool = True
    host: str = ""


class Sent(NamedTuple):
    """A message that leaves. about: the order, or the number of the pool command, that is lost with it."""

    peer: str
    message: m.Message
    about: fx.Order | int | None = None


def carry(
    conductor: Conductor, sent: Iterable[Sent], send: Callable[[Sent], str | None], now: Callable[[], float]
) -> None:
    """Send messages, tell the conductor which could not be sent, and send what it returns then.

    Nothing of a pool command follows an answer that could not be sent. send: returns why a message was not
    sent, or None.
    """
    failed: deque[tuple[Sent, str]] = deque()
    while True:
        for one in sent:
            if isinstance(one.about, int) and any(one.about == lost.about for lost, _ in failed):
                continue
            problem = send(one)
            if problem is not None:
                failed.append((one, problem))
        if not failed:
            return
        sent = conductor.unsent(*failed.popleft(), now())


class Observer:
    """Looks on, and changes nothing."""

    def took(self, message: m.Message, body: OpenBody | None) -> None:
        """See a message that the control plane took, before its tokens are kept. body: of its request."""

    def on(self, event: ev.Event, effects: Sequence[fx.Effect], now: float) -> None:
        """See an event, and the effects that it had, before they are carried out."""


class Conductor:
    """One conductor. It is told everything, and returns what is to be sent, in this order.

    bodies     of the open requests; gateways, metrics: of the cluster
    observers  look on
    leaving    what the entry under way has to send so far
    stop       how the cluster ends; None while it goes on
    wake_at    when `tick` is to be called: seconds, of the clock of `now`
    ready      the cluster takes requests
    notices    lines for the operator, until the driver prints them
    impostors  messages that name another rank, or role, than the one that sent them; they change nothing
    """

    def __init__(
        self,
        facts: Facts,
        control: Control,
        *,
        decide: Callable[[ev.Event, float], list[fx.Effect]] | None = None,
        decided_s: Callable[[], float] = lambda: 0.0,
        watch: Callable[[ev.Event, fx.Effect], None] | None = None,
        channel: Callable[[], Mapping[str, int]] = dict,
        observers: Sequence[Observer] = (),
    ) -> None:
        """
        decide     Control.on, or what records or traces it
        decided_s  seconds that the decision took which the next Decided is about
        watch      is called with each effect before it is carried out, and with its event
        channel    counters of the channel, for /metrics
        """
        self.control, self.observers = control, observers
        self._facts, self._config = facts, control.config
        self._decide, self._decided_s, self._watch = decide or control.on, decided_s, watch
        self._channel = channel
        self.gateways = Gateways(self._config.nodes, facts.host)
        self.metrics = ClusterMetrics()
        self.bodies = OpenBodies(facts.reuse, self._config.has_pool)
        self.stop: m.Stop | None = None
        self.wake_at, self.ready = inf, False
        self.notices: list[str] = []
        self.impostors = 0
        self._answers = PoolAnswers(control.directory, self._config.roles)
        self._ranks = [f"rank-{rank}" for rank in range(len(self._config.roles))]
        self._numbers = {name: rank for rank, name in enumerate(self._ranks) if rank}
        self.leaving: list[Sent] = []
        self._for_steward: list[m.Message] = []
        for one in self._config.lost:
            self._lose(one.rank, control.members.lost[one.rank])
        self._readers: dict[type, Callable[[str, Any, float], ev.Event | None]] = {
            m.StewardHello: self._greet_steward,
            m.GatewayLost: self._read_gateway_lost,
            m.GatewayHello: self._read_gateway_hello,
            m.RankHello: self._read_rank_hello,
            m.Submit: self._read_submit,
            m.Report: self._read_report,
            m.PoolQuery: self._read_pool_query,
            m.MetricsRequest: self._answer_metrics,
            m.Degraded: self._read_degraded,
            m.RankLost: self._read_rank_lost,
            m.RankStats: lambda peer, stats, now: self.metrics.from_rank(stats),
        }
        self._doers: dict[type, Callable[[Any], None]] = {
            fx.Reject: self._reject,
            fx.Fail: self._fail,
            fx.Forget: self._forget,
            fx.Decided: self._decided,
            fx.Release: self._to_client,
            fx.Branched: self.bodies.branched,
            fx.Recall: self._recall,
            fx.MarkLost: self._mark_lost,
            fx.EndRank: partial(self._send, STEWARD),
            fx.AnswerCommand: self._answer_command,
            fx.HintAnswered: lambda answer: self._send(answer.gateway, answer),
            fx.Readiness: self._tell_readiness,
            fx.WakeAt: self._set_alarm,
            fx.Stop: self._stop,
            **dict.fromkeys(NOTHING_SENT, lambda effect: None),
        }

    # ------------------------------------------------------------------------------ the three entries

    def on(self, peer: str, message: m.Message, now: float) -> list[Sent]:
        """Take a message of a peer."""
        if (event := self._read(peer, message, now)) is not None:
            self._apply(event, message, now)
        return self._taken()

    def tick(self, now: float) -> list[Sent]:
        """Do what is due by now, and tell gateways of mechanisms that never work."""
        if now >= self.wake_at:
            self.wake_at = inf
            self._apply(ev.Tick(), None, now)
        if self.gateways.set_broken(self.control.mechanisms.broken):
            self._tell_status()
        return self._taken()

    def unsent(self, sent: Sent, problem: str, now: float) -> list[Sent]:
        """Take note that a message did not leave. problem: what is wrong with it, or UNREACHABLE."""
        about = sent.about
        if sent.peer == STEWARD:  # until it has greeted this conductor
            self._for_steward.append(sent.message)
        elif isinstance(about, int):
            self._abandon(about, sent, problem, now)
        elif about is not None:
            reason = problem or f"rank {about.rank} cannot be reached"
            self._apply(ev.Undelivered(about, reason), None, now)
        elif problem:
            self._send_instead(sent, problem)
        return self._taken()

    def _taken(self) -> list[Sent]:
        leaving, self.leaving = self.leaving, []
        return leaving

    def _apply(self, event: ev.Event, message: m.Message | None, now: float) -> None:
        """Apply an event, of a message if one brought it, and carry out its effects."""
        if self.stop is not None:
            return
        effects = self._decide(event, now)
        if message is not None and self.control.took:
            self._keep(message)
        for observer in self.observers:
            observer.on(event, effects, now)
        watch, doers = self._watch, self._doers
        for effect in effects:
            if watch is not None:
                watch(event, effect)
            doers.get(type(effect), self._order)(effect)

    def _read(self, peer: str, message: m.Message, now: float) -> ev.Event | None:
        """Return the event of a message. None: the message is not for the control plane."""
        event = message.event if isinstance(message, m.Report) else message
        if isinstance(event, OfRank) and self._is_impostor(peer, event):
            self.impostors += 1
            return None
        reader = self._readers.get(type(message))
        if reader is not None:
            return reader(peer, message, now)
        return event if isinstance(event, ev.Event) else None

    def _is_impostor(self, peer: str, event: Any) -> bool:
        """Tell whether a message names another rank than its sender. The steward tells of losses."""
        rank = self._numbers.get(peer)
        is_other = (self._numbers.get(peer.partition(" ")[0]) if rank is None else rank) != event.rank
        return is_other and not (peer == STEWARD and isinstance(event, ev.RankLost))

    def _keep(self, message: m.Message) -> None:
        """Keep the tokens of a message that the control plane took."""
        for observer in self.observers:
            event = message.event if isinstance(message, m.Report) else message
            observer.took(message, self.bodies.get(getattr(event, "request_id", "")))
        if isinstance(message, m.Report):
            self.bodies.keep(message)

    def _send(self, peer: str, message: m.Message, about: fx.Order | int | None = None) -> None:
        self.leaving.append(Sent(peer, message, about))

    # ------------------------------------------------------------------------------ members

    def _greet_steward(self, peer: str, hello: m.StewardHello, now: float) -> None:
        """Tell the steward that ranks and gateways may come now, and what was to be said before."""
        if peer == STEWARD:
            self._send(STEWARD, m.Conducting(self._config.term))
            self._send(STEWARD, m.Readiness(self.control.members.was_ready, []))
            for message in self._for_steward:
                self._send(STEWARD, message)
            self._for_steward.clear()

    def _read_gateway_lost(self, peer: str, lost: m.GatewayLost, now: float) -> ev.Event | None:
        if peer != STEWARD:
            self.impostors += 1
            return None
        self.gateways.lose(lost.gateway)
        return lost

    def _read_gateway_hello(self, peer: str, hello: m.GatewayHello, now: float) -> ev.Event | None:
        """Report a gateway as ready when every rank can reach it. Until then, ask it for a TCP endpoint."""
        if self.gateways.greet(hello):
            return ev.GatewayReady(hello.gateway)
        self._send(peer, m.OpenTokens(self.gateways.control_host))
        self._send(peer, self.gateways.status)
        return None

    def _read_rank_hello(self, peer: str, hello: m.RankHello, now: float) -> ev.Event | None:
        """Let a rank join, with the slots of its role, and tell it who is lost. A lost one is told to end."""
        if hello.role != self._config.roles[hello.rank]:
            self.impostors += 1
            return None
        if hello.rank in (lost := self.control.members.lost):
            self._send(peer, m.Stop(lost[hello.rank], 0.0, True))
            return None
        if hello.role != "store" and hello.role not in FOLLOWERS:  # it sends tokens
            self.gateways.add_compute_rank(hello.rank)
        for rank, reason in lost.items():
            self._send(peer, m.MarkLost(rank, reason))
        slots = {"prefill": self._facts.prompts, "store": 0}.get(hello.role, self._facts.sequences)
        return ev.RankJoined(
            hello.rank, hello.epoch, hello.rank, DUTIES[hello.role], hello.node, slots,
            hello.segment_bytes, hello.tier,
        )  # fmt: skip

    def _tell_readiness(self, effect: fx.Readiness) -> None:
        """Introduce new ranks and gateways to each other, and tell gateways whether the cluster serves."""
        for rank, at in self.gateways.new_introductions():
            self._send(self._ranks[rank], at)
        missing = [f"{rank} ({self._config.roles[rank]})" for rank in effect.missing[:SHOWN_RANKS]]
        if len(effect.missing) > SHOWN_RANKS:
            missing.append(f"and {len(effect.missing) - SHOWN_RANKS} more")
        detail = f"waiting for rank {', '.join(missing)}" if missing else "ready"
        self.gateways.set_readiness(effect.ready, effect.closed or detail, not effect.closed)
        self._tell_status()
        self._send(STEWARD, effect)
        self.ready = effect.ready

    def _read_degraded(self, peer: str, degraded: m.Degraded, now: float) -> ev.Event | None:
        self.gateways.set_degraded(degraded, self._config.roles[degraded.rank])
        self._tell_status()
        return None

    def _read_rank_lost(self, peer: str, lost: m.RankLost, now: float) -> ev.Event | None:
        """Take a loss that the steward has seen. A rank that says that it fails has to end for good first."""
        if peer == STEWARD:
            return lost
        self._send(STEWARD, fx.EndRank(lost.rank, lost.reason))
        return None

    def _mark_lost(self, effect: fx.MarkLost) -> None:
        """Tell the other ranks that one is lost, and gateways that the cluster is degraded.

        A lost rank that could not be reached, and wakes up, ends itself by the Stop.
        """
        self._send(self._ranks[effect.rank], fx.Stop(effect.reason, 0.0, True))
        lost = self.control.members.lost
        for rank, name in enumerate(self._ranks):
            if rank and rank not in lost:
                self._send(name, effect)
        self._lose(effect.rank, effect.reason)
        self.notices.append(f"{effect.reason}; {self.control.dispatcher.closed or 'the others go on'}")
        self._tell_status()

    def _lose(self, rank: int, reason: str) -> None:
        self.gateways.lose_rank(rank, reason)
        self.metrics.lose_rank(rank)

    def _tell_status(self) -> None:
        for gateway in self.gateways.names:
            self._send(gateway, self.gateways.status)

    def _stop(self, effect: fx.Stop) -> None:
        self.stop = effect
        self._send(STEWARD, effect)

    def _set_alarm(self, effect: fx.WakeAt) -> None:
        self.wake_at = effect.time

    # ------------------------------------------------------------------------------ requests

    def _read_submit(self, peer: str, submit: m.Submit, now: float) -> ev.Event | None:
        """Keep the body of a request. One whose answers so far are not what it says fails."""
        request = submit.request
        if [len(answer) for answer in submit.answers] != [one.num_tokens for one in request.answers]:
            self._send(peer, m.Fail(request.request_id, "it has other answers so far than it says"))
            return None
        self.bodies.add(submit)
        return request

    def _read_report(self, peer: str, report: m.Report, now: float) -> ev.Event | None:
        """Have a rank killed that sends other tokens than it says, as the control plane does for lengths."""
        event, problem = report.event, self.bodies.problem_of(report)
        if not problem:
            return event
        if isinstance(event, ev.RankEvent):
            self._send(STEWARD, fx.EndRank(event.rank, f"sent a malformed {type(event).__name__}: {problem}"))
        return None

    def _decided(self, effect: fx.Decided) -> None:
        self.bodies[effect.request_id].decided(self._decided_s())

    def _reject(self, effect: fx.Reject) -> None:
        self.metrics.count("requests_rejected_total")
        self._to_client(effect)

    def _fail(self, effect: fx.Fail) -> None:
        """Tell a gateway of a failure (HTTP 500). When the cluster stops, the Stop tells it (HTTP 503)."""
        if not self.control.stopped:
            self._to_client(effect)

    def _to_client(self, effect: fx.Reject | fx.Fail | fx.Release) -> None:
        """Tell the gateway of a request, which knows a branch under the id of its request."""
        body = self.bodies[effect.request_id]
        self._send(body.body.gateway, replace(effect, request_id=body.client_id))

    def _recall(self, effect: fx.Recall) -> None:
        """Ask the gateway of a request what its client has. A gateway that is gone has no such clients."""
        self.metrics.count("requests_recalled_total")
        self._send(self.bodies[effect.request_id].body.gateway, effect)

    def _forget(self, effect: fx.Forget) -> None:
        body = self.bodies.pop(effect.request_id)
        if body.client_id == effect.request_id:
            self.metrics.count_end(self._config.classes, body.class_id, effect.outcome)

    def _order(self, order: fx.Order) -> None:
        """Give an order to its rank. If it cannot be sent, the control plane receives Undelivered."""
        self.leaving.append(Sent(self._ranks[order.rank], self.bodies.message_of(order), order))

    # ------------------------------------------------------------------------------ queries

    def _read_pool_query(self, peer: str, query: m.PoolQuery, now: float) -> ev.Event | None:
        """Answer or pass on a query. A gateway may reset the cache of a cluster that keeps none."""
        if not self._config.has_pool and peer not in self.gateways.names:
            self._send(peer, m.PoolEnded("; ".join(without_pool(self._config.mode)), number=query.number))
            return None
        answer = self._answers.read(query, now)
        if answer is None:
            return self._answers.command(peer, query)
        self._send(peer, answer)
        return None

    def _answer_command(self, effect: fx.AnswerCommand) -> None:
        self._send(*self._answers.answer(effect), effect.command)

    def _abandon(self, command: int, sent: Sent, problem: str, now: float) -> None:
        """End a command whose answer cannot be sent."""
        if problem:
            self._send_instead(sent, problem)
        if self._answers.drop(command):
            self._apply(ev.CommandAbandoned(command), None, now)

    def _answer_metrics(self, peer: str, request: m.MetricsRequest, now: float) -> None:
        ignored = self.control.ignored + self.impostors
        samples = cluster_samples(
            self.metrics, self.control, self._answers.segments(), self._channel(), ignored
        )
        self._send(peer, m.MetricsReply(request.asked_at_s, samples))

    def _send_instead(self, sent: Sent, problem: str) -> None:
        """Send an error in place of the answer to a query, which is too large for a message."""
        problem = f"the conductor cannot send its answer: {problem}"
        if isinstance(sent.message, m.MetricsReply):
            self._send(sent.peer, replace(sent.message, metrics=[], problem=problem))
        else:
            self._send(sent.peer, m.PoolEnded(problem, number=getattr(sent.message, "number", 0)))
