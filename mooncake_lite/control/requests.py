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
from mooncake_lite.control.malformed import wrong_answers
from mooncake_lite.control.request import Kept, RequestRecord, Try, client_id_of
from mooncake_lite.control.swaps import Swaps
from scheduler.placement.choose import other_decode

MOST_TRIES = 3
"""A request fails after so many failed tries. Any small number works: two tries may fail for a passing
reason, but one that fails again and again only takes capacity from others."""

PAUSE_S = 0.5
"""Pause before the second try of a request; twice as long before the third. A full queue can empty then."""

MOST_LOSSES, FAILED_RANK = 4, 2
"""A request fails when so many ranks that worked on it were lost and its client has got no token between. A
rank that failed by itself counts twice, a killed one once. Three kills in a row are bad luck; a request that
ends whatever computes it must end before a small cluster does."""

RANKS_LOST = "ranks_lost"
"""The code of such a failure."""

RECALL_S = 5.0
"""A gateway that has not answered a Recall for so long, or not said that it has an answer, is asked again.
Any few seconds work: it answers between two messages."""


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
        self._state, self._directory, self._members = books.state, books.directory, books.members
        self._grants, self._emit = books.grants, books.emit
        self._block_tokens = books.config.block_layout.block_tokens
        self._shares_kv = books.config.handover == "pool"
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
        return record.asked.class_id if record else self._lowest_class

    def add(self, record: RequestRecord) -> None:
        """Add a request, or a branch that goes on alone."""
        self._records[record.request_id] = record
        self._families.setdefault(client_id_of(record.request_id), []).append(record)
        self.stages[record.stage] += 1

    def move(self, record: RequestRecord, step: Step) -> None:
        """Move a request to its next stage, and count it there."""
        self.stages[record.stage] -= 1
        record.move(step)
        if record.stage is not Stage.OVER:
            self.stages[record.stage] += 1

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
        if record is None or record.attempt != event.attempt or record.present.worker != event.rank:
            return None
        return record

    def decodes_elsewhere(self, record: RequestRecord, must: bool = False) -> bool:
        """Choose the decode rank again if a better one, or one at all, has free slots: every rank can read KV
        that is in the pool. Returns whether the request moves. must: its own is lost."""
        found = other_decode(self._state, record.request_id, must=must) if self._shares_kv else None
        if found is None:
            return False
        record.present.decode, tbt_s = found
        self._state.move(record.request_id, record.present.decode)
        self._emit(fx.Moved(record.request_id, record.attempt, record.present.decode, tbt_s))
        return True

    # ------------------------------------------------------------------------------ work, and other tries

    def work(self, record: RequestRecord, rank: int, predicted_s: float, now: float) -> None:
        """Note that a rank gets a request. It is asked about it if that takes much longer than predicted."""
        present = record.present
        self._grants.close(present.grant)
        is_known = self._state.costs.is_measured
        lasts_s = max(WORK_S, WORK_FACTOR * predicted_s) if is_known else UNKNOWN_S
        name = record.request_id, record.attempt
        present.worker = rank
        present.grant = self._grants.open(rank, record, self._lost, now, lasts_s=lasts_s, work=name).number

    def _lost(self, grant: Grant, reason: str, may_still_write: bool, now: float) -> None:
        """Lose the work of a rank, and count it if the rank itself is lost: the request may be why."""
        record: RequestRecord = grant.about
        why = self._members.why_lost(grant.rank)
        if why and record.stage is not Stage.ENDING:
            record.losses += FAILED_RANK if ") failed: " in why else 1
            record.lost_by = why
        self.lose(record, reason, now, may_still_write)

    def lose(self, record: RequestRecord, reason: str, now: float, may_still_write: bool = False) -> None:
        """Take a request away from what it does, because that is lost. It goes on from what its client has.

        may_still_write: late bytes may still land where its rank was to write.

        A request that is CANCELLED takes the step DROP, and ends with the outcome `cancelled_as`. For any
        other request this is a failed try, unless `_is_lost`: a lost rank is no fault of the request. A
        failed try counts in `tries`, and `pause_s` becomes PAUSE_S * `tries`; with the try number MOST_TRIES
        the request fails instead. A request that goes on takes the step LOSE, and everything that it held is
        freed; `_is_lost` reads some of it, so ask before. If its stage is then HELD it waits again at once,
        because no tokens of it are on their way: also after a failed try, and `pause_s` is left as it is.
        Otherwise its gateway is asked what its client has. Every way out passes on `may_still_write`.
        """
        # labs:begin 8c
        if record.stage is Stage.CANCELLED:
            self.move(record, Step.DROP)
            self.end(record, record.cancelled_as, now, may_still_write=may_still_write)
            return
        if not self._is_lost(record):
            record.tries += 1
            record.pause_s = PAUSE_S * record.tries
            if record.tries >= MOST_TRIES:
                self.fail(record, reason, now, may_still_write)
                return
        self.move(record, Step.LOSE)
        self.free(record, now, may_still_write)
        if record.stage is Stage.HELD:
            self.wait_again(record, now)
        else:
            self._recall(record, reason, now)
        # labs:end 8c

    def _is_lost(self, record: RequestRecord) -> bool:
        """Tell whether a rank that a request needs is lost: its own, its next one, or one with its KV."""
        present = record.present
        needed = {present.worker, present.prefill, present.decode} | {ref.rank for ref in present.places}
        return record.stage is Stage.ENDING or not needed.isdisjoint(self._members.lost)

    def is_sound(self, record: RequestRecord) -> bool:
        """Tell whether the place of a request and all that it reads or writes are still there."""
        is_there, places = self._directory.has, record.present.places
        return record.request_id in self._state and all(is_there(ref.object_id) for ref in places)

    def _recall(self, record: RequestRecord, reason: str, now: float) -> None:
        """Ask the gateway of a request what its client has, again and again until it answers."""

        def ask_again(grant: Grant, overdue: str, may_still_write: bool, now: float) -> None:
            self._recall(record, reason, now)

        record.present = Try(grant=self._grants.open(NOBODY, record, ask_again, now, lasts_s=RECALL_S).number)
        branches = sorted(record.branches | record.unheard)
        self._emit(fx.Recall(record.request_id, record.attempt, branches, reason))

    def on_recalled(self, recalled: ev.Recalled, now: float) -> None:
        """Let a request go on from what its client has."""
        record = self._records.get(recalled.request_id)
        if record is None or record.stage is not Stage.RECALLING or record.attempt != recalled.attempt:
            self.ignored += 1
            return
        if problem := wrong_answers(recalled.answers, record.asked.num_tokens, self._block_tokens):
            self.fail(record, f"its gateway sent a malformed Recalled: {problem}", now)
            return
        self._grants.close(record.present.grant)
        record.present = Try()
        record.branches |= record.unheard
        record.unheard, record.received = set(), set()
        self._go_on_from(record, recalled.answers, now)

    def take_over(self, record: RequestRecord, arrived: ev.RequestArrived, now: float) -> None:
        """Let a request of an earlier conductor go on from what its client has."""
        record.stage, record.resumed = Stage.RECALLING, arrived.resumed
        self.add(record)
        self._go_on_from(record, arrived.answers, now)

    def _go_on_from(self, record: RequestRecord, so_far: list[ev.AnswerSoFar], now: float) -> None:
        """Let a recalled request go on. Branches go on alone, unless none has begun."""
        record.branches -= {one.branch for one in so_far if one.whole} | record.dropped
        record.resumed = record.resumed or any(one.num_tokens for one in so_far)
        answers = [one for one in so_far if one.branch in record.branches]
        if record.asked.n == 1 or not any(one.num_tokens for one in answers):
            self._go_on(record, answers, now)
            return
        for one in answers:
            alone = record.branched(one, now)
            alone.tries, alone.pause_s = record.tries, record.pause_s
            alone.losses = 0 if one.num_tokens else record.losses
            self.add(alone)
            self._emit(fx.Branched(record.request_id, one.branch, alone.request_id))
            self._pause(alone, now)
        self.finish(record, now)

    def _go_on(self, record: RequestRecord, answers: list[ev.AnswerSoFar], now: float) -> None:
        """Let a whole request wait for a place again, or end: its client has everything, or too many of its
        ranks were lost and brought the client nothing."""
        if not answers:
            self.finish(record, now)
            return
        self.move(record, Step.RECALLED)
        record.go_on_from(answers[0], now)
        if record.losses >= MOST_LOSSES:
            reason = f"the ranks that computed it were lost one after the other, at last {record.lost_by}"
            self.fail(record, reason, now, code=RANKS_LOST)
            return
        self._pause(record, now)

    def _pause(self, record: RequestRecord, now: float) -> None:
        """Let a request wait for a place; after a failed try, not at once."""
        if not record.pause_s:
            self.wait_again(record, now)
            return
        pause_s, record.pause_s = record.pause_s, 0.0
        record.present = Try(
            grant=self._grants.open(NOBODY, record, self._paused, now, lasts_s=pause_s).number
        )

    def _paused(self, grant: Grant, reason: str, may_still_write: bool, now: float) -> None:
        grant.about.present = Try()
        self.wait_again(grant.about, now)

    def wait_again(self, record: RequestRecord, now: float) -> None:
        """Let a request wait for a place again, ahead of those that have never had one."""
        self._state.wait_in_line(record.as_request(self._state, self._block_tokens), now, front=True)

    def free(
        self, record: RequestRecord, now: float, may_still_write: bool = False, *, kept: Kept | None = None
    ) -> None:
        """End the present try: free its slots, swaps and grant, and unless KV is kept leases and places."""
        name, present = record.request_id, record.present
        self.swaps.forget(name, now, may_still_write=may_still_write)
        if kept is None:
            self._directory.revoke_owner(name, now, writer_may_live=may_still_write, writer=present.worker)
        self._grants.close(present.grant)
        self._state.forget(name, now)
        record.present = Try(kept=kept)

    # ------------------------------------------------------------------------------ the end of a request

    def on_cancelled(self, event: ev.RequestCancelled, now: float) -> None:
        """Drop what a client does not want any more: all branches of its request, or one."""
        for record in list(self._families.get(event.request_id, ())):
            if event.branch in record.branches:
                record.dropped.add(event.branch)
            record.unheard.discard(event.branch)
            if self._finish_if_heard(record, now):
                continue
            if event.branch < 0 or (record.branches <= record.dropped and not record.unheard):
                record.cancelled_as = "finished" if event.answered else "cancelled"
                self._cancel(record, now)
            elif event.branch in record.branches and record.present.worker == record.present.decode >= 0:
                self.cancel_on(record, event.branch)

    def _cancel(self, record: RequestRecord, now: float) -> None:
        """Drop a waiting request at once. If a rank or a tier works on it, wait until that has dropped it."""
        if not record.may(Step.CANCEL):
            return
        self.move(record, Step.CANCEL)
        if record.stage is Stage.OVER:
            self.end(record, record.cancelled_as, now)
        elif record.present.worker >= 0:
            self.cancel_on(record)

    def cancel_on(self, record: RequestRecord, branch: int = -1) -> None:
        """Have the rank that works on a request drop it, or one branch."""
        self._emit(fx.CancelOn(record.present.worker, record.request_id, record.attempt, branch))

    def answered(self, record: RequestRecord, branch: int) -> None:
        """Note that the rank of a branch has sent its last token."""
        record.branches.discard(branch)
        if branch not in record.received | record.dropped:
            record.unheard.add(branch)

    def end_answered(self, record: RequestRecord, now: float) -> None:
        """End a request without branches, once its gateway has every token. Its slots are free at once."""
        if not record.unheard or record.stage is Stage.CANCELLED:
            self.finish(record, now)
            return
        self.move(record, Step.ANSWERED)
        worker = record.present.worker  # when it is lost now, tokens may be lost with it
        self.free(record, now)
        grant = self._grants.open(worker, record, self._lost, now, lasts_s=RECALL_S)
        record.present = Try(worker=worker, grant=grant.number)

    def on_received(self, received: ev.AnswerReceived, now: float) -> None:
        """Note that a gateway has a whole answer. The last one ends the request."""
        for record in list(self._families.get(received.request_id, ())):
            if received.branch in record.branches:
                record.received.add(received.branch)
            record.unheard.discard(received.branch)
            self._finish_if_heard(record, now)

    def _finish_if_heard(self, record: RequestRecord, now: float) -> bool:
        """End a request if no rank works on it, and its gateway has every answer that is wanted."""
        is_over = record.stage in (Stage.ENDING, Stage.RECALLING) and not record.branches | record.unheard
        if is_over:
            self.finish(record, now)
        return is_over

    def finish(self, record: RequestRecord, now: float) -> None:
        """End a request that is answered, or whose rank has dropped it."""
        outcome = record.cancelled_as if record.stage is Stage.CANCELLED else "finished"
        self.move(record, Step.DROP if record.may(Step.DROP) else Step.FINISH)
        self.end(record, outcome, now)

    def on_gateway_lost(self, gateway: str, now: float) -> None:
        """Cancel the requests whose clients were connected to a gateway."""
        for client_id, family in list(self._families.items()):
            if family[0].asked.gateway == gateway:
                self.on_cancelled(ev.RequestCancelled(client_id), now)

    def fail(
        self, record: RequestRecord, reason: str, now: float, may_still_write: bool = False, code: str = ""
    ) -> None:
        """Fail a request with all its branches, and tell its client unless the client has left."""
        gone = record.stage is Stage.CANCELLED
        self.move(record, Step.FAIL)
        if not gone:
            self._emit(fx.Fail(record.request_id, reason, code))
        self.end(record, record.cancelled_as if gone else "failed", now, may_still_write=may_still_write)
        if not gone:
            self.on_cancelled(ev.RequestCancelled(client_id_of(record.request_id)), now)

    def end(self, record: RequestRecord, outcome: str, now: float, *, may_still_write: bool = False) -> None:
        """Remove a request: free its private objects, leases and slots, and emit Forget."""
        del self._records[record.request_id]
        family = self._families[client_id := client_id_of(record.request_id)]
        family.remove(record)
        if not family:
            del self._families[client_id]
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
            assert record.branches or record.unheard, f"{request_id} has no branch left"
            waits = request_id in self._state or record.present.grant or record.present.loads
            assert waits, f"{request_id} is in no queue, on no instance, and does not pause"
            assert not record.present.loads or record.stage in (Stage.PROMOTING, Stage.CANCELLED)

    def waiting(self) -> list[RequestRecord]:
        """Return the requests that wait for a place or for their turn."""
        stages = Stage.HELD, Stage.QUEUED
        return [one for one in self._records.values() if one.stage in stages and not one.present.grant]

    def knows(self, owner: str) -> bool:
        """Tell whether this owner in the directory is an open request, or one of its swaps."""
        return owner in self._records or owner in self.swaps.owners()
