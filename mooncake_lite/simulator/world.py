"""A world for the control plane: virtual time, modelled ranks, and faults drawn with a seed.

Run by tests (tests/mooncake_lite/control). The control plane is the one that serves. Everything around it is
modelled, and asserts what real ranks rely on. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from mooncake_lite.control import Control
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.readable import readable
from mooncake_lite.simulator.clients import Clients
from mooncake_lite.simulator.clock import Clock, Links
from mooncake_lite.simulator.custody import Custody
from mooncake_lite.simulator.decode_rank import DecodeModel
from mooncake_lite.simulator.faults import Faults
from mooncake_lite.simulator.memory import Memory
from mooncake_lite.simulator.prefill_rank import PrefillModel
from mooncake_lite.simulator.serving_rank import ComputeModel
from mooncake_lite.simulator.setting import Setting
from mooncake_lite.simulator.stale import OF_ATTEMPT, OF_ORDER, forged
from mooncake_lite.simulator.store_rank import StoreModel
from mooncake_lite.simulator.workload import Request

CONDUCTOR, CLIENTS = 0, -1
"""Ends of links; ranks have their own numbers."""

SHOWN_EVENTS = 30
MOST_EVENTS_PER_REQUEST = 2000
"""More than any run needs. A request that never gets further is an error, as is a Tick that causes a Tick."""

QUIET_S = 400.0
"""After the last request: every lease, quarantine and order has ended by then."""

PATIENCE_S = 1500.0
"""All requests end within this time after the last has come, whatever goes wrong. An order is given up after
120 s, and a quarantine ends after another 120 s."""


Observer = Callable[[ev.Event, float, Sequence[fx.Effect]], None]


class WorldFailure(AssertionError):
    """A run has failed; the message holds the seed and the last events."""


class World:
    """One run: a cluster, its clients, and what goes wrong.

    control     the control plane under test
    requests    all that have arrived
    hardware    how long its ranks take
    dice        decides about faults; clients have a generator of their own
    trace       the last events, with what each led to
    stopped     the control plane has said Stop
    """

    def __init__(
        self,
        setting: Setting,
        *,
        check_every: int = 50,
        observe: Observer | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """
        check_every   events between two checks of every invariant of the control plane
        patience_s    in which all requests must end after the last one has come
        observe       called with each event, its time and its effects
        """
        self.seed, self.shape, self.faults = setting.seed, setting.shape, setting.faults
        self.dice = setting.dice
        self.clock = Clock()
        self.hardware = setting.hardware(self.clock)
        self.requests: dict[str, Request] = {}
        self.control = Control(self.shape.config)
        layout = self.shape.layout
        self.memory = Memory(layout.layers, layout.nbytes)
        handover = self.shape.config.handover
        self.custody = Custody(self.memory, self.clock, self.dice, self.requests, handover)
        self.trace: deque[tuple[float, ev.Event, Sequence[fx.Effect]]] = deque(maxlen=SHOWN_EVENTS)
        self.num_events = 0
        self.stopped: fx.Stop | None = None
        self.ready = False
        self._links = Links(self.clock)
        self._check_every = check_every
        self._observe = observe
        self._patience_s = patience_s
        self._visible: set[tuple[int, int, str]] = set()
        self._alarm = 0
        self._unsent: deque[ev.Undelivered] = deque()
        self._answers: dict[str, list[ev.RankEvent]] = {}
        self._most_events = MOST_EVENTS_PER_REQUEST * setting.source.num_requests
        self.clients = Clients(self, setting.source, setting.client_dice)
        self.ranks = {
            rank: self._model(rank, role) for rank, role in enumerate(self.shape.config.roles) if rank
        }

    @classmethod
    def drawn(
        cls,
        seed: int,
        *,
        num_requests: int = 100,
        check_every: int = 50,
        faults: Faults | None = None,
        observe: Observer | None = None,
    ) -> World:
        """Make a world in which everything is drawn with a seed; see Setting.drawn."""
        setting = Setting.drawn(seed, num_requests, faults)
        return cls(setting, check_every=check_every, observe=observe)

    def _model(self, rank: int, role: str) -> PrefillModel | DecodeModel | ComputeModel | StoreModel:
        if self.shape.segments[rank]:
            self.memory.add_segment(rank, self.shape.segment_bytes(rank))
        if role == "prefill":
            return PrefillModel(rank, self)
        if role == "decode":
            return DecodeModel(rank, self.shape.slots, self)
        if role == "compute":
            return ComputeModel(rank, self.shape.slots, self)
        return StoreModel(rank, self.shape.tier_blocks, self)

    # ------------------------------------------------------------------------------ a run

    def run(self) -> None:
        """Let all requests end, and the world fall silent. Raises WorldFailure."""
        try:
            self._start()
            self.clients.begin()
            self._run_until(lambda: self.stopped is not None or self.clients.done)
            quiet = self.clock.now + QUIET_S
            self.clock.at(quiet, lambda: None)
            self._run_until(lambda: self.clock.now >= quiet)
            self._check_end()
        except Exception as error:
            raise WorldFailure(self._story(error)) from error

    def _start(self) -> None:
        """Let ranks and a gateway join in any order. Tiers tell what they hold in two pieces."""
        ranks = list(self.ranks)
        self.dice.shuffle(ranks)
        for rank in ranks:
            joined = self.shape.joined(rank)
            self.answer(joined)
            model = self.ranks[rank]
            if joined.tier and isinstance(model, StoreModel):
                keys = model.restart_with(self.clients.known_keys(rank))
                half = len(keys) // 2
                self.answer(self.clients.indexed(rank, keys[:half], last=False))
                self.answer(self.clients.indexed(rank, keys[half:], last=True))
        self.from_clients(ev.GatewayReady("gateway"))

    def _run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            assert self.clock.step(), f"nothing happens any more: {self._open()} are open"
            waited = self.clock.now - self.clients.last_sent_s
            late = waited >= self._patience_s and not self.clients.done
            assert not late, f"after {self._patience_s:g} s {self._open()} are still open"
            assert self.num_events < self._most_events, f"{self.num_events} events"

    def _open(self) -> list[str]:
        return [request.request_id for request in self.requests.values() if not request.ends]

    # ------------------------------------------------------------------------------ events

    def tell(self, event: ev.Event) -> None:
        """Have an event reach the control plane now, and carry out its effects."""
        self._apply(event)
        while self._unsent:
            self._apply(self._unsent.popleft())

    def tell_stale(self, event: ev.RankEvent) -> None:
        """Have an answer of an earlier attempt, or of another start of a rank, reach the control plane."""
        self._apply(event, stale=True)
        while self._unsent:
            self._apply(self._unsent.popleft())

    def _apply(self, event: ev.Event, *, stale: bool = False) -> None:
        now = self.clock.now
        self.num_events += 1
        if not stale and self.stopped is None:
            self.custody.answer(event)
            self.clients.reached(event)
        self.trace.append((now, event, ()))
        waiting = self.control.state.num_waiting
        effects = self.control.on(event, now)
        self.trace[-1] = now, event, effects
        if self._observe is not None:
            self._observe(event, now, effects)
        if self.stopped is not None:
            assert not effects, "the control plane does something after Stop"
            return
        if isinstance(event, ev.RequestArrived):
            self._check_queue(event, waiting)
        for effect in effects:
            self._carry_out(effect)
        if self.stopped is None and self.num_events % self._check_every == 0:
            self.control.check()

    def _check_queue(self, arrived: ev.RequestArrived, waiting: int) -> None:
        """Assert that a request is refused when as many wait as may, by every form of admission but none."""
        config = self.shape.config
        is_full = config.admission != "none" and waiting >= config.max_queue
        assert not (is_full and arrived.request_id in self.control.requests), "the queue was full"

    def answer(self, event: ev.RankEvent) -> None:
        """Send an event from a rank to the control plane. It may be delayed, and come again much later."""
        faults, dice = self.faults, self.dice
        self._links.send(event.rank, CONDUCTOR, self._delay_s(), lambda: self.tell(event))
        if isinstance(event, OF_ATTEMPT):
            self._answers.setdefault(event.request_id, []).append(event)
        if isinstance(event, OF_ATTEMPT + OF_ORDER) and dice.random() < faults.late:
            self.clock.after(dice.uniform(20.0, 200.0), lambda: self._repeat(event))

    def _repeat(self, event: ev.RankEvent) -> None:
        """Deliver an answer again when its attempt is over; sooner it would be a true one."""
        if isinstance(event, OF_ATTEMPT):
            request = self.requests[event.request_id]
            if not request.ends and request.attempt <= event.attempt:
                return
        self.tell_stale(event)

    def _provoke(self, order: fx.Order) -> None:
        """Send answers of earlier attempts, and of another start of a rank, while an order is carried out."""
        faults, dice = self.faults, self.dice
        if isinstance(order, fx.StartOrder):
            for event in self._answers.get(order.request_id, ()):
                if dice.random() < faults.late:
                    self.clock.after(dice.random() * 0.2, partial(self._repeat, event))
        if dice.random() < faults.wrong_epoch:
            answer = forged(order, self.memory.layers, dice)
            if answer is not None:
                self.clock.after(dice.random() * 0.1, partial(self.tell_stale, answer))

    def from_clients(self, event: ev.Event) -> None:
        """Send an event from a gateway or a command to the control plane."""
        self._links.send(CLIENTS, CONDUCTOR, self._delay_s(), lambda: self.tell(event))

    def _delay_s(self) -> float:
        if self.dice.random() < self.faults.slow_link:
            return self.dice.random() * self.faults.slow_link_s
        return self.dice.random() * 0.002

    # ------------------------------------------------------------------------------ effects

    def _carry_out(self, effect: fx.Effect) -> None:
        match effect:
            case fx.BlockStored(key, rank, tier):
                assert (key, rank, tier) not in self._visible, "a block is stored twice"
                self._visible.add((key, rank, tier))
                there = self.memory.holds(rank, key) if tier == "dram" else key in self.custody.on_ssd[rank]
                assert there, f"{key:016x} is not on rank {rank} in {tier}"
            case fx.BlockRemoved(key, rank, tier):
                self._visible.remove((key, rank, tier))
            case fx.WakeAt(time):
                self._alarm += 1
                number = self._alarm
                self.clock.at(max(time, self.clock.now), lambda: self._ring(number))
            case fx.Readiness():
                self.ready = effect.ready
            case fx.Stop():
                self.stopped = effect
            case fx.Reject() | fx.Fail() | fx.Forget() | fx.Branched() | fx.AnswerCommand():
                self.clients.on(effect)
            case fx.Decided() | fx.Release() | fx.Moved():
                self.clients.on(effect)
            case _:
                self._order(effect)

    def _ring(self, number: int) -> None:
        if number == self._alarm:
            self.tell(ev.Tick())

    def _order(self, order: fx.Order) -> None:
        self.custody.order(order)
        self._provoke(order)
        if self.dice.random() < self.faults.unsent and not self._must_arrive(order):
            self._unsent.append(ev.Undelivered(order, "its queue is full"))
            return
        model = self.ranks[order.rank]
        self._links.send(CONDUCTOR, order.rank, self._delay_s(), lambda: model.on(order))

    def _must_arrive(self, order: fx.Order) -> bool:
        """Tell whether a rank would keep a request forever without this order: one that failed elsewhere."""
        return isinstance(order, fx.CancelOn) and not self.requests[order.request_id].cancelled

    # ------------------------------------------------------------------------------ the end

    def _check_end(self) -> None:
        """Assert that every request has one end, and that the pool holds visible blocks alone."""
        self.clients.check_ends()
        if self.stopped is not None:
            return
        self.control.check()
        assert self.control.open_requests == 0
        assert not self.custody.in_use, f"still in use: {self.custody.in_use}"
        stats = self.control.directory.stats()
        for name in (
            "owners",
            "writing_bytes",
            "private_bytes",
            "quarantined_bytes",
            "unlisted_bytes",
            "saving",
        ):
            assert stats[name] == 0, f"{name} is {stats[name]} at the end"
        assert not self.control.state.num_waiting
        assert not self.control.state.num_running
        assert self.control.directory.places() == self._visible
        computing = [one for one in self.ranks.values() if isinstance(one, PrefillModel | ComputeModel)]
        held = {(key, model.number, "dram") for model in computing for key in model.pages.keys}
        assert self.control.state.pages.places() == held, "the index of pages differs from what ranks hold"
        for key, rank, tier in self._visible:
            model = self.ranks[rank]
            assert tier == "dram" or (isinstance(model, StoreModel) and model.serves(key)), f"{key:016x}"
        for obj in self.control.directory.visible_objects():
            assert obj.key is not None
            self.memory.expect_sums(obj.ref, obj.key, list(obj.checksums))

    def _story(self, error: Exception) -> str:
        """Return what has failed, and the last events with their effects."""
        lines = [f"seed {self.seed}: {type(error).__name__}: {error}", f"{self.shape}", f"{self.faults}"]
        lines.append(f"the last {len(self.trace)} events of {self.num_events}:")
        for now, event, effects in self.trace:
            lines.append(f"{now:12.6f} > {readable(event)}")
            lines.extend(f"               {readable(effect)}" for effect in effects)
        return "\n".join(lines)
