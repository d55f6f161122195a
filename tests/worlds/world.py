"""The fault world: what the simulator plays, with everything drawn with a seed, followed and checked.

    SHOWN_EVENTS   when a run fails
    PATIENCE_S     in which all requests end after the last has come, whatever goes wrong: an order is given
                   up after 120 s, a quarantine ends after another 120 s, and a request has three tries
    MOST_PASSES    that one step of a rank may stand for. Those after the next event are computed in vain
    MOST_EFFECTS   that a conductor still carries out which is to die: it may die between any two of them
    LEARNS_S       in which a rank or a gateway learns that there is a new conductor, at most

Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, Self

from msgspec.structs import replace

from mooncake_lite import messages as m
from mooncake_lite.conductor.machine import UNREACHABLE, Sent
from mooncake_lite.config.instances import FOLLOWERS
from mooncake_lite.control import ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.readable import readable
from mooncake_lite.ranks.computing.machine import ComputingRank, NewTerm
from mooncake_lite.simulator.world import MAX_LEN, World
from tests.worlds.checker import FaultChecker
from tests.worlds.clients import FaultyClients
from tests.worlds.faults import Faults
from tests.worlds.members import LockstepRunner
from tests.worlds.memory import Memory
from tests.worlds.post import FaultyPost
from tests.worlds.ranks import ExactKV, ExactRank, ExactRunner, FaultyStore
from tests.worlds.requests import next_key
from tests.worlds.setting import DrawnSetting

SHOWN_EVENTS, PATIENCE_S, MOST_PASSES, MOST_EFFECTS, LEARNS_S = 30, 4500.0, 40, 12, 1.0


class WorldFailure(AssertionError):
    """A run has failed; the message holds the seed and the last events."""


class ConductorDied(Exception):
    """The conductor has died between two effects."""


class FaultWorld(FaultyPost, World):
    """One run in which things go wrong. check_every: events between two checks of every invariant.

    trace   the last events, with what each led to
    term    number of the present conductor
    lost    ranks that it or an earlier one was told to be lost
    _left   effects that it still carries out before it dies
    """

    def __init__(self, setting: DrawnSetting, *, check_every: int = 50, **how: Any) -> None:
        self.seed, self.faults = setting.seed, setting.faults
        self.trace: deque[tuple[float, ev.Event, Sequence[fx.Effect]]] = deque(maxlen=SHOWN_EVENTS)
        self.term, self.lost, self._left = 0, list[ev.RankLost](), inf
        self._check_every = check_every
        super().__init__(setting, **{"most_passes": MOST_PASSES} | how)

    @classmethod
    def drawn(cls, seed: int, num_requests: int = 100, faults: Faults | None = None, **how: Any) -> Self:
        """Make a world in which everything is drawn with a seed; see DrawnSetting.drawn."""
        return cls(DrawnSetting.drawn(seed, num_requests, faults), **how)

    def _make_seams(self, setting: DrawnSetting) -> None:
        layout = self.shape.layout
        self.bytes = self.memory = Memory(layout.layers, layout.nbytes)
        self.checker = FaultChecker(self)
        self.custody = self.checker.custody
        self.custody.doubts = self.shape.config.verify
        self.clients = FaultyClients(self, setting.source, setting.client_dice)

    def _model(self, rank: int, role: str, most: int) -> Any:
        shape = self.shape
        if shape.segments[rank]:
            self.memory.segment_bytes[rank] = shape.segment_bytes(rank)
        if role == "store":
            return FaultyStore(rank, shape.tier_blocks, self)
        if role in FOLLOWERS:
            return super()._model(rank, role, most)
        state = shape.rank_state(rank, next_key)
        machine = ComputingRank(shape.hello(rank), state, MAX_LEN)
        if shape.in_lockstep(rank):
            return ExactRank(machine, partial(LockstepRunner, state.pages.num_pages), self, 1)
        kv = ExactKV(shape.pages, shape.page_tokens, shape.layout.block_tokens)
        return ExactRank(machine, partial(ExactRunner, kv), self, most)

    # ------------------------------------------------------------------------------ a run

    def run(self) -> None:
        """Let all requests end, and the world fall silent. Raises WorldFailure."""
        try:
            super().run()
        except Exception as error:
            raise WorldFailure(self._story(error)) from error

    def _indexed(self, rank: int) -> list[ev.TierIndexed]:
        """Return what a tier has from an earlier run, in two pieces."""
        blocks = self.ranks[rank].restart_with(self.clients.known_blocks())
        pieces = (blocks[: len(blocks) // 2], False), (blocks[len(blocks) // 2 :], True)
        return [ev.TierIndexed(rank, 0, [*dict(some)], [*dict(some).values()], last) for some, last in pieces]

    def _run_until(self, done: Callable[[], bool]) -> None:
        def is_done() -> bool:
            if self.clock.now - self.clients.last_sent_s >= PATIENCE_S:
                assert self.clients.done, f"open: {[n for n, one in self.requests.items() if not one.ends]}"
            return done()

        super()._run_until(is_done)

    def _story(self, error: Exception) -> str:
        """Return what has failed, and the last events with their effects."""
        lines = [f"seed {self.seed}: {type(error).__name__}: {error}", f"{self.shape}", f"{self.faults}"]
        lines.append(f"the last {len(self.trace)} events of {self.num_events}:")
        for now, event, effects in self.trace:
            lines.append(f"{now:12.6f} > {readable(event)}")
            lines.extend(f"               {readable(effect)}" for effect in effects)
        return "\n".join(lines)

    # ------------------------------------------------------------------------------ the conductor

    def begin_conductor(self, config: ControlConfig) -> None:
        super().begin_conductor(config)
        self._heard = {}

    def tell(self, message: m.Message, *, stale: bool = False) -> None:
        """Have a message reach the conductor now. stale: see FaultChecker."""
        self.checker.is_stale = stale
        super().tell(message)
        self.checker.is_stale = False

    def _sender_of(self, message: m.Message) -> str:
        return f"pool-{message.number}" if isinstance(message, m.PoolQuery) else super()._sender_of(message)

    def _decide(self, event: ev.Event, now: float) -> list[fx.Effect]:
        control = self.control
        self.trace.append((now, event, ()))
        is_full = control.state.num_waiting >= self.shape.config.max_queue
        is_new = isinstance(event, ev.RequestArrived) and event.request_id not in control.requests
        effects = super()._decide(event, now)
        self.trace[-1] = now, event, effects
        if is_new and is_full and not event.answers and self.shape.config.admission != "none":
            assert event.request_id not in control.requests, "the queue was full"
        return effects

    def end_conductor(self) -> None:
        """Have the conductor die soon."""
        self._left = self.dice.randrange(MOST_EFFECTS)

    def _watch(self, event: ev.Event, effect: fx.Effect) -> None:
        self._left -= 1
        if self._left < 0:
            raise ConductorDied
        super()._watch(event, effect)

    def _run(self, entry: Callable[[], list[Sent]]) -> None:
        """Run the conductor. What it has sent when it dies is delivered, and the next one takes over."""
        try:
            super()._run(entry)
        except ConductorDied:
            self._left = inf
            for one in self.conductor.leaving:
                self._deliver(one)
            self._take_over()
        if self.stopped is None and self.num_events % self._check_every == 0:
            self.control.check()

    def _deliver(self, sent: Sent) -> str | None:
        if sent.peer.startswith("pool-"):
            return None if self.clients.answered(sent.peer, sent.message) else UNREACHABLE
        return super()._deliver(sent)

    def _take_over(self) -> None:
        """Replace the conductor by one that knows nothing but the losses."""
        self.term += 1
        self.clients.commands = dict.fromkeys(self.clients.commands, 0)  # their connections are gone
        self.begin_conductor(replace(self.shape.config, term=self.term, lost=self.lost))
        self.checker.take_over()
        alive = [model.on for rank, model in self.ranks.items() if rank not in self.dead]
        for tell in (*alive, self.clients.take_over):
            self.clock.after(self.dice.random() * LEARNS_S, partial(self._learn, tell, self.term))

    def _learn(self, tell: Callable[[NewTerm], None], term: int) -> None:
        """Tell a rank or the gateway of the present conductor, unless there is a later one by now."""
        if term == self.term and self.stopped is None:
            tell(NewTerm(term))
