"""Takes a lost rank out of all books, and lets what relied on it go on elsewhere.

Used by `machine.py`, once the cluster is ready. See docs/explain/failures.md.
"""

from __future__ import annotations

from mooncake_lite.control import effects as fx
from mooncake_lite.control.books import Books
from mooncake_lite.control.dispatch import Dispatcher
from mooncake_lite.control.life import Stage
from mooncake_lite.control.request import RequestRecord
from mooncake_lite.control.requests import Requests


class Losses:
    """Applies the loss of a rank: grants first, then the pool, then requests with a place on it.

    _stopped   requests whose prefill was stopped because of this loss
    """

    def __init__(self, books: Books, requests: Requests, dispatcher: Dispatcher) -> None:
        self._state, self._directory, self._members = books.state, books.directory, books.members
        self._grants, self._emit, self._saves = books.grants, books.emit, books.config.saves
        self._requests, self._dispatcher = requests, dispatcher
        self._stopped: set[str] = set()

    def apply(self, rank: int, reason: str, ended: bool, now: float) -> None:
        """Remove a rank. ended: its process was seen to end, so that it writes nothing more.

        Ranks are told first: what they try next with the lost rank then fails at once.
        """
        if not (ended or self._members.has(rank)):
            self._dispatcher.room.verifies = True  # it may write places that an earlier conductor gave it
        self._members.lose(rank, reason)
        self._emit(fx.MarkLost(rank, reason))
        self._stopped.clear()
        self._grants.rank_lost(rank, not ended, now)
        if self._directory.has_segment(rank):
            self._lose_blocks(self._directory.remove_segment(rank), rank)
        self._assign_savers()
        if ended:
            self._directory.settle_writer(rank)
        else:
            self._directory.hold_writer(rank)
        for request_id in self._state.on_instance(rank):
            self._lose_place(self._requests[request_id], rank, now)
        self._state.remove_instance(rank)
        self._dispatcher.note_loss(now)

    def _lose_blocks(self, owners: list[str], rank: int) -> None:
        """Let requests begin anew whose KV was to be written to a lost rank.

        A rank that only reads there reports by itself whether it could. KV that is kept waits for no slot but
        the one that it has just left, unless nothing can be served any more.
        """
        for owner in owners:
            if owner not in self._requests:
                continue
            record = self._requests[owner]
            if record.stage is Stage.PREFILLING and any(ref.rank == rank for ref in record.present.written):
                self._stop(record)

    def _assign_savers(self) -> None:
        """Have other store ranks save the blocks that a lost one would have saved."""
        for other in self._members.computes if self._saves else ():
            if self._directory.has_segment(other):
                keeper = self._members.keeper_of(other) if self._members.stores else None
                self._directory.set_saver(other, keeper)

    def _lose_place(self, record: RequestRecord, rank: int, now: float) -> None:
        """Take a request off a lost instance. Work on another rank for it ends first, unless it can go on."""
        if record.stage is Stage.QUEUED:
            self._requests.lose(record, f"rank {rank} is lost", now)
        elif record.stage is not Stage.PREFILLING or not self._requests.decodes_elsewhere(record, must=True):
            self._state.forget(record.request_id, now)
            if record.stage is Stage.PREFILLING:
                self._stop(record)

    def _stop(self, record: RequestRecord) -> None:
        """Tell a rank once to drop a prefill that has become useless. Its report starts the request anew."""
        if record.request_id not in self._stopped:
            self._stopped.add(record.request_id)
            self._requests.cancel_on(record)
