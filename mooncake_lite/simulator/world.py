"""A world for the control plane and the computing ranks, in virtual time.

Run by `play.py`. The control plane and the computing ranks are those that serve. Engines, transfers, store
ranks and clients are modelled. The fault world of the tests (tests/worlds) is this one with other seams: its
bytes are followed, its post loses messages, its clients go away, and its checker looks at everything.
Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from mooncake_lite import messages as m
from mooncake_lite.conductor.open_bodies import OpenBodies
from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.ranks.computing.machine import ComputingRank
from mooncake_lite.simulator.bytes import Bytes
from mooncake_lite.simulator.checker import Checker
from mooncake_lite.simulator.clients import Clients
from mooncake_lite.simulator.clock import Clock, Links
from mooncake_lite.simulator.computing_rank import SimulatedRank
from mooncake_lite.simulator.post import Post
from mooncake_lite.simulator.runner import VirtualRunner
from mooncake_lite.simulator.setting import Setting
from mooncake_lite.simulator.stage_rank import StageModel
from mooncake_lite.simulator.store_rank import StoreModel
from mooncake_lite.simulator.tokens import opaque_digest, opaque_key
from mooncake_lite.simulator.workload import Request
from mooncake_lite.workloads.metrics import Record
from store.objects import BlockRemoved, BlockStored

MOST_EVENTS_PER_REQUEST = 2000
"""More than any run needs. A request that never gets further is an error, as is a Tick that causes a Tick."""

QUIET_S = 400.0
"""After the last request: every lease, quarantine and order has ended by then."""

MOST_PASSES = 120
"""Forward passes that one step of a rank may stand for: a leap. Those after the next event are in vain."""

MAX_LEN = 1 << 40
"""Tokens of prompt and answer: the clients keep to their limits."""

Observer = Callable[[ev.Event, float, Sequence[fx.Effect]], None]


class World(Post):
    """One run: a cluster and its clients.

    control     the control plane under test
    requests    that were sent and have not ended; records: what became of the others
    hardware    how long its ranks take
    ready       the control plane takes requests; stopped: it has said Stop
    """

    def __init__(
        self, setting: Setting, *, observe: Observer | None = None, most_passes: int = MOST_PASSES
    ) -> None:
        """
        observe       called with each event, its time and its effects
        most_passes   forward passes that one step of a rank may stand for; 1: no leaps
        """
        self.shape, self.dice = setting.shape, setting.dice
        self.clock = Clock()
        self.hardware = setting.hardware(self.clock)
        self.requests: dict[str, Request] = {}
        self.records: list[Record] = []
        self.dead: set[int] = set()
        self.num_events = 0
        self.stopped: fx.Stop | None = None
        self.ready = False
        self._links = Links(self.clock)
        self._observe = observe
        self._alarm = 0
        self._most_events = MOST_EVENTS_PER_REQUEST * setting.source.num_requests
        self.begin_term(self.shape.config)
        self._make_seams(setting)
        roles = enumerate(self.shape.config.roles)
        self.ranks: dict[int, Any] = {
            rank: self._model(rank, role, most_passes) for rank, role in roles if rank
        }

    def _make_seams(self, setting: Setting) -> None:
        """Make what another kind of world has in a form of its own. See Post for the rest of it."""
        self.bytes = Bytes(self.shape.layout.layers)
        self.clients = Clients(self, setting.source)
        self.checker = Checker()

    def _model(self, rank: int, role: str, most: int) -> Any:
        """Make a model of a rank."""
        if role == "store":
            return StoreModel(rank, self.shape.tier_blocks, self)
        if role == "stage":
            return StageModel(rank, self)
        hello = m.RankHello(rank, role, self.shape.config.nodes[rank])
        machine = ComputingRank(hello, self.shape.rank_state(rank, opaque_key), MAX_LEN, opaque_digest)
        return SimulatedRank(machine, VirtualRunner, self, most)

    # ------------------------------------------------------------------------------ a run

    def run(self) -> None:
        """Let all requests end, and the world fall silent."""
        self._start()
        self.clients.begin()
        self._run_until(lambda: self.stopped is not None or self.clients.done)
        quiet = self.clock.now + QUIET_S
        self.clock.at(quiet, lambda: None)
        self._run_until(lambda: self.clock.now >= quiet)
        assert self.stopped or not self.control.open_requests
        self.checker.end()

    def _start(self) -> None:
        """Let ranks and a gateway join in any order."""
        ranks = list(self.ranks)
        self.dice.shuffle(ranks)
        for rank in ranks:
            joined = self.shape.joined(rank)
            self.answer(joined)
            for indexed in self._indexed(rank) if joined.tier else ():
                self.answer(indexed)
        self.from_clients(ev.GatewayReady(self.clients.gateway))

    def _indexed(self, rank: int) -> list[ev.TierIndexed]:
        """Return what a store rank tells of its tier, in two pieces: it is empty."""
        return [ev.TierIndexed(rank, 0, [], [], is_last) for is_last in (False, True)]

    def _run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            assert self.clock.step(), f"nothing happens any more: {list(self.requests)} are open"
            assert self.num_events < self._most_events, f"{self.num_events} events"

    def kill(self, rank: int, *, ended: bool = True, why: str = "died") -> None:
        """Kill a rank. What it was doing stops; its memory can be read by some. ended: its end was seen."""
        if rank in self.dead or self.stopped is not None:
            return
        self.dead.add(rank)
        lost = ev.RankLost(rank, 0, why, ended)
        self.clock.after(self.hardware.notice_s(), lambda: self.tell(lost))

    # ------------------------------------------------------------------------------ the conductor

    def begin_term(self, config: ControlConfig) -> None:
        """Start a conductor. It knows what its config says."""
        self.control = Control(config)
        self.bodies = OpenBodies(reuse=True, has_pool=config.has_pool)
        self._alarm += 1

    def tell(self, message: m.Message) -> None:
        """Have an event reach the control plane now, and carry out its effects."""
        self._apply(self._event_of(message), message)

    def _event_of(self, message: m.Message) -> ev.Event:
        """Return the event of a message. The body of a request is kept, as the conductor role does."""
        if isinstance(message, m.Submit):
            most = self.requests[message.request.request_id].most_tokens
            ends = replace(message.request, max_tokens=most)  # its length, which clients do not say
            self.bodies.add(replace(message, request=ends))
            return message.request
        if isinstance(message, m.Report):
            return message.event
        assert isinstance(message, ev.Event)
        return message

    def _apply(self, event: ev.Event, message: m.Message | None = None) -> None:
        self.num_events += 1
        self.checker.saw(event)
        effects = self._decide(event)
        if isinstance(message, m.Report) and self.control.took:
            self.bodies.keep(message)
        self._carry_out(event, effects)

    def _decide(self, event: ev.Event) -> Sequence[fx.Effect]:
        now = self.clock.now
        effects = self.control.on(event, now)
        if self._observe is not None:
            self._observe(event, now, effects)
        return effects

    def _carry_out(self, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
        for effect in effects:
            self.checker.watch(event, effect)
            self._do(effect)

    def _do(self, effect: fx.Effect) -> None:
        match effect:
            case BlockStored() | BlockRemoved() | fx.MarkLost():
                pass
            case fx.WakeAt(time):
                self._alarm += 1
                number = self._alarm
                self.clock.at(max(time, self.clock.now), lambda: self._ring(number))
            case fx.Readiness():
                self.ready = effect.ready
            case fx.Stop():
                self.stopped = effect
            case fx.Forget():
                self.clients.on(effect)
                del self.bodies[effect.request_id]
            case fx.Branched():
                self.clients.on(effect)
                self.bodies.branched(effect)
            case fx.Recall():
                self.recall(effect)
            case fx.EndRank():
                self.kill(effect.rank, why=f"failed: {effect.reason}")
            case fx.Reject() | fx.Fail() | fx.Decided() | fx.Release() | fx.Moved():
                self.clients.on(effect)
            case _:
                self._order(effect)

    def _ring(self, number: int) -> None:
        if number == self._alarm:
            self.tell(ev.Tick())

    def _order(self, order: Any) -> None:
        self.order(order, self.bodies.message_of(order))
