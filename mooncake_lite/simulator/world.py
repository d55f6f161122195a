"""A world for the conductor and the computing ranks, in virtual time.

Run by `play.py`. The conductor and the computing ranks are those that serve. Steward, gateways, engines,
transfers, store ranks and clients are modelled. The fault world of the tests (tests/worlds) is this one with
other seams: its bytes are followed, its post loses messages, its clients go away, and its checker looks at
everything. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

from msgspec.structs import replace

from mooncake_lite import messages as m
from mooncake_lite.conductor.machine import STEWARD, Conductor, Facts, OfRank, Sent, carry
from mooncake_lite.config.instances import FOLLOWERS
from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.request import client_id_of
from mooncake_lite.ranks.computing.machine import ComputingRank
from mooncake_lite.simulator.bytes import Bytes
from mooncake_lite.simulator.checker import Checker
from mooncake_lite.simulator.clients import Clients, ToClient
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

MOST_EVENTS_PER_REQUEST = 2000
"""More than any run needs. A request that never gets further is an error, as is a Tick that causes a Tick."""

QUIET_S = 400.0
"""After the last request: every lease, quarantine and order has ended by then."""

MOST_PASSES = 120
"""Forward passes that one step of a rank may stand for: a leap. Those after the next event are in vain."""

MAX_LEN = 1 << 40
"""Tokens of prompt and answer: the clients keep to their limits."""

Observe = Callable[[ev.Event, float, Sequence[fx.Effect]], None]


class World(Post):
    """One run: a cluster and its clients.

    control     the control plane under test
    requests    that were sent and have not ended; records: what became of the others
    hardware    how long its ranks take
    """

    def __init__(
        self, setting: Setting, *, observe: Observe | None = None, most_passes: int = MOST_PASSES
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
        self._links = Links(self.clock)
        self._observe = observe
        self._peers = [f"rank-{rank}" for rank in range(len(self.shape.config.roles))]
        self._most_events = MOST_EVENTS_PER_REQUEST * setting.source.num_requests
        self.begin_conductor(self.shape.config)
        self._make_seams(setting)
        roles = enumerate(self.shape.config.roles)
        self.ranks = {rank: self._model(rank, role, most_passes) for rank, role in roles if rank}

    def _make_seams(self, setting: Setting) -> None:
        """Make what another kind of world has in a form of its own. See Post for the rest of it."""
        self.bytes = Bytes(self.shape.layout.layers)
        self.clients = Clients(self, setting.source)
        self.checker = Checker()

    def _model(self, rank: int, role: str, most: int) -> Any:
        """Make a model of a rank."""
        if role == "store":
            return StoreModel(rank, self.shape.tier_blocks, self)
        if role in FOLLOWERS:
            return StageModel(rank, self)
        state = self.shape.rank_state(rank, opaque_key)
        machine = ComputingRank(self.shape.hello(rank), state, MAX_LEN, opaque_digest)
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
            hello = self.shape.hello(rank)
            self.answer(hello)
            for indexed in self._indexed(rank) if hello.tier else ():
                self.answer(indexed)
        self.from_clients(self.clients.hello)

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

    def begin_conductor(self, config: ControlConfig) -> None:
        """Begin a conductor that knows nothing but its configuration."""
        self.control = Control(config)
        facts = Facts(self.shape.prompts, self.shape.slots)
        self.conductor = Conductor(facts, self.control, decide=self._decide, watch=self._watch)
        self._alarm_s = inf

    @property
    def ready(self) -> bool:
        """Return whether the conductor takes requests."""
        return self.conductor.ready

    @property
    def stopped(self) -> fx.Stop | None:
        """Return how the cluster ends; None while it goes on."""
        return self.conductor.stop

    def tell(self, message: m.Message) -> None:
        """Have a message reach the conductor now, and deliver what it sends."""
        self._run(lambda: self.conductor.on(self._sender_of(message), message, self.clock.now))

    def _sender_of(self, message: m.Message) -> str:
        """Return the name of the connection of who sends such a message."""
        event = message.event if isinstance(message, m.Report) else message
        if isinstance(event, m.GatewayLost | m.RankLost):
            return STEWARD
        return self._peers[event.rank] if isinstance(event, OfRank) else self.clients.gateway

    def _run(self, entry: Callable[[], list[Sent]]) -> None:
        """Run the conductor, deliver what it sends, and wake it when it wants."""
        carry(self.conductor, entry(), self._deliver, lambda: self.clock.now)
        if self.conductor.wake_at != self._alarm_s:
            self._alarm_s = self.conductor.wake_at
            if self._alarm_s < inf:
                self.clock.at(max(self._alarm_s, self.clock.now), partial(self._ring, self._alarm_s))

    def _ring(self, alarm_s: float) -> None:
        if alarm_s == self._alarm_s:
            self._run(lambda: self.conductor.tick(self.clock.now))

    def _decide(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Let the control plane decide."""
        self.num_events += 1
        self.checker.saw(event)
        effects = self.control.on(event, now)
        if self._observe is not None:
            self._observe(event, now, effects)
        return effects

    def _watch(self, event: ev.Event, effect: fx.Effect) -> None:
        """See an effect before the conductor carries it out. Gateways are told at once."""
        self.checker.watch(event, effect)
        if isinstance(effect, ToClient):
            self.clients.on(effect)

    def _deliver(self, sent: Sent) -> str | None:
        """Deliver a message of the conductor. Returns why it could not be sent, or None."""
        message, order = sent.message, sent.about
        if order is not None:
            assert not isinstance(order, int)
            if isinstance(message, m.Start):  # its length, which clients do not say
                most = self.requests[client_id_of(message.order.request_id)].most_tokens
                message = replace(message, body=replace(message.body, max_tokens=most))
            return self.order(order, message)
        if isinstance(message, fx.EndRank):
            self.kill(message.rank, why=f"failed: {message.reason}")
        elif isinstance(message, fx.Recall):
            self.recall(message)
        return None  # of all else, gateways have been told, and ranks do not need it
