"""A world for the control plane and the computing ranks: virtual time, and faults drawn with a seed.

Run by tests (tests/mooncake_lite/control) and by `play.py`. The control plane and the computing ranks
are those that serve. Engines, transfers, store ranks and clients are modelled, and assert what real ones rely
on.
Explained in docs/explain/control.md.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from msgspec.structs import replace

from mooncake_lite import messages as m
from mooncake_lite.conductor.machine import STEWARD, UNREACHABLE, Conductor, Sent, carry
from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.readable import readable
from mooncake_lite.control.request import client_id_of
from mooncake_lite.control.requests import MOST_TRIES, RANKS_LOST
from mooncake_lite.ranks.computing.machine import ComputingRank
from mooncake_lite.simulator.at_rest import assert_at_rest
from mooncake_lite.simulator.clients import Clients
from mooncake_lite.simulator.clock import Clock, Links
from mooncake_lite.simulator.computing_rank import SimulatedRank
from mooncake_lite.simulator.custody import Custody
from mooncake_lite.simulator.faults import Faults
from mooncake_lite.simulator.kv import ExactKV, NoKV
from mooncake_lite.simulator.memory import Memory, NoMemory
from mooncake_lite.simulator.post import CLIENTS, CONDUCTOR, Post
from mooncake_lite.simulator.setting import Setting
from mooncake_lite.simulator.stage_rank import StageModel
from mooncake_lite.simulator.store_rank import StoreModel
from mooncake_lite.simulator.succession import Conductors
from mooncake_lite.simulator.tokens import next_key, opaque_digest, opaque_key
from mooncake_lite.simulator.workload import Request
from mooncake_lite.workloads.metrics import COMPLETED, FAILED, REJECTED, Record
from store.objects import BlockRemoved, BlockStored

SHOWN_EVENTS = 30
MOST_EVENTS_PER_REQUEST = 2000
"""More than any run needs. A request that never gets further is an error, as is a Tick that causes a Tick."""

QUIET_S = 400.0
"""After the last request: every lease, quarantine and order has ended by then."""

PATIENCE_S = 4500.0
"""All requests end within this time after the last has come, whatever goes wrong. An order is given up after
120 s, a quarantine ends after another 120 s, and a request has three tries."""


MOST_PASSES = 40
"""Forward passes that one step of a rank may stand for. Those after the next event are computed in vain, and
in runs with faults, whose tokens are real, each of them costs time. `play.py` has longer ones."""

MAX_LEN = 1 << 40
"""Tokens of prompt and answer: the clients keep to their limits."""

Observer = Callable[[ev.Event, float, Sequence[fx.Effect]], None]


class WorldFailure(AssertionError):
    """A run has failed; the message holds the seed and the last events."""


class ConductorDied(Exception):
    """The conductor has died between two effects."""


class World(Post):
    """One run: a cluster, its clients, and what goes wrong.

    control     the control plane under test
    requests    all that have arrived; where prompts are lengths, those that have not ended
    records     what became of the others
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
        most_passes: int = MOST_PASSES,
    ) -> None:
        """
        check_every   events between two checks of every invariant of the control plane
        patience_s    in which all requests must end after the last one has come
        most_passes   forward passes that one step of a rank may stand for; 1: no leaps
        observe       called with each event, its time and its effects
        """
        self.seed, self.shape, self.faults = setting.seed, setting.shape, setting.faults
        self.dice = setting.dice
        self.clock = Clock()
        self.hardware = setting.hardware(self.clock)
        self.requests: dict[str, Request] = {}
        layout = self.shape.layout
        self.memory = (Memory if setting.exact else NoMemory)(layout.layers, layout.nbytes)
        self.exact = setting.exact
        self.custody = Custody(
            self.memory, self.clock, self.dice, self.shape.config.handover, layout.block_tokens
        )
        if self.shape.config.verify:
            self.custody.doubt()
        self.trace: deque[tuple[float, ev.Event, Sequence[fx.Effect]]] = deque(maxlen=SHOWN_EVENTS)
        self.num_events = 0
        self.records: list[Record] = []
        self._links = Links(self.clock)
        self._check_every = check_every
        self._observe = observe
        self._patience_s = patience_s
        self._most_passes = most_passes
        self._visible: set[tuple[int, int, str]] = set()
        self._alarm_s, self._stale = inf, False
        self._recalls: Counter[str] = Counter()
        self._over: set[int] = set()
        self._heard: dict[str, list[m.Message]] = {}
        self._peers = [f"rank-{rank}" for rank in range(len(self.shape.config.roles))]
        self.begin_conductor(self.shape.config)
        self.conductors = Conductors(self)
        self.dead: set[int] = set()
        self._unreachable: set[int] = set()
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

    def begin_conductor(self, config: ControlConfig) -> None:
        """Begin a conductor that knows nothing but its configuration."""
        self.control = Control(config)
        self.conductor = Conductor(self.shape.facts, self.control, decide=self._decide, watch=self._watch)
        self.custody.bodies = self.conductor.bodies
        self._over.clear()
        self._visible.clear()
        self._heard.clear()
        self._alarm_s = inf

    @property
    def ready(self) -> bool:
        """Return whether the conductor takes requests."""
        return self.conductor.ready

    @property
    def stopped(self) -> fx.Stop | None:
        """Return the Stop of the conductor."""
        return self.conductor.stop

    @property
    def term(self) -> int:
        """Return the number of the present conductor."""
        return self.conductors.term

    def end_conductor(self) -> None:
        """Have the conductor die soon, and the next one take over."""
        self.conductors.begin_dying()

    def _model(self, rank: int, role: str) -> SimulatedRank | StoreModel | StageModel:
        shape, most = self.shape, self._most_passes
        if shape.segments[rank]:
            self.memory.add_segment(rank, shape.segment_bytes(rank))
        if role == "store":
            return StoreModel(rank, shape.tier_blocks, self)
        if role == "stage":
            return StageModel(rank, self)
        hello = shape.hello(rank)
        if not self.exact:
            machine = ComputingRank(hello, shape.rank_state(rank, opaque_key), MAX_LEN, opaque_digest)
            return SimulatedRank(machine, NoKV(), self, most)
        kv = ExactKV(shape.pages, shape.page_tokens, shape.layout.block_tokens)
        return SimulatedRank(ComputingRank(hello, shape.rank_state(rank, next_key), MAX_LEN), kv, self, most)

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
            hello = self.shape.hello(rank)
            self.answer(hello)
            model = self.ranks[rank]
            if hello.tier and isinstance(model, StoreModel):
                blocks = model.restart_with(self.clients.known_blocks())
                half = len(blocks) // 2
                self.answer(self.clients.indexed(rank, blocks[:half], last=False))
                self.answer(self.clients.indexed(rank, blocks[half:], last=True))
        self.from_clients(self.clients.hello)

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

    def tell(self, message: m.Message, *, stale: bool = False) -> None:
        """Have a message reach the conductor now, and deliver what it sends.

        stale   it is of an earlier attempt, or of another start of a rank, and changes nothing
        """
        self._stale = stale
        self._run(lambda: self.conductor.on(self._sender_of(message), message, self.clock.now))

    def _sender_of(self, message: m.Message) -> str:
        """Return the name of the connection of who sends such a message."""
        event = message.event if isinstance(message, m.Report) else message
        if isinstance(event, m.GatewayLost | m.RankLost):
            return STEWARD
        if isinstance(event, ev.RankEvent | m.RankHello):
            return self._peers[event.rank]
        return f"pool-{message.number}" if isinstance(message, m.PoolQuery) else self.clients.gateway

    def _decide(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Let the control plane decide, and note it."""
        self.num_events += 1
        if not self._stale and self.stopped is None:
            if self.exact:
                self.custody.answer(event)
            self.clients.reached(event)
        self._stale = False
        self.trace.append((now, event, ()))
        waiting, is_new = self.control.state.num_waiting, self._is_new(event)
        effects = self.control.on(event, now)
        self.trace[-1] = now, event, effects
        if self._observe is not None:
            self._observe(event, now, effects)
        if is_new and isinstance(event, ev.RequestArrived):
            self._check_queue(event, waiting)
        return effects

    def _run(self, entry: Callable[[], list[Sent]]) -> None:
        """Run the conductor, deliver what it sends, or has sent when it dies, and wake it when it wants."""
        try:
            carry(self.conductor, entry(), self._deliver, lambda: self.clock.now)
        except ConductorDied:
            for one in self.conductor.leaving:
                self._deliver(one)
            self.conductors.take_over()
        if self.conductor.wake_at != self._alarm_s:
            self._alarm_s = self.conductor.wake_at
            if self._alarm_s < inf:
                self.clock.at(max(self._alarm_s, self.clock.now), partial(self._ring, self._alarm_s))
        if self.stopped is None and self.num_events % self._check_every == 0:
            self.control.check()

    def _ring(self, alarm_s: float) -> None:
        if alarm_s == self._alarm_s:
            self._stale = False
            self._run(lambda: self.conductor.tick(self.clock.now))

    def _check_failure(self, failed: fx.Fail) -> None:
        """Assert that a request fails after its last try alone, or because nothing can serve it.

        One that cannot be computed fails with the code for that, and no other does.
        """
        hopeless = ("KV pages are needed", "pool full", "no rank is left")
        name = client_id_of(failed.request_id)
        if failed.code:
            poison = self.requests[name].poison
            assert failed.code in (RANKS_LOST, poison and poison.code), f"{failed} with {poison}"
        elif not any(words in failed.reason for words in hopeless):
            assert self._recalls[name] >= MOST_TRIES - 1, f"{failed}: too few tries"

    def _is_new(self, event: ev.Event) -> bool:
        """Tell whether an event is a request that no conductor has taken before."""
        if not isinstance(event, ev.RequestArrived) or event.answers:
            return False
        return event.request_id not in self.control.requests

    def _check_queue(self, arrived: ev.RequestArrived, waiting: int) -> None:
        """Assert that a request is refused when as many wait as may, by every form of admission but none."""
        config = self.shape.config
        is_full = config.admission != "none" and waiting >= config.max_queue
        assert not (is_full and arrived.request_id in self.control.requests), "the queue was full"

    def kill(self, rank: int, *, ended: bool, why: str = "died") -> None:
        """Kill a rank. What it was doing stops; its memory can be read by some. ended: its end was seen."""
        if rank in self.dead or self.stopped is not None:
            return
        self.dead.add(rank)
        if not ended:
            self._unreachable.add(rank)
        lost = ev.RankLost(rank, 0, why, ended)
        self.clock.after(self.hardware.notice_s(), lambda: self._tell_lost(lost))

    def _tell_lost(self, lost: ev.RankLost) -> None:
        self.conductors.lost.append(lost)
        self.tell(lost)

    def forget(self, request: Request) -> None:
        """Keep of a request that has ended when its client had its tokens."""
        outcome = {"finished": COMPLETED, "rejected": REJECTED}.get(request.ends[0], FAILED)
        times_s, released_s = array("d", request.token_times_s), request.released_s
        if times_s and min(times_s) < released_s:
            times_s = array("d", [max(at, released_s) for at in times_s])
        self.records.append(Record(request.sent_s, times_s, outcome, request.cause))
        del self.requests[request.request_id]

    # ------------------------------------------------------------------------------ effects

    def _watch(self, event: ev.Event, effect: fx.Effect) -> None:
        """See an effect before the conductor carries it out, unless that dies now."""
        if self.conductors.dies():
            raise ConductorDied
        match effect:
            case BlockStored() | BlockRemoved() if not self.exact:
                pass
            case BlockStored(key, rank, tier):
                assert (key, rank, tier) not in self._visible, "a block is stored twice"
                self._visible.add((key, rank, tier))
                there = self.memory.holds(rank, key) if tier == "dram" else key in self.custody.on_ssd[rank]
                assert there or self.term or self.memory.flips, f"{key:016x} is not on rank {rank} in {tier}"
            case BlockRemoved(key, rank, tier):
                self._visible.remove((key, rank, tier))
            case fx.Forget():
                self.clients.on(effect)
                if self.exact:
                    self.custody.ended(effect)
            case fx.Recall() if self.exact:
                self._recalls[client_id_of(effect.request_id)] += 1
                self.custody.recalled(effect)
            case fx.AnswerCommand():
                assert effect.command not in self._over, f"{effect} after the end of its command"
                self._over |= {effect.command} if effect.ended else set()
            case fx.Reject() | fx.Fail():
                if isinstance(effect, fx.Fail) and not self.control.stopped:
                    self._check_failure(effect)
                self.clients.on(effect)
            case fx.Decided() | fx.Release() | fx.Moved() | fx.Branched():
                self.clients.on(effect)

    def _deliver(self, sent: Sent) -> str | None:
        """Deliver a message of the conductor, late or never. Returns why it could not be sent, or None."""
        message = sent.message
        if sent.peer.startswith("pool-"):
            return None if self.clients.answered(sent.peer, message) else UNREACHABLE
        if sent.about is not None:
            assert not isinstance(sent.about, int)
            return self._deliver_order(sent.about, message)
        if isinstance(message, fx.EndRank):
            self.kill(message.rank, ended=True, why=f"failed: {message.reason}")
        elif isinstance(message, fx.Recall) and self.dice.random() >= self.faults.dropped:
            recall = partial(self.clients.on_recall, message)
            self._links.send(CONDUCTOR, CLIENTS, self._delay_s(), recall)
        return None  # of all else, gateways are told at once, and ranks do not need it

    def _deliver_order(self, order: fx.Order, message: m.Message) -> str | None:
        assert order.rank not in self.control.members.lost, f"{order} for a lost rank"
        if self.exact:
            self.custody.order(order)
            if isinstance(order, fx.StartPrefill | fx.StartDecode | fx.StartServe):
                self._repeat(order.request_id)
        if isinstance(message, m.Start):  # its length, which clients do not say
            most = self.requests[client_id_of(message.order.request_id)].most_tokens
            message = replace(message, body=replace(message.body, max_tokens=most))
        model, term = self.ranks[order.rank], self.term
        if self.dice.random() < self.faults.unsent:
            return "its queue is full"
        if self.dice.random() < self.faults.dropped:
            self.custody.never_came(order)
            return None

        def deliver() -> None:
            if model.term == term:  # otherwise it was lost with the connection
                model.on(message)  # type: ignore[arg-type]

        self._links.send(CONDUCTOR, order.rank, self._delay_s(), deliver)
        return None

    # ------------------------------------------------------------------------------ the end

    def _check_end(self) -> None:
        """Assert that every request has one end, and that the pool holds visible blocks alone."""
        self.clients.check_ends()
        if self.stopped is not None:
            return
        if not self.exact:
            assert not self.control.open_requests
            return
        assert_at_rest(self.control, may_hold=bool(self._unreachable))
        assert not self.custody.in_use, f"still in use: {self.custody.in_use}"
        assert self.control.directory.places() == self._visible
        for obj in () if self.term or self.memory.flips else self.control.directory.visible_objects():
            assert obj.key is not None
            self.memory.expect_sums(obj.ref, obj.key, list(obj.checksums))
        alive = [one for one in self.ranks.values() if one.number not in self.dead]
        computing = [one for one in alive if isinstance(one, SimulatedRank)]
        for model in computing:
            model.check_idle()
        if self.faults.dropped or self.faults.reordered or self.faults.doubled:
            return  # what is known of pages and tiers is a hint then, and a wrong one costs a miss
        held = {(key, model.number, "dram") for model in computing for key in model.held}
        assert self.control.state.pages.places() == held, "the index of pages differs from what ranks hold"
        for key, rank, tier in self._visible:
            store = self.ranks[rank]
            assert tier == "dram" or (isinstance(store, StoreModel) and store.serves(key)), f"{key:016x}"

    def _story(self, error: Exception) -> str:
        """Return what has failed, and the last events with their effects."""
        lines = [f"seed {self.seed}: {type(error).__name__}: {error}", f"{self.shape}", f"{self.faults}"]
        lines.append(f"the last {len(self.trace)} events of {self.num_events}:")
        for now, event, effects in self.trace:
            lines.append(f"{now:12.6f} > {readable(event)}")
            lines.extend(f"               {readable(effect)}" for effect in effects)
        return "\n".join(lines)
