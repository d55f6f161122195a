"""The control plane: `on(event, now) -> [Effect]` is its only entry.

Used by the conductor role and the simulator. It follows each request through the stages of `life.py` and asks
`scheduler` for every choice. `store.directory` holds the truth about the pool. See docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.books import Books
from mooncake_lite.control.commands import Commands
from mooncake_lite.control.config import ControlConfig
from mooncake_lite.control.dispatch import Choose, Dispatcher
from mooncake_lite.control.hints import Hints
from mooncake_lite.control.life import Stage
from mooncake_lite.control.losses import Losses
from mooncake_lite.control.malformed import HAVE_LENGTHS, malformed
from mooncake_lite.control.mechanisms import Mechanisms
from mooncake_lite.control.pool import Pool
from mooncake_lite.control.puts import Puts
from mooncake_lite.control.reports import Reports
from mooncake_lite.control.requests import Requests
from mooncake_lite.control.succession import Succession
from scheduler import ADMISSIONS
from scheduler import choose as best_place


class Control:
    """The control plane of one cluster.

    requests    those that are open
    dispatcher  places and starts them
    state       the books of `scheduler`
    directory   the truth about the pool
    hints       what clients have said of the use of prefixes
    took        the last event was not ignored: it was sound, of this epoch and attempt, and possible
    stopped     the cluster has ended, and later events change nothing

    `now` is in seconds. All events use one clock, which never moves backwards.
    """

    def __init__(self, config: ControlConfig, choose: Choose | None = None) -> None:
        """Build the parts. Raises LayoutError, UnknownPolicy or ValueError for a wrong configuration.

        choose   stands in for `scheduler.choose` with the policy of the configuration
        """
        self._out: list[fx.Effect] = []
        books = Books(config, self._out.append)
        self.config = config
        self.state, self.directory, self.members = books.state, books.directory, books.members
        self._grants = books.grants
        self._of_other_epochs = 0
        self.took = self.stopped = False
        self._ending: set[int] = set()
        self._wake_at = inf
        self._pool = Pool(books)
        self.requests = Requests(books)
        admission = ADMISSIONS[config.admission]()
        choose = choose or partial(best_place, config.placement)
        self.dispatcher = Dispatcher(books, choose, admission, self.requests)
        self._puts = Puts(books, self.requests, self.dispatcher.room, self._pool)
        self._commands = Commands(books)
        self.hints = Hints(books, self.dispatcher)
        self._losses = Losses(books, self.requests, self.dispatcher)
        self._succession = Succession(books, self._pool, self.dispatcher, self._end_rank)
        self._gone = {lost.rank: lost for lost in config.lost}
        for rank in list(self._gone):
            self._end_others(config.instance_of(rank), rank, 0.0)
        self._handlers = self._all_handlers(Reports(books, self._pool, self.requests, self.dispatcher))

    def _all_handlers(self, reports: Reports) -> dict[type, Callable[[Any, float], None]]:
        """Return what applies each event."""
        return {
            ev.RankJoined: self._on_rank_joined,
            ev.RankLost: self._on_rank_lost,
            ev.TierIndexed: self._on_tier_indexed,
            ev.Inventory: self._on_inventory,
            ev.GatewayReady: self._on_gateway_ready,
            ev.GatewayLost: self._on_gateway_lost,
            ev.RequestArrived: self._on_arrived,
            ev.RequestCancelled: self.requests.on_cancelled,
            ev.AnswerReceived: self.requests.on_received,
            ev.Recalled: self.requests.on_recalled,
            ev.ChunkStored: reports.on_chunk_stored,
            ev.PrefillEnded: reports.on_prefill_ended,
            ev.RequestFailed: reports.on_failed,
            ev.DecodeLoaded: reports.on_decode_loaded,
            ev.PromptComputed: reports.on_prompt_computed,
            ev.DecodeEnded: reports.on_decode_ended,
            ev.Preempted: reports.on_preempted,
            ev.SwapWanted: reports.on_swap_wanted,
            ev.Swapped: reports.on_preempted,
            ev.OpenListed: self._on_open_listed,
            ev.PutsWanted: self._puts.on_wanted,
            ev.PutsEnded: self._puts.on_ended,
            ev.PagesChanged: lambda told, now: self.state.note_pages(told.rank, told.stored, told.removed),
            ev.BlocksBad: lambda bad, now: self.directory.bad(bad.object_ids),
            ev.BlocksLoaded: self._on_loaded,
            ev.BlocksSaved: self._pool.on_saved,
            ev.TierEvicted: lambda gone, now: self.directory.tier_evicted(gone.rank, gone.keys),
            ev.BlocksRemoved: self._on_blocks_removed,
            ev.BlocksCopied: self.dispatcher.copies.on_copied,
            ev.BlocksChecked: self._commands.on_checked,
            ev.PoolCommand: self._on_command,
            ev.CommandAbandoned: self._commands.on_abandoned,
            ev.HintArrived: self.hints.on_arrived,
            ev.Undelivered: self._on_undelivered,
            ev.Tick: lambda event, now: None,
            ev.StopRequested: lambda event, now: self._stop(event.reason, event.grace_s, False),
        }  # fmt: skip

    # ------------------------------------------------------------------------------ the one entry

    def on(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Apply one event and return its effects, in the order in which they are to be carried out."""
        self.took = False
        if self.stopped:
            return []
        if isinstance(event, ev.RankEvent) and not self._is_of_this_epoch(event):
            self._of_other_epochs += 1
            return []
        if (problem := self._problem_of(event)) and isinstance(event, ev.RankEvent):
            self._end_rank(event.rank, f"sent a malformed {type(event).__name__}: {problem}", now)
            event = ev.Tick()
        self.directory.expire(now)
        self.hints.on_time(now)
        for rank in self._grants.check(now):
            self._end_rank(rank, "did not say what it works on", now)
        if not self.stopped:
            ignored = self.ignored
            self._handlers[type(event)](event, now)
            self.took = not problem and self.ignored == ignored
            self._succession.look(now)
        if not self.stopped:
            self._pool.tell()
            self.dispatcher.retry(all_of_them=isinstance(event, ev.PoolCommand))  # it may have pinned blocks
            self.dispatcher.dispatch(now)
            self._pool.tell()
            self._set_alarm(now)
        effects = self._out[:]
        self._out.clear()
        return effects

    @property
    def ignored(self) -> int:
        """Events that changed nothing: of another epoch or attempt, or impossible in the request's stage."""
        return self._of_other_epochs + self.requests.ignored

    @property
    def mechanisms(self) -> Mechanisms:
        """Return how often each mechanism was tried, and how often that failed."""
        return self._grants.tried

    @property
    def open_requests(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self.requests)

    def _is_of_this_epoch(self, event: ev.RankEvent) -> bool:
        """Tell whether an event is from the current start of its rank, or from one that has not joined."""
        if isinstance(event, ev.RankLost):
            return event.rank not in self.members.lost
        if isinstance(event, ev.RankJoined) and not self.members.has(event.rank):
            return event.epoch >= self.config.term
        return self.members.knows(event.rank, event.epoch)

    def _problem_of(self, event: ev.Event) -> str:
        """Return what is wrong with a report that no sound rank sends; "" for a sound one."""
        if type(event) not in HAVE_LENGTHS:
            return ""
        assert isinstance(event, ev.RankEvent)
        expected = None
        if isinstance(event, ev.BlocksLoaded | ev.BlocksCopied | ev.BlocksChecked):
            grant = self._grants.get(event.rank, event.number)
            expected = None if grant is None else grant.blocks
        elif isinstance(event, ev.BranchEvent):
            expected = event.num_tokens // self.config.block_layout.block_tokens
        elif isinstance(event, ev.ChunkStored | ev.PrefillEnded):
            record = self.requests.working(event)
            expected = None if record is None else len(record.present.store)
        problem = malformed(event, self.config.block_layout.layers, expected)
        if isinstance(event, ev.PutsEnded) and not self._puts.granted(event):
            problem = problem or "it names objects that were not granted"
        return problem

    def _set_alarm(self, now: float) -> None:
        """Emit WakeAt for the next end of a lease or a quarantine, or the check of a grant, once per time."""
        if self._wake_at <= now:
            self._wake_at = inf
        due = min(self.directory.next_deadline(), self._grants.next_deadline(), self.hints.next_deadline())
        if self.dispatcher.closes_at > now:
            due = min(due, self.dispatcher.closes_at)
        if due < self._wake_at:
            self._wake_at = due
            self._out.append(fx.WakeAt(due))

    # ------------------------------------------------------------------------------ members

    def _on_rank_joined(self, joined: ev.RankJoined, now: float) -> None:
        if self.members.has(joined.rank):
            self._of_other_epochs += 1
            return
        self.members.join(joined)
        self.state.index.add_holder(joined.rank, joined.node)
        duties = [duty for duty in joined.duties if duty != "store"]
        if duties:
            self.state.add_instance(joined.instance, joined.node, duties, joined.slots)
        if joined.segment_bytes or "store" in joined.duties:
            saves = self.config.saves and duties and self.members.stores
            saver = self.members.keeper_of(joined.rank) if saves else None
            self.directory.add_segment(
                joined.rank, joined.segment_bytes, joined.node, tier=joined.tier, saver=saver
            )
        self._tell_readiness()

    def _on_rank_lost(self, lost: ev.RankLost, now: float) -> None:
        """Go on without a rank. Before all ranks were ready, and without rank 0, the cluster cannot."""
        reason = f"rank {lost.rank} ({self.members.roles[lost.rank]}) {lost.reason}"
        if not (lost.rank and self.config.survives and self.members.was_ready):
            self._stop(reason, 0.0, True)
            return
        self._gone[lost.rank] = lost
        ranks = self.config.instance_of(lost.rank)
        self._end_others(ranks, lost.rank, now)
        all_ended = all(rank in self._gone and self._gone[rank].ended for rank in ranks)
        ended = all_ended if lost.rank == ranks[0] else lost.ended  # what it was granted, others may write
        self._losses.apply(lost.rank, reason, ended, now)
        if all_ended:
            self.directory.settle_writer(ranks[0])

    def _end_others(self, ranks: list[int], lost: int, now: float) -> None:
        """Kill the other ranks of an instance: it dies as a whole."""
        for rank in ranks:
            if rank not in self._gone:
                self._end_rank(rank, f"rank {lost} of its instance is lost", now)

    def _end_rank(self, rank: int, reason: str, now: float) -> None:
        """Have a rank killed that does not do what it should. It counts as lost when it has ended."""
        if not (self.config.survives and self.members.was_ready):
            self._on_rank_lost(ev.RankLost(rank, 0, reason), now)
        elif rank not in self._ending:
            self._ending.add(rank)
            self._out.append(fx.EndRank(rank, reason))

    def _on_gateway_lost(self, lost: ev.GatewayLost, now: float) -> None:
        """Drop what the clients of a gateway wanted. Their connections are gone."""
        if lost.final or not self.members.was_ready:
            self._stop(lost.reason, 0.0, True)
            return
        self.members.gateways.discard(lost.gateway)
        self.requests.on_gateway_lost(lost.gateway, now)

    def _on_tier_indexed(self, index: ev.TierIndexed, now: float) -> None:
        self.directory.add_tier_blocks(index.rank, index.keys, index.digests)
        if index.last:
            self.members.listed(index.rank, "tier")
            self._tell_readiness()

    def _on_inventory(self, inventory: ev.Inventory, now: float) -> None:
        self._succession.on_inventory(inventory)
        if inventory.last:
            self.members.listed(inventory.rank, "inventory")
            self._tell_readiness()

    def _on_gateway_ready(self, event: ev.GatewayReady, now: float) -> None:
        self.members.gateways.add(event.gateway)
        self._tell_readiness()

    def _tell_readiness(self) -> None:
        self.members.was_ready = self.members.was_ready or self.members.ready
        self._out.append(fx.Readiness(self.members.was_ready, self.members.missing(), self.dispatcher.closed))

    def _stop(self, reason: str, grace_s: float, lost: bool) -> None:
        """Fail every open request once. Later events change nothing."""
        self.requests.fail_all(f"the cluster stops: {reason}")
        self._out.append(fx.Stop(reason, grace_s, lost))
        self.stopped = True

    # ------------------------------------------------------------------------------ everything else

    def _on_arrived(self, arrived: ev.RequestArrived, now: float) -> None:
        """Note the session of a request, and place it."""
        self.hints.note_session(arrived)
        self.dispatcher.on_arrived(arrived, now)

    def _on_open_listed(self, listed: ev.OpenListed, now: float) -> None:
        """Lose the work that a rank does not have, and cancel again what it should have dropped."""
        for grant in self._grants.on_listed(listed, now):
            if grant.about.stage is Stage.CANCELLED:
                self.requests.cancel_on(grant.about)

    def _on_command(self, command: ev.PoolCommand, now: float) -> None:
        """Carry out a pool command, once the pool is known."""
        if self._succession.is_over:
            if command.what == "pin" and all(map(self.directory.find, command.keys)):  # else it changes none
                self.hints.forget_pins(command.keys)
            self._commands.on_command(command, now)
        else:
            self._out.append(fx.AnswerCommand(command.command, True, self.dispatcher.learning))

    def _on_loaded(self, loaded: ev.BlocksLoaded, now: float) -> None:
        """Apply the end of a read from SSD, for a hint or for a request."""
        if not self.hints.on_loaded(loaded, now):
            self.dispatcher.loads.on_loaded(loaded, now)

    def _on_blocks_removed(self, removed: ev.BlocksRemoved, now: float) -> None:
        self.directory.tier_removed(removed.rank, removed.keys)
        self._commands.on_removed(removed)

    def _on_undelivered(self, event: ev.Undelivered, now: float) -> None:
        """End what an order was for. Its rank has not received it, so no byte can be written."""
        match event.order:
            case fx.StartPrefill() | fx.StartDecode() | fx.StartServe():
                if (record := self.requests.working(event.order)) is not None:
                    self.requests.lose(record, event.reason, now)
            case fx.GrantSwap():
                self.requests.swaps.undelivered(event.order, event.reason, now)
            case fx.GrantPuts():
                self._puts.undelivered(event.order, event.reason, now)
            case fx.LoadBlocks(number=number) | fx.CopyBlocks(number=number) | fx.CheckBlocks(number=number):
                self._grants.fail(number, event.reason, False, now)
            case fx.SaveBlocks():
                self._pool.unsaved(event.order.rank, event.order.keys)
            case fx.RemoveBlocks():
                self._commands.undelivered(event.order)
            case fx.ListOpen():
                self._grants.not_asked(event.order.rank)
            case fx.CancelOn() | fx.CompactTier() | fx.ForgetPages() | fx.HoldBlocks() | fx.Prefetch():
                pass  # the first comes again with a check; without HoldBlocks a later conductor misses blocks

    def check(self) -> None:
        """Assert every invariant. Called by tests and by the fault world."""
        self.state.check()
        self.directory.check()
        self._grants.assert_sound()
        self._commands.check()
        self._check_owners()
        self.requests.check()
        assert set(self.state.index.places()) == set(self.directory.places()), "the index differs"

    def _check_owners(self) -> None:
        """Assert that nothing in the pool is leased or reserved for a request that is over."""
        for owner in self.directory.active_owners():
            known = self.requests.knows(owner) or owner.startswith(("put/", "copy/", "check/", "hint/"))
            assert known, f"{owner} has leases or places in the pool"
