"""Keeps the open requests, and moves each through the stages of `life.py` until it ends.

Used by `dispatch.py` and `reports.py`, which decide what comes next. See docs/explain/control.md.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.books import Books
from mooncake_lite.control.grants import NOBODY, UNKNOWN_S, WORK_FACTOR, WORK_S, Grant
from mooncake_lite.control.life import OPEN_STAGES, Stage, Step
from mooncake_lite.control.request import RequestRecord
from mooncake_lite.control.swaps import Swaps

MOST_TRIES = 3
"""A request fails after so many failed tries. Any small number works: two tries may fail for a passing
reason, but one that fails again and again only takes capacity from others."""

PAUSE_S = 0.5
"""Pause before the second try of a request; twice as long before the third. A full queue can empty then."""


class Requests:
    """The open requests.

    ignored    answers that changed nothing: of another attempt, or impossible in their stage
    stages     number of open requests in each stage
    swaps      KV of preempted sequences on its way into the pool
    """

    def __init__(self, books: Books) -> None:
        self.ignored = 0
        self.stages = dict.fromkeys(OPEN_STAGES, 0)
        self.swaps = Swaps(books)
        self._state, self._directory = books.state, books.directory
        self._grants, self._emit = books.grants, books.emit
        self._block_tokens = books.config.block_layout.block_tokens
        self._lowest_class = len(books.config.classes) - 1
        self._records: dict[str, RequestRecord] = {}
        self._families: dict[str, list[RequestRecord]] = {}  # client's id -> its record, and branched ones

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._records)

    def __getitem__(self, request_id: str) -> RequestRecord:
        """Return the record of an open request."""
        return self._records[request_id]

    def __contains__(self, request_id: str) -> bool:
        """Tell whether a request is open."""
        return request_id in self._records

    def stage_of(self, request_id: str) -> Stage:
        """Return the stage of a request; OVER for an unknown one."""
        record = self._records.get(request_id)
        return record.stage if record else Stage.OVER

    def class_of(self, request_id: str) -> int:
        """Return the service class of a request; the lowest one for a request that has ended."""
        record = self._records.get(request_id)
        return record.class_id if record else self._lowest_class

    def add(self, record: RequestRecord) -> None:
        """Add a request, or a branch that goes on alone."""
        self._records[record.request_id] = record
        self._families.setdefault(record.client_id, []).append(record)
        self.stages[record.stage] += 1

    def move(self, record: RequestRecord, step: Step) -> None:
        """Move a request to its next stage, and count it there."""
        self.stages[record.stage] -= 1
        record.move(step)
        if record.stage is not Stage.OVER:
            self.stages[record.stage] += 1

    def keep_slots(self, record: RequestRecord) -> None:
        """Free the decode slots of branches that have ended."""
        self._state.keep_slots(record.request_id, len(record.branches))

    def current(self, event: Any, *steps: Step) -> RequestRecord | None:
        """Return the request that an answer is about. None: wrong attempt, or impossible in its stage."""
        record = self.working(event)
        if record is not None and any(map(record.may, steps)):
            return record
        self.ignored += 1
        return None

    def working(self, event: Any) -> RequestRecord | None:
        """Return the request that an answer is about, if its rank works on this attempt."""
        record = self._records.get(event.request_id)
        is_of_attempt = record is not None and (record.attempt, record.worker) == (event.attempt, event.rank)
        return record if is_of_attempt else None

    # ------------------------------------------------------------------------------ work, and other tries

    def work(self, record: RequestRecord, rank: int, predicted_s: float, now: float) -> None:
        """Note that a rank gets a request. It is asked about it if that takes much longer than predicted."""
        self._grants.close(record.grant)
        is_known = self._state.costs.is_measured
        lasts_s = max(WORK_S, WORK_FACTOR * predicted_s) if is_known else UNKNOWN_S
        name = record.request_id, record.attempt
        record.worker = rank
        record.grant = self._grants.open(rank, record, self._lost, now, lasts_s=lasts_s, work=name).number

    def _lost(self, grant: Grant, reason: str, may_still_write: bool, now: float) -> None:
        self.try_again(grant.about, reason, now, may_still_write)

    def try_again(
        self, record: RequestRecord, reason: str, now: float, may_still_write: bool = False
    ) -> None:
        """Let a request begin anew whose rank has dropped it, after a pause. After MOST_TRIES it fails."""
        record.tries += 1
        if record.stage is Stage.CANCELLED:
            self.move(record, Step.DROP)
            self.end(record, "cancelled", now, may_still_write=may_still_write)
        elif record.tries >= MOST_TRIES:
            self.fail(record, reason, now, may_still_write)
        else:
            self.move(record, Step.RETRY)
            self.free(record, now, may_still_write)
            self._emit(fx.Retried(record.request_id, record.attempt, reason))
            pause_s = PAUSE_S * record.tries
            record.grant = self._grants.open(NOBODY, record, self._paused, now, lasts_s=pause_s).number

    def _paused(self, grant: Grant, reason: str, may_still_write: bool, now: float) -> None:
        self.wait_again(grant.about, now)

    def wait_again(self, record: RequestRecord, now: float) -> None:
        """Let a request wait for a place again, ahead of those that have never had one."""
        record.grant = 0
        self._state.wait_in_line(record.as_request(self._state, self._block_tokens), now, front=True)

    def free(
        self, record: RequestRecord, now: float, may_still_write: bool = False, *, keeps_kv: bool = False
    ) -> None:
        """Free what a request has: slots, swaps, its grant, and unless it keeps its KV leases and places."""
        self.swaps.forget(record.request_id, now, may_still_write=may_still_write)
        if not keeps_kv:
            self._directory.revoke_owner(
                record.request_id, now, writer_may_live=may_still_write, writer=record.worker
            )
        self._grants.close(record.grant)
        self._state.forget(record.request_id, now)
        record.reset()

    # ------------------------------------------------------------------------------ the end of a request

    def on_cancelled(self, event: ev.RequestCancelled, now: float) -> None:
        """Drop what a client does not want any more: all branches of its request, or one."""
        for record in list(self._families.get(event.request_id, ())):
            if event.branch in record.branches:
                record.dropped.add(event.branch)
            if event.branch < 0 or record.branches <= record.dropped:
                record.cancelled_as = "finished" if event.answered else "cancelled"
                self._cancel(record, now)
            elif event.branch in record.branches and record.worker == record.decode >= 0:
                self._emit(fx.CancelOn(record.worker, record.request_id, record.attempt, event.branch))

    def _cancel(self, record: RequestRecord, now: float) -> None:
        """Drop a waiting request at once. If a rank or a tier works on it, wait until that has dropped it."""
        if not record.may(Step.CANCEL):
            return
        self.move(record, Step.CANCEL)
        if record.stage is Stage.OVER:
            self.end(record, record.cancelled_as, now)
        elif record.worker >= 0:
            self._emit(fx.CancelOn(record.worker, record.request_id, record.attempt))

    def on_undelivered(self, order: fx.StartOrder, reason: str, now: float) -> None:
        """Let a request begin anew whose order was not sent."""
        record = self.working(order)
        if record is not None:
            self.try_again(record, reason, now)

    def fail(self, record: RequestRecord, reason: str, now: float, may_still_write: bool = False) -> None:
        """Fail a request with all its branches, and tell its client unless the client has left."""
        gone = record.stage is Stage.CANCELLED
        self.move(record, Step.FAIL)
        if not gone:
            self._emit(fx.Fail(record.request_id, reason))
        self.end(record, record.cancelled_as if gone else "failed", now, may_still_write=may_still_write)
        if not gone:
            self.on_cancelled(ev.RequestCancelled(record.client_id), now)

    def end(self, record: RequestRecord, outcome: str, now: float, *, may_still_write: bool = False) -> None:
        """Remove a request: free its private objects, leases and slots, and emit Forget."""
        del self._records[record.request_id]
        self._families[record.client_id].remove(record)
        if not self._families[record.client_id]:
            del self._families[record.client_id]
        self.free(record, now, may_still_write)
        self._emit(fx.Forget(record.request_id, outcome))

    def fail_all(self, reason: str) -> None:
        """Fail every open request, once."""
        for request_id in self._records:
            self._emit(fx.Fail(request_id, reason))
            self._emit(fx.Forget(request_id, "failed"))
        self._records.clear()
        self._families.clear()
        self.stages = dict.fromkeys(OPEN_STAGES, 0)

    def check(self) -> None:
        """Assert that the books agree about every open request."""
        assert +Counter(self.stages) == Counter(record.stage for record in self._records.values())
        for request_id, record in self._records.items():
            assert record.stage is not Stage.OVER
            assert record.branches, f"{request_id} has no branch left"
            waits = request_id in self._state or record.grant
            assert waits, f"{request_id} is in no queue, on no instance, and does not pause"
            assert not record.loads or record.stage in (Stage.PROMOTING, Stage.CANCELLED)

    def knows(self, owner: str) -> bool:
        """Tell whether this owner in the directory is an open request, or one of its swaps."""
        return owner in self._records or owner in self.swaps.owners()
