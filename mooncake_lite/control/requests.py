"""Follows each request from its arrival to its end, through the stages of `life.py`.

Used by `machine.py`. Asks `scheduler` for every choice. See docs/explain/control.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.config import ControlConfig
from mooncake_lite.control.copies import Copies
from mooncake_lite.control.life import OPEN_STAGES, Stage, Step
from mooncake_lite.control.members import Members
from mooncake_lite.control.orders import Orders
from mooncake_lite.control.pool import Pool
from mooncake_lite.control.prefix_loads import PrefixLoads
from mooncake_lite.control.request import Kept, RequestRecord
from mooncake_lite.control.room import Room
from mooncake_lite.control.swaps import Swaps
from scheduler import Placement, Policy, Rejection, Request, State, Wait, admit
from store.directory import Directory
from store.errors import PoolFull

STARTING_RETRY_S = 5.0
"""Retry-After of a request that arrives before every rank has joined."""

PINNED_RETRY_S = 5.0
"""Retry-After of a request that is refused because pinned blocks leave too little space."""


class Requests:
    """The open requests.

    policy         chooses the place of a request
    ignored        answers that changed nothing: of another attempt, or impossible in their stage
    pool_is_full   a request waits for space in the pool, and none has been freed since
    no_place       the policy answered Wait, and no slot has been freed since
    stages         number of open requests in each stage
    """

    def __init__(
        self,
        config: ControlConfig,
        policy: Policy,
        state: State,
        directory: Directory,
        members: Members,
        orders: Orders,
        pool: Pool,
        emit: Callable[[fx.Effect], None],
    ) -> None:
        self.policy = policy
        self.ignored = 0
        self.pool_is_full = False
        self.no_place = False
        self.stages = dict.fromkeys(OPEN_STAGES, 0)
        self._state, self._directory, self._members, self._pool, self._emit = (
            state, directory, members, pool, emit,
        )  # fmt: skip
        self._block_tokens = config.block_layout.block_tokens
        self._handover = config.handover
        self.room = Room(directory, members, state, config)
        self.loads = PrefixLoads(directory, orders, emit, self._loads_ended)
        self.copies = Copies(directory, members, orders, emit)
        self.swaps = Swaps(directory, members, config, emit)
        self._records: dict[str, RequestRecord] = {}
        self._families: dict[str, list[RequestRecord]] = {}  # client's id -> its record, and branched ones

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._records)

    def stage_of(self, request_id: str) -> Stage:
        """Return the stage of a request; OVER for an unknown one."""
        record = self._records.get(request_id)
        return record.stage if record else Stage.OVER

    def fail_all(self, reason: str) -> None:
        """Fail every open request, once."""
        for request_id in self._records:
            self._emit(fx.Fail(request_id, reason))
            self._emit(fx.Forget(request_id, "failed"))
        self._records.clear()
        self._families.clear()
        self.stages = dict.fromkeys(OPEN_STAGES, 0)

    def on_undelivered(self, order: fx.StartOrder | fx.GrantSwap, reason: str, now: float) -> None:
        """Fail a request whose order was not sent. Its rank may still swap out another branch of it."""
        record = self._current(order, Step.FAIL)
        if record is not None:
            if isinstance(order, fx.GrantSwap):
                self._emit(fx.CancelOn(order.rank, order.request_id, order.attempt))  # it waits for the grant
            self._fail(record, reason, now, may_still_write=record.n > 1)

    def _move(self, record: RequestRecord, step: Step) -> None:
        """Move a request to its next stage, and count it there."""
        self.stages[record.stage] -= 1
        record.move(step)
        if record.stage is not Stage.OVER:
            self.stages[record.stage] += 1

    # ------------------------------------------------------------------------------ arrival and end

    def on_arrived(self, arrived: ev.RequestArrived, now: float) -> None:
        """Refuse a request at once, or accept it and place or hold it."""
        assert arrived.request_id not in self._records, f"{arrived.request_id} arrives twice"
        record = RequestRecord.of(arrived, now)
        if not self._members.ready:
            self._reject(record, "the cluster is still starting", STARTING_RETRY_S)
            return
        request = record.as_request(self._block_tokens)
        rejection = admit(self._state, request, now)
        if rejection is not None:
            self._reject(record, rejection.reason, rejection.retry_after_s)
            return
        self._add(record)
        if self.no_place or self._state.next_held() is not None or not self._place(record, request, now):
            self._state.hold(request)

    def _reject(self, record: RequestRecord, reason: str, retry_after_s: float) -> None:
        self._emit(fx.Reject(record.request_id, reason, retry_after_s))
        self._emit(fx.Forget(record.request_id, "rejected"))

    def _add(self, record: RequestRecord) -> None:
        self._records[record.request_id] = record
        self._families.setdefault(record.client_id, []).append(record)
        self.stages[record.stage] += 1

    def on_cancelled(self, event: ev.RequestCancelled, now: float) -> None:
        """Drop what a client does not want any more: all branches of its request, or one."""
        for record in list(self._families.get(event.request_id, ())):
            if event.branch in record.branches:
                record.dropped.add(event.branch)
            if event.branch < 0 or record.branches <= record.dropped:
                self._cancel(record, now)
            elif event.branch in record.branches and record.worker == record.decode >= 0:
                self._emit(fx.CancelOn(record.worker, record.request_id, record.attempt, event.branch))

    def _cancel(self, record: RequestRecord, now: float) -> None:
        """Drop a waiting request at once. If a rank or a tier works on it, wait until that has dropped it."""
        if not record.may(Step.CANCEL):
            return
        self._move(record, Step.CANCEL)
        if record.stage is Stage.OVER:
            self._end(record, "cancelled", now)
        elif record.worker >= 0:
            self._emit(fx.CancelOn(record.worker, record.request_id, record.attempt))

    def _end(self, record: RequestRecord, outcome: str, now: float, *, may_still_write: bool = False) -> None:
        """Remove a request: free its private objects, leases and slots, and emit Forget."""
        del self._records[record.request_id]
        self._families[record.client_id].remove(record)
        if not self._families[record.client_id]:
            del self._families[record.client_id]
        self.swaps.forget(record.request_id, now, may_still_write=may_still_write, writer=record.worker)
        self._directory.revoke_owner(
            record.request_id, now, writer_may_live=may_still_write, writer=record.worker
        )
        self._state.forget(record.request_id)
        self.no_place = False
        self._emit(fx.Forget(record.request_id, outcome))

    def _fail(self, record: RequestRecord, reason: str, now: float, may_still_write: bool = False) -> None:
        """Fail a request with all its branches, and tell its client unless the client has left."""
        gone = record.stage is Stage.CANCELLED
        self._move(record, Step.FAIL)
        if not gone:
            self._emit(fx.Fail(record.request_id, reason))
        self._end(record, "cancelled" if gone else "failed", now, may_still_write=may_still_write)
        if not gone:
            self.on_cancelled(ev.RequestCancelled(record.client_id), now)

    # ------------------------------------------------------------------------------ dispatch

    def dispatch(self, now: float) -> None:
        """Place held requests, and start those whose turn it is. Only placement scans instances.

        A start that ends in a refusal frees a place, so that the next request may be placed.
        """
        while True:
            if not self.no_place and (request := self._state.next_held()) is not None:
                self._place(self._records[request.request_id], request, now)
            elif not self.pool_is_full and (request_id := self._state.startable()) is not None:
                self._start(self._records[request_id], now)
            else:
                return

    def _place(self, record: RequestRecord, request: Request, now: float) -> bool:
        """Ask the policy for a place. False: this request and all after it must wait for capacity."""
        decision = self.policy.choose(self._state, request, now)
        if isinstance(decision, Wait):
            self.no_place = True
            return False
        if isinstance(decision, Rejection):
            self._refuse(record, decision.reason, decision.retry_after_s, now)
            return True
        if record.kept is None:
            self._move(record, Step.PLACE)
            self._state.place(request, decision, front=record.resumed)
        else:
            self._move(record, Step.RESUME)
            self._state.resume(request, decision)
        record.prefill, record.decode = self._ranks_of(decision)
        self._emit(
            fx.Decided(
                record.request_id, record.attempt + 1, decision.prefill, decision.decode,
                decision.cached_tokens, decision.terms,
            )
        )  # fmt: skip
        if record.kept is not None:
            record.load, record.tail, record.kept = record.kept.blocks, record.kept.tail, None
            record.attempt += 1
            self._start_decode(record)
        return True

    def _start_decode(self, record: RequestRecord) -> None:
        record.worker = record.decode
        blocks, branches = record.load + record.store, sorted(record.branches)
        order = fx.StartDecode(
            record.decode, record.request_id, record.attempt, blocks, record.tail, branches
        )
        self._emit(order)

    @staticmethod
    def _ranks_of(placement: Placement) -> tuple[int, int]:
        """Return the ranks of the instances that a policy chose. Today each instance is one rank."""
        return placement.prefill, placement.decode

    def _refuse(self, record: RequestRecord, reason: str, retry_after_s: float, now: float) -> None:
        """Refuse an accepted request. A request whose client has received tokens fails instead."""
        if record.resumed:
            self._fail(record, reason, now)
            return
        self._move(record, Step.REFUSE)
        self._emit(fx.Reject(record.request_id, reason, retry_after_s))
        self._end(record, "rejected", now)

    def _start(self, record: RequestRecord, now: float) -> None:
        """Start a request, defer it until there is space, or refuse it if it could never fit."""
        record.reset()
        self._state.start(record.request_id)
        try:
            moves = self.room.reserve(record, now)
        except PoolFull as error:
            self._directory.revoke_owner(record.request_id, now)
            record.reset()
            if not self.room.could_ever_hold(record, now):
                self._refuse(record, str(error), PINNED_RETRY_S, now)
                return
            self._state.defer(record.request_id)
            self.pool_is_full = self._handover == "pool"  # another decode rank may have space of its own
            return
        if moves:
            self._move(record, Step.PROMOTE)
            self.loads.begin(record, moves, now)
        else:
            self._prefill(record, now)

    def _loads_ended(self, record: RequestRecord, now: float) -> None:
        """Continue with a request whose loads from SSD have all ended."""
        if record.stage is Stage.CANCELLED:
            self._move(record, Step.DROP)
            self._end(record, "cancelled", now)
        elif record.problem:
            self._fail(record, f"KV could not be moved: {record.problem}", now)
        elif record.bad_blocks:  # they are misses now: look the prefix up again
            self._move(record, Step.RESTART)
            self._directory.revoke_owner(record.request_id, now)
            self._state.defer(record.request_id)
            self._state.retry()
        else:
            self._prefill(record, now)

    def _prefill(self, record: RequestRecord, now: float) -> None:
        self._move(record, Step.PREFILL)
        record.attempt += 1
        record.worker = record.prefill
        self._emit(self._first_order(record, now - record.since_s))
        if record.worker == record.decode:
            for branch in sorted(record.dropped):
                self._emit(fx.CancelOn(record.worker, record.request_id, record.attempt, branch))
        self.copies.on_prefill(record, now)

    def _first_order(self, record: RequestRecord, queued_s: float) -> fx.StartPrefill | fx.StartServe:
        """Return the order for the rank that computes the prompt. Without a handover it decodes as well."""
        if self._handover == "none":
            return fx.StartServe(
                record.prefill, record.request_id, record.attempt, record.load, record.cached, queued_s,
                record.promoted,
            )  # fmt: skip
        return fx.StartPrefill(
            record.prefill, record.request_id, record.attempt, record.load, record.store, record.tail,
            record.cached, queued_s, record.promoted,
        )  # fmt: skip

    # ------------------------------------------------------------------------------ reports of compute ranks

    def _current(self, event: Any, *steps: Step) -> RequestRecord | None:
        """Return the request that an answer is about. None: wrong attempt, or impossible in its stage."""
        record = self._working(event)
        if record is not None and any(map(record.may, steps)):
            return record
        self.ignored += 1
        return None

    def _working(self, event: Any) -> RequestRecord | None:
        """Return the request that an answer is about, if its rank works on this attempt."""
        record = self._records.get(event.request_id)
        is_of_attempt = record is not None and (record.attempt, record.worker) == (event.attempt, event.rank)
        return record if is_of_attempt else None

    def on_prefill_ended(self, ended: ev.PrefillEnded, now: float) -> None:
        """Publish the KV of a prompt, and start its decode."""
        record = self._current(ended, Step.PREFILLED, Step.DROP)
        if record is None:
            return
        computed = record.num_tokens - sum(record.cached.values())
        self._state.measured_prefill(computed, ended.compute_s)
        self._pool.publish([ref.object_id for ref in record.store], ended.checksums, now)
        record.branches -= {*ended.finished, *record.dropped}
        if record.stage is Stage.CANCELLED:
            self._move(record, Step.DROP)
            self._end(record, "cancelled", now)
        elif not record.branches:
            self._move(record, Step.FINISH)
            self._end(record, "finished", now)
        else:
            self._move(record, Step.PREFILLED)
            record.resumed = True
            self._state.end_prefill(record.request_id)
            self._keep_slots(record)
            self._start_decode(record)

    def on_failed(self, failed: ev.RequestFailed, now: float) -> None:
        """End a request that a rank gave up, or dropped after a cancel."""
        record = self._current(failed, Step.FAIL)
        if record is not None:
            self._fail(record, failed.reason, now, failed.may_still_write)

    def on_decode_loaded(self, loaded: ev.DecodeLoaded, now: float) -> None:
        """Free the tail and the leases: the decode rank has all KV in its pages."""
        record = self._current(loaded, Step.LOADED, Step.DROP)
        if record is None:
            return
        self._directory.revoke_owner(record.request_id, now)
        if record.may(Step.LOADED):
            self._move(record, Step.LOADED)

    def on_prompt_computed(self, computed: ev.PromptComputed, now: float) -> None:
        """Free the leases and the prefill slot: the rank has all KV in its pages, and decodes on."""
        record = self._current(computed, Step.COMPUTED, Step.DROP)
        if record is None:
            return
        self._state.measured_prefill(computed.computed_tokens, computed.compute_s)
        self._directory.revoke_owner(record.request_id, now)
        if record.may(Step.COMPUTED):
            self._move(record, Step.COMPUTED)
            record.resumed = True
            self._state.end_prefill(record.request_id)

    def _keep_slots(self, record: RequestRecord) -> None:
        """Free the decode slots of branches that have ended."""
        self._state.keep_slots(record.request_id, len(record.branches))
        self.no_place = False

    def on_decode_ended(self, ended: ev.DecodeEnded, now: float) -> None:
        """End a branch whose last token was sent, or that was dropped. The last branch ends the request."""
        record = self._working(ended)
        if record is None or record.worker != record.decode or ended.branch not in record.branches:
            self.ignored += 1
        elif len(record.branches) > 1:
            self.swaps.end(ended, now)
            record.branches.remove(ended.branch)
            self._keep_slots(record)
        elif record.may(Step.FINISH) or record.may(Step.DROP):
            self._finish(record, "finished", now)
        else:
            self.ignored += 1

    def _finish(self, record: RequestRecord, outcome: str, now: float) -> None:
        self._move(record, Step.DROP if record.may(Step.DROP) else Step.FINISH)
        self._end(record, outcome, now)

    def on_swap_wanted(self, wanted: ev.SwapWanted, now: float) -> None:
        """Find space for the KV of a branch that its rank preempts, unless it was cancelled."""
        record = self._current(wanted, Step.PREEMPT, Step.DROP)
        if record is None:
            return
        if record.stage is Stage.DECODING and wanted.branch in record.branches - record.dropped:
            self.swaps.begin(wanted, record.id_alone(wanted.branch), now)
        else:
            self.swaps.refuse(wanted)

    def on_preempted(self, preempted: ev.Preempted | ev.Swapped, now: float) -> None:
        """Hold a branch again, ahead of the others. Without KV that the pool keeps, it is prefilled again."""
        record = self._current(preempted, Step.PREEMPT, Step.DROP)
        if record is None or preempted.branch not in record.branches:
            return
        kept = self.swaps.end(preempted, now)
        is_wanted = record.stage is not Stage.CANCELLED and preempted.branch not in record.dropped
        if record.n == 1 and is_wanted:
            self._hold_again(record, preempted, kept, now)
            return
        if is_wanted:
            alone = record.branched(preempted, now)
            alone.kept = kept
            self._add(alone)
            self._emit(fx.Branched(record.request_id, preempted.branch, alone.request_id))
            self._state.hold(alone.as_request(self._block_tokens), front=True)
        elif kept is not None:
            self._directory.revoke_owner(kept.owner, now)
        if len(record.branches) > 1:
            record.branches.remove(preempted.branch)
            self._keep_slots(record)
        else:
            self._finish(record, "cancelled" if record.stage is Stage.CANCELLED else "finished", now)

    def _hold_again(
        self, record: RequestRecord, preempted: ev.Preempted | ev.Swapped, kept: Kept | None, now: float
    ) -> None:
        self._move(record, Step.PREEMPT)
        if kept is None:
            self._directory.revoke_owner(record.request_id, now)
        record.reset()
        record.kept = kept
        record.since_s, record.num_tokens = now, preempted.num_tokens
        record.keys, record.digests = preempted.keys, preempted.digests
        self._state.forget(record.request_id)
        self.no_place = False
        self._state.hold(record.as_request(self._block_tokens), front=True)

    def check(self) -> None:
        """Assert that the books agree about every open request."""
        assert +Counter(self.stages) == Counter(record.stage for record in self._records.values())
        for request_id, record in self._records.items():
            assert record.stage is not Stage.OVER
            assert record.branches, f"{request_id} has no branch left"
            assert request_id in self._state, f"{request_id} is in no queue and on no instance"
            assert not record.loads or record.stage in (Stage.PROMOTING, Stage.CANCELLED)

    def knows(self, owner: str) -> bool:
        """Tell whether this owner in the directory is an open request, or one of its swaps."""
        return owner in self._records or self.swaps.knows(owner)
