"""Applies what compute ranks report about requests: prompts computed, KV loaded, branches ended or preempted.

Used by `machine.py`. The open requests are in `requests.py`. See docs/explain/control.md.
"""

from __future__ import annotations

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.books import Books
from mooncake_lite.control.dispatch import Dispatcher
from mooncake_lite.control.life import Stage, Step
from mooncake_lite.control.measured import Measurements
from mooncake_lite.control.pool import Pool
from mooncake_lite.control.request import RequestRecord
from mooncake_lite.control.requests import Requests


class Reports:
    """The reports of compute ranks. One of another attempt, or impossible in its stage, changes nothing."""

    def __init__(self, books: Books, pool: Pool, requests: Requests, dispatcher: Dispatcher) -> None:
        self._state, self._directory, self._pool, self._emit = books.state, books.directory, pool, books.emit
        self._requests, self._dispatcher, self._swaps = requests, dispatcher, requests.swaps
        self._measured = Measurements(books.state, books.members)
        self._admission, self._handover = dispatcher.admission, books.config.handover
        self._tried = books.grants.tried

    def on_chunk_stored(self, stored: ev.ChunkStored, now: float) -> None:
        """Publish blocks of a prompt that is still computed, and let its decode rank load them."""
        record = self._requests.current(stored, Step.PREFILLED, Step.DROP)
        if record is None:
            return
        refs = record.present.store[stored.first : stored.first + len(stored.checksums)]
        self._pool.publish([ref.object_id for ref in refs], stored.checksums, now)
        if record.stage is Stage.PREFILLING:
            self._dispatcher.prefetch(record, now)

    def on_prefill_ended(self, ended: ev.PrefillEnded, now: float) -> None:
        """Publish the KV of a prompt, and start its decode or refuse it."""
        record = self._requests.current(ended, Step.PREFILLED, Step.DROP)
        if record is None:
            return
        self._prefilled(record, ended, now)
        store, tail = record.present.store, record.present.tail
        self._pool.publish([ref.object_id for ref in store], ended.checksums, now)
        if tail is not None:
            self._directory.note_sums(tail.object_id, ended.tail_checksums)
        if record.stage is Stage.CANCELLED:
            self._requests.finish(record, now)
            return
        left = record.branches - {*ended.finished} - record.dropped
        if left and not self._requests.is_sound(record):
            # The gateway is asked about ended branches too: its client may have tokens of these alone.
            self._requests.lose(record, "its KV, or the rank that would decode it, is lost", now)
            return
        for branch in record.branches & {*ended.finished}:
            self._requests.answered(record, branch)
        record.branches = left
        if not left:
            self._release(record)
            self._requests.end_answered(record, now)
        else:
            self._state.end_prefill(record.request_id, now)
            self._state.keep_slots(record.request_id, len(record.branches), now)
            self._decode(record, now)

    def _prefilled(
        self, record: RequestRecord, ended: ev.PrefillEnded | ev.PromptComputed, now: float
    ) -> None:
        """Add the times of a prompt, and count it. The load of a prefix has failed if all was computed."""
        self._measured.prefilled(record, ended, now)
        self._tried.count("prefills", 1, 0)
        all_computed = ended.computed_tokens >= record.num_tokens
        to_load, why = record.present.to_load, f"rank {ended.rank} has computed all of a prompt instead"
        self._tried.count("prefix_loads", to_load, to_load * all_computed, why)

    def _decode(self, record: RequestRecord, now: float) -> None:
        """Start the decode of a request, on a better rank if there is one, or refuse it (`withholds`).

        A request whose client has tokens already is never refused.
        """
        self._requests.decodes_elsewhere(record)
        request = self._state.request_of(record.request_id)
        refused = None if record.resumed else self._admission.on_decode(self._state, request, now)
        if refused is not None:
            self._dispatcher.refuse(record, refused.reason, refused.retry_after_s, now)
            return
        self._release(record)
        self._requests.move(record, Step.PREFILLED)
        self._dispatcher.start_decode(record, now)

    def _release(self, record: RequestRecord) -> None:
        if self._admission.withholds and not record.resumed:
            self._emit(fx.Release(record.request_id))
        record.resumed = True

    def on_failed(self, failed: ev.RequestFailed, now: float) -> None:
        """Try a request again that a rank gave up. End it if it was cancelled, or no other try can help."""
        record = self._requests.current(failed, Step.FAIL)
        if record is None:
            return
        if record.stage is not Stage.CANCELLED:  # its rank has dropped it, and nothing has failed
            name = "prefills" if record.stage is Stage.PREFILLING else "decodes"
            self._tried.count(name, 1, 1, failed.reason)
        if failed.for_good:
            self._requests.fail(record, failed.reason, now, failed.may_still_write, failed.code)
        else:
            self._requests.lose(record, failed.reason, now, failed.may_still_write)

    def on_decode_loaded(self, loaded: ev.DecodeLoaded, now: float) -> None:
        """Free the tail and the leases: the decode rank has all KV in its pages."""
        record = self._requests.current(loaded, Step.LOADED, Step.DROP)
        if record is None:
            return
        self._measured.loaded(record, loaded)
        self._directory.revoke_owner(record.request_id, now)
        if record.may(Step.LOADED):
            self._requests.move(record, Step.LOADED)

    def on_prompt_computed(self, computed: ev.PromptComputed, now: float) -> None:
        """Free the prefill slot; of a rank that decodes on, the leases too: it has all KV in its pages."""
        record = self._requests.current(computed, Step.COMPUTED, Step.DROP)
        if record is None:
            return
        if self._handover != "none":
            self._measured.slot(record, computed, now)
            self._state.end_prefill(record.request_id, now)
            return
        self._prefilled(record, computed, now)
        self._directory.revoke_owner(record.request_id, now)
        if record.may(Step.COMPUTED):
            self._requests.move(record, Step.COMPUTED)
            record.resumed = True
            self._state.end_prefill(record.request_id, now)

    def on_decode_ended(self, ended: ev.DecodeEnded, now: float) -> None:
        """End a branch whose last token was sent, or that was dropped. The last branch ends the request."""
        record = self._requests.working(ended)
        if record is None or not self._may_end(record, ended.branch):
            self._requests.ignored += 1
            return
        self._measured.decoded(record, ended)
        is_dropped = record.stage is Stage.CANCELLED or ended.branch in record.dropped
        self._tried.count("decodes", ended.answer_tokens > 0 or not is_dropped, 0)
        record.resumed = record.resumed or ended.answer_tokens > 0
        if len(record.branches) > 1:
            self._swaps.end(ended, now)
            self._requests.answered(record, ended.branch)
            self._state.keep_slots(record.request_id, len(record.branches), now)
        elif record.stage is Stage.CANCELLED:
            self._requests.finish(record, now)
        else:
            self._requests.answered(record, ended.branch)
            self._requests.end_answered(record, now)

    @staticmethod
    def _may_end(record: RequestRecord, branch: int) -> bool:
        """Tell whether a branch of a request can have ended: a rank decodes it, and it has not ended yet."""
        if record.present.worker != record.present.decode or branch not in record.branches:
            return False
        return len(record.branches) > 1 or record.may(Step.ANSWERED) or record.may(Step.DROP)

    def on_swap_wanted(self, wanted: ev.SwapWanted, now: float) -> None:
        """Find space for the KV of a branch that its rank preempts, unless it was cancelled."""
        record = self._requests.current(wanted, Step.PREEMPT, Step.DROP)
        if record is None:
            return
        if record.stage is Stage.DECODING and wanted.branch in record.branches - record.dropped:
            self._swaps.begin(wanted, record.id_alone(wanted.branch), record.asked.class_id, now)
        else:
            self._swaps.grant(wanted, None)

    def on_preempted(self, preempted: ev.Preempted | ev.Swapped, now: float) -> None:
        """Hold a branch again, ahead of the others. Without KV that the pool keeps, it is prefilled again."""
        record = self._requests.current(preempted, Step.PREEMPT, Step.DROP)
        if record is None or preempted.branch not in record.branches:
            self._requests.ignored += record is not None
            return
        record.resumed = True  # it ran, so its client has a token
        kept = self._swaps.end(preempted, now)
        is_wanted = record.stage is not Stage.CANCELLED and preempted.branch not in record.dropped
        if record.asked.n == 1 and is_wanted:
            self._requests.move(record, Step.PREEMPT)
            self._requests.free(record, now, kept=kept)
            record.go_on_from(preempted, now)
            self._requests.wait_again(record, now)
            return
        if is_wanted:
            alone = record.branched(preempted, now, kept)
            self._requests.add(alone)
            self._emit(fx.Branched(record.request_id, preempted.branch, alone.request_id))
            self._requests.wait_again(alone, now)
        elif kept is not None:
            self._directory.revoke_owner(kept.owner, now)
        record.branches.remove(preempted.branch)
        if record.branches:
            self._state.keep_slots(record.request_id, len(record.branches), now)
        else:
            self._requests.end_answered(record, now)
