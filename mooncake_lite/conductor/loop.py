"""The conductor role: passes events to the control plane, and its effects to ranks and gateways.

It decides nothing. It keeps what the control plane may not see (`open_bodies.py`), and answers queries that
only read: metrics, `ls`, `stat`. See docs/explain/lifecycle.md.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from mooncake_lite import messages as m
from mooncake_lite.conductor.cluster_metrics import (
    ClusterMetrics,
    bounded,
    class_samples,
    request_samples,
    segment_samples,
)
from mooncake_lite.conductor.gateways import Gateways
from mooncake_lite.conductor.kv_event_stream import KVEventStream
from mooncake_lite.conductor.open_bodies import OpenBodies
from mooncake_lite.conductor.pool_answers import PoolAnswers
from mooncake_lite.conductor.predictions import Predictions
from mooncake_lite.conductor.recording import Recorder
from mooncake_lite.conductor.timed_choice import TimedChoice
from mooncake_lite.config.modes import COMPUTE_ROLES, DUTIES, without_pool
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.control import Control
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from scheduler.placement import Decisions
from store.objects import BlockRemoved, BlockStored
from transport.channel import Hub
from transport.errors import WireError

TICK_S = 0.1
"""Longest wait for a message. It bounds the delay of periodic work; any value works that costs little CPU."""

STEWARD = "steward"
"""The name of the steward's connection."""

EVENTS_IGNORED = "Answers of an earlier attempt or epoch, and others that changed nothing"


def rank_of(peer: str) -> int:
    """Return the rank of a peer's name, as in "rank-3" or "rank-3 last word"; -1 for others."""
    prefix, _, number = peer.partition(" ")[0].partition("-")
    return int(number) if prefix == "rank" and number.isdecimal() else -1


