"""What must be true in the fault world: at each event and effect, and when all has ended.

Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.request import client_id_of
from mooncake_lite.control.requests import MOST_TRIES, RANKS_LOST
from mooncake_lite.simulator.checker import Checker
from store.objects import BlockRemoved, BlockStored
from tests.worlds.custody import Custody
from tests.worlds.ranks import ExactRank, FaultyStore

ORDERS = frozenset(get_args(fx.Order))
UNDER_WAY = ("owners", "writing_bytes", "private_bytes", "quarantined_bytes", "unlisted_bytes", "saving")


class FaultChecker(Checker):
    """Asserts what ranks and clients rely on.

    is_stale     the next event is of an earlier attempt, or of another start of a rank, and changes nothing
    _visible     blocks of which the control plane has told; _over: commands that it has ended
    _recalls     request -> how often it was recalled
    """

    def __init__(self, world: Any) -> None:
        self._world, self.custody = world, Custody(world)
        self.is_stale, self._recalls = False, Counter[str]()
        self._visible, self._over = set[tuple[int, int, str]](), set[int]()

    def take_over(self) -> None:
        """Forget what only the conductor knew that has just died."""
        self.custody.take_over()
        self._over.clear()
        self._visible.clear()

    def saw(self, event: ev.Event) -> None:
        """Look at an event that the control plane is about to hear."""
        stale, self.is_stale = self.is_stale, False
        if not stale and self._world.stopped is None:
            self.custody.answer(event)
            self._world.clients.reached(event)
        if isinstance(event, ev.RankLost):
            self._world.lost.append(event)

    def watch(self, event: ev.Event, effect: fx.Effect) -> None:
        """Look at an effect of an event, before it is carried out."""
        world = self._world
        match effect:
            case BlockStored(key, rank, tier):
                assert (key, rank, tier) not in self._visible, "a block is stored twice"
                self._visible.add((key, rank, tier))
                there = world.memory.holds(rank, key) if tier == "dram" else key in self.custody.on_ssd[rank]
                assert there or world.term or world.memory.flips, f"{effect} is not there"
            case BlockRemoved(key, rank, tier):
                self._visible.remove((key, rank, tier))
            case fx.Forget():
                self.custody.ended(effect)
            case fx.Recall():
                self._recalls[client_id_of(effect.request_id)] += 1
                self.custody.recalled(effect)
            case fx.AnswerCommand():
                assert effect.command not in self._over, f"{effect} after the end of its command"
                self._over |= {effect.command} if effect.ended else set()
            case fx.HintAnswered():
                assert isinstance(event, ev.HintArrived)
                assert event.hint_id == effect.hint_id
                assert 0 <= effect.affected <= effect.blocks
            case fx.Fail() if not world.control.stopped:
                self._check_failure(effect)
            case _ if type(effect) in ORDERS:
                assert effect.rank not in world.control.members.lost, f"{effect} for a lost rank"
                self.custody.order(effect)

    def _check_failure(self, failed: fx.Fail) -> None:
        """Assert that a request fails after its last try alone, or because nothing can serve it.

        One that cannot be computed fails with the code for that, and no other does.
        """
        hopeless = ("KV pages are needed", "pool full", "no rank is left")
        name = client_id_of(failed.request_id)
        if failed.code:
            poison = self._world.requests[name].poison
            assert failed.code in (RANKS_LOST, poison and poison.code), f"{failed} with {poison}"
        elif not any(words in failed.reason for words in hopeless):
            assert self._recalls[name] >= MOST_TRIES - 1, f"{failed}: too few tries"

    def end(self) -> None:
        """Assert that every request has one end, and that the pool holds visible blocks alone."""
        world, control, memory = self._world, self._world.control, self._world.memory
        world.clients.check_ends()
        if world.stopped is not None:
            return
        control.check()
        assert control.open_requests == control.state.num_waiting == control.state.num_running == 0
        bound = control.state.held.bound()
        assert bound is None or not bound.late, f"requests began later than their queue allows: {bound}"
        stats, seen = control.directory.stats(), all(lost.ended for lost in world.lost)
        for name in UNDER_WAY if seen else ():  # a rank that cannot be reached may still write
            assert stats[name] == 0, f"{name} is {stats[name]} at the end"
        assert not self.custody.in_use, f"still in use: {self.custody.in_use}"
        assert control.directory.places() == self._visible
        for obj in () if world.term or memory.flips else control.directory.visible_objects():
            memory.expect_sums(obj.ref, obj.key, list(obj.checksums))
        alive = [one for one in world.ranks.values() if one.number not in world.dead]
        computing = [one for one in alive if isinstance(one, ExactRank)]
        for model in computing:
            model.check_idle()
        if world.faults.dropped or world.faults.reordered or world.faults.doubled:
            return  # what is known of pages and tiers is a hint then, and a wrong one costs a miss
        held = {(key, model.number, "dram") for model in computing for key in model.held}
        assert control.state.pages.places() == held, "the index of pages differs from what ranks hold"
        for key, rank, tier in self._visible:
            store = world.ranks[rank]
            assert tier == "dram" or (isinstance(store, FaultyStore) and store.serves(key)), f"{key:016x}"