class ConductorRole:
    """Drives the control plane with messages; `run` is the loop.

    hub       the bound channel that every other process speaks to
    stream    for external listeners of KV events; None without any
    recorder  of events; None when nothing is recorded
    clock     seconds; never moves backwards
    bodies    of the open requests
    impostors events that named another rank than the one that sent them; they change nothing
    on_ready  called when the cluster is ready for the first time; on_end: when all ranks have stopped
    """

    def __init__(
        self,
        config: ServeConfig,
        hub: Hub,
        control: Control,
        gateways: Gateways,
        stream: KVEventStream | None = None,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.hub = hub
        self.control = control
        self.gateways = gateways
        self.metrics = ClusterMetrics()
        self.bodies = OpenBodies(config.enable_prefix_caching, config.has_pool)
        self.stop: m.Stop | None = None
        self.impostors = 0
        self.on_ready: Callable[[], object] = lambda: None
        self.on_end: Callable[[], object] = lambda: None
        self._stream = stream
        self._recorder = recorder
        self._clock = clock
        self._answers = PoolAnswers(control.directory, control.members.roles)
        self._predictions = Predictions(control.state.costs, self.metrics.observe_prediction)
        self.decisions = Decisions(control.policy)
        self._choice = control.dispatcher.choose = TimedChoice(self.decisions.choose)
        self._wake_at = float("inf")
        self._unsent: deque[ev.Undelivered | ev.CommandAbandoned] = deque()
        self._for_steward: list[fx.EndRank | fx.Readiness | fx.Stop] = []
        for one in control.config.lost:
            gateways.lose_rank(one.rank, control.members.lost[one.rank])
            self.metrics.lose_rank(one.rank)
        self._readers: dict[type, Callable[[str, Any], ev.Event | None]] = {
            m.StewardHello: self._greet_steward,
            m.GatewayLost: self._read_gateway_lost,
            m.GatewayHello: self._read_gateway_hello,
            m.RankHello: self._read_rank_hello,
            m.Submit: self._read_submit,
            m.Report: self._read_report,
            m.PoolQuery: self._read_pool_query,
            m.MetricsRequest: self._answer_metrics,
            m.Explain: self._answer_explain,
            m.Degraded: self._read_degraded,
            m.RankLost: self._read_rank_lost,
            m.RankStats: lambda peer, stats: self.metrics.from_rank(stats),
        }
        self._doers: dict[type, Callable[[Any], None]] = {
            fx.Reject: self._reject,
            fx.Fail: self._fail,
            fx.Forget: self._forget,
            fx.Decided: self._decided,
            fx.Release: self._to_gateway,
            fx.Branched: self.bodies.branched,
            fx.Recall: self._recall,
            fx.MarkLost: self._mark_lost,
            fx.EndRank: self._to_steward,
            fx.AnswerCommand: self._answer_command,
            fx.Readiness: self._tell_readiness,
            fx.WakeAt: self._set_alarm,
            fx.Stop: self._stop,
            **dict.fromkeys((fx.Moved, BlockStored, BlockRemoved), lambda effect: None),
        }

    # ------------------------------------------------------------------------------ the loop

    def run(self) -> m.Stop:
        """Serve until told to stop, or until a rank is lost. Returns the Stop that ended the loop."""
        while self.stop is None:
            wait_s = min(TICK_S, max(0.0, self._wake_at - self._clock()))
            self.step(self.hub.receive(wait_s))
        return self.stop

    def step(self, received: Sequence[tuple[str, m.Message]]) -> None:
        """Apply messages in order, then deadlines and listeners."""
        for peer, message in received:
            event = self._read(peer, message)
            if event is not None:
                self.apply(event, message)
        if self._clock() >= self._wake_at:
            self._wake_at = float("inf")
            self.apply(ev.Tick())
        if self.gateways.set_broken(self.control.mechanisms.broken):
            self._tell_status()
        if self._stream is not None:
            self._stream.serve()
        if self._recorder is not None and not received:
            self._recorder.flush()

    def close(self) -> None:
        """Close the stream and the recording."""
        if self._stream is not None:
            self._stream.close()
        if self._recorder is not None:
            self._recorder.close()

    def apply(self, event: ev.Event, message: m.Message | None = None) -> None:
        """Apply the event of a message and carry out its effects. Unsent orders become further events."""
        todo: deque[ev.Event] = deque([event])
        while todo and self.stop is None:
            event = todo.popleft()
            now = self._clock()
            effects = self._on(event, now)
            if message is not None and self.control.took:
                self._keep(message)
            message = None
            self._predictions.on(event, effects, now)
            if self._stream is not None:
                self._stream.publish(effects)
            for effect in effects:
                doer = self._doers.get(type(effect), self._order)
                doer(effect)
            todo += self._unsent
            self._unsent.clear()

    def _on(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Call `Control.on` and record the event, also if the call raises."""
        if self._recorder is None:
            return self.control.on(event, now)
        effects = None
        try:
            effects = self.control.on(event, now)
            return effects
        finally:
            self._recorder.record(event, now, effects)
            if effects is None:
                self._recorder.flush()

    def _read(self, peer: str, message: m.Message) -> ev.Event | None:
        """Return the event of a message. None: the message is not for the control plane."""
        event = message.event if isinstance(message, m.Report) else message
        is_loss = peer == STEWARD and isinstance(event, ev.RankLost)
        if isinstance(event, ev.RankEvent) and rank_of(peer) != event.rank and not is_loss:
            self.impostors += 1
            return None
        reader = self._readers.get(type(message))
        if reader is not None:
            return reader(peer, message)
        return event if isinstance(event, ev.Event) else None

    # ------------------------------------------------------------------------------ members

    def _greet_steward(self, peer: str, hello: m.StewardHello) -> None:
        """Tell the steward that ranks and gateways may come now, and what was to be said before."""
        if peer == STEWARD:
            self.hub.send(STEWARD, m.Conducting(self.control.config.term))
            self.hub.send(STEWARD, m.Readiness(self.control.members.was_ready, []))
            waiting, self._for_steward = self._for_steward, []
            for effect in waiting:
                self._to_steward(effect)

    def _to_steward(self, effect: fx.EndRank | fx.Readiness | fx.Stop) -> None:
        """Send an effect to the steward, or keep it until the steward has greeted this conductor."""
        if not self.hub.send(STEWARD, effect):
            self._for_steward.append(effect)

    def _read_gateway_lost(self, peer: str, lost: m.GatewayLost) -> ev.Event | None:
        if peer != STEWARD:
            self.impostors += 1
            return None
        self.gateways.lose(lost.gateway)
        return lost

    def after_stop(self, peer: str, message: m.Message) -> None:
        """Handle a message that arrives while ranks flush: a steward that says hello now is told to stop."""
        if isinstance(message, m.StewardHello):
            self._greet_steward(peer, message)

    def _read_gateway_hello(self, peer: str, hello: m.GatewayHello) -> ev.Event | None:
        """Report a gateway as ready when every rank can reach it. Until then, ask it for a TCP endpoint."""
        if self.gateways.greet(hello):
            return ev.GatewayReady(hello.gateway)
        self.hub.send(peer, m.OpenTokens(self.gateways.control_host))
        self.hub.send(peer, self.gateways.status)
        return None

    def _read_rank_hello(self, peer: str, hello: m.RankHello) -> ev.Event | None:
        """Choose the slots of a rank: the prompts that it computes at once, or a batch if it decodes."""
        config = self.config
        slots = {"prefill": config.max_num_partial_prefills, "store": 0}.get(hello.role, config.max_num_seqs)
        if hello.role in COMPUTE_ROLES:
            self.gateways.add_compute_rank(hello.rank)
        for rank, reason in self.control.members.lost.items():
            self.hub.send(peer, m.MarkLost(rank, reason))
        return ev.RankJoined(
            hello.rank, hello.epoch, hello.rank, DUTIES[hello.role], hello.node, slots,
            hello.segment_bytes, hello.tier,
        )  # fmt: skip

    def _tell_readiness(self, effect: fx.Readiness) -> None:
        """Introduce new ranks and gateways to each other, and tell gateways whether the cluster serves."""
        for rank, at in self.gateways.new_introductions():
            self.hub.send(f"rank-{rank}", at)
        missing = [f"{rank} ({self.config.role_of(rank)})" for rank in effect.missing]
        detail = f"waiting for rank {', '.join(missing)}" if missing else "ready"
        self.gateways.set_readiness(effect.ready, effect.closed or detail, not effect.closed)
        self._tell_status()
        self._to_steward(effect)
        if effect.ready:
            self.on_ready()
            self.on_ready = lambda: None

    def _read_degraded(self, peer: str, degraded: m.Degraded) -> ev.Event | None:
        self.gateways.set_degraded(degraded, self.config.role_of(degraded.rank))
        self._tell_status()
        return None

    def _read_rank_lost(self, peer: str, lost: m.RankLost) -> ev.Event | None:
        """Take a loss that the steward has seen. A rank that says that it fails has to end for good first."""
        if peer == STEWARD:
            return lost
        self._to_steward(fx.EndRank(lost.rank, lost.reason))
        return None

    def _mark_lost(self, effect: fx.MarkLost) -> None:
        """Tell the other ranks that one is lost, and gateways that the cluster is degraded.

        A lost rank that could not be reached, and wakes up, ends itself by the Stop.
        """
        self.hub.send(f"rank-{effect.rank}", fx.Stop(effect.reason, 0.0, True))
        for rank in range(1, self.config.ranks):
            if rank not in self.control.members.lost:
                self.hub.send(f"rank-{rank}", effect)
        self.gateways.lose_rank(effect.rank, effect.reason)
        self.metrics.lose_rank(effect.rank)
        if self._stream is not None:
            self._stream.lose(effect.rank)
        print(f"mooncake-lite: {effect.reason}; the others go on", file=sys.stderr, flush=True)
        self._tell_status()

    def _tell_status(self) -> None:
        for gateway in self.gateways.names:
            self.hub.send(gateway, self.gateways.status)

    def _stop(self, effect: fx.Stop) -> None:
        self.stop = effect
        self._to_steward(effect)

    def _set_alarm(self, effect: fx.WakeAt) -> None:
        self._wake_at = effect.time

    # ------------------------------------------------------------------------------ requests

    def _read_submit(self, peer: str, submit: m.Submit) -> ev.Event | None:
        self.bodies.add(submit)
        return submit.request

    def _read_report(self, peer: str, report: m.Report) -> ev.Event | None:
        """Have a rank killed that sends other tokens than it says, as the control plane does for lengths."""
        event, problem = report.event, self.bodies.problem_of(report)
        if not problem:
            return event
        if isinstance(event, ev.RankEvent):
            self._to_steward(fx.EndRank(event.rank, f"sent a malformed {type(event).__name__}: {problem}"))
        return None

    def _keep(self, message: m.Message) -> None:
        """Keep the tokens of a message that the control plane took, and describe its blocks to listeners."""
        event = message.event if isinstance(message, m.Report) else message
        if self._stream is not None and isinstance(event, m.ChunkStored | m.PrefillEnded):
            chunk = (event.first, len(event.checksums)) if isinstance(event, m.ChunkStored) else ()
            blocks = self.bodies[event.request_id].stored_blocks(self.config.block_size, *chunk)
            self._stream.describe(*blocks)
        elif self._stream is not None and isinstance(event, m.PutsEnded):
            self._stream.on_puts_ended(event)
        if isinstance(message, m.Report):
            self.bodies.keep(message)
            if self._stream is not None and isinstance(event, m.PutsWanted):
                self._stream.on_puts_wanted(message)

    def _decided(self, effect: fx.Decided) -> None:
        self.decisions.placed(effect.request_id)
        for seconds in self._choice.taken_s:
            self.metrics.observe_decision(seconds)
        self.bodies[effect.request_id].decided(sum(self._choice.taken_s))
        self._choice.taken_s.clear()

    def _reject(self, effect: fx.Reject) -> None:
        self.metrics.count("requests_rejected_total")
        self.decisions.refused(effect.request_id, effect.reason)
        self._to_gateway(effect)

    def _fail(self, effect: fx.Fail) -> None:
        """Tell a gateway of a failure (HTTP 500). When the cluster stops, the Stop tells it (HTTP 503)."""
        if not self.control.stopped:
            self._to_gateway(effect)

    def _to_gateway(self, effect: fx.Reject | fx.Fail | fx.Release) -> None:
        """Tell a gateway, which knows a branch under the id of its request."""
        body = self.bodies[effect.request_id]
        self.hub.send(body.body.gateway, replace(effect, request_id=body.client_id))

    def _recall(self, effect: fx.Recall) -> None:
        """Ask the gateway of a request what its client has. A gateway that is gone has no such clients."""
        self.metrics.count("requests_recalled_total")
        self.hub.send(self.bodies[effect.request_id].body.gateway, effect)

    def _forget(self, effect: fx.Forget) -> None:
        body = self.bodies.pop(effect.request_id)
        if body.client_id != effect.request_id:
            return
        classes = self.control.config.classes
        service = classes[body.class_id].name if 0 <= body.class_id < len(classes) else "unknown"
        self.metrics.count("class_requests_total", 1.0, **{"class": service, "outcome": effect.outcome})
        if effect.outcome == "finished":
            self.metrics.count("requests_finished_total")

    # ------------------------------------------------------------------------------ orders

    def _order(self, order: fx.Order) -> None:
        """Send an order to its rank. If that fails, the control plane receives Undelivered."""
        try:
            sent = self.hub.send(f"rank-{order.rank}", self.bodies.message_of(order))
            problem = "" if sent else f"rank {order.rank} cannot be reached"
        except WireError as error:
            problem = str(error)
        if problem:
            self._unsent.append(ev.Undelivered(order, problem))
        elif isinstance(order, fx.GrantPuts) and self._stream is not None:
            self._stream.on_granted(order)

    # ------------------------------------------------------------------------------ the pool

    def _read_pool_query(self, peer: str, query: m.PoolQuery) -> ev.Event | None:
        """Answer or pass on a query. A gateway may reset the cache of a cluster that keeps none."""
        if not self.config.has_pool and peer not in self.gateways.names:
            self._reply(peer, m.PoolEnded("; ".join(without_pool(self.config.mode)), number=query.number))
            return None
        answer = self._answers.read(query, self._clock())
        if answer is None:
            return self._answers.command(peer, query)
        self._reply(peer, answer)
        return None

    def _answer_command(self, effect: fx.AnswerCommand) -> None:
        self._unsent += self._answers.answer(effect, self._reply)

    def _answer_explain(self, peer: str, query: m.Explain) -> None:
        explanation = self.decisions.explain(query.request)
        last = [] if explanation is not None else self.decisions.request_ids
        self._reply(peer, m.Explained(explanation, last))

    def _answer_metrics(self, peer: str, request: m.MetricsRequest) -> None:
        state, directory = self.control.state, self.control.directory
        gauges = {"num_requests_waiting": state.num_waiting, "num_requests_running": state.num_running}
        gauges["conductor_term"] = self.control.config.term
        counted = directory.counters
        pool = {f"{n}_total" if n in counted else n: v for n, v in directory.stats().items()}
        samples = self.metrics.samples(gauges, pool, self.hub.counters.as_dict())
        samples += segment_samples(self._answers.segments())
        stages = self.control.requests.stages
        samples += class_samples(self.control.config.classes, directory.class_blocks())
        samples += request_samples(stages, state.prefills.values(), self.config.roles)
        ignored = self.control.ignored + self.impostors
        samples.append(m.Metric("events_ignored_total", "counter", EVENTS_IGNORED, {}, ignored))
        self._reply(peer, m.MetricsReply(request.asked_at_s, bounded(samples)))

    def _reply(self, peer: str, answer: m.Message) -> bool:
        """Send the answer to a query, or an error in its place if it is too large for a message.

        False: the answer was not sent.
        """
        try:
            return self.hub.send(peer, answer)
        except WireError as error:
            problem = f"the conductor cannot send its answer: {error}"
        if isinstance(answer, m.MetricsReply):
            self.hub.send(peer, replace(answer, metrics=[], problem=problem))
        else:
            self.hub.send(peer, m.PoolEnded(problem, number=getattr(answer, "number", 0)))
        return False
