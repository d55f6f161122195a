"""Measurements: pass the times that ranks report to the costs.

Used by `reports.py`. The costs correct their predictions by it; see docs/explain/costs.md.
"""

from __future__ import annotations

from mooncake_lite.control.effects import BlockRef
from mooncake_lite.control.events import DecodeEnded, DecodeLoaded, PrefillEnded, PromptComputed
from mooncake_lite.control.members import Members
from mooncake_lite.control.request import RequestRecord
from scheduler import State


class Measurements:
    """Turns reports into measurements. An instance has the number of its first rank, which reports."""

    def __init__(self, state: State, members: Members) -> None:
        self.state, self._costs, self._members = state, state.costs, members

    def prefilled(self, record: RequestRecord, ended: PrefillEnded | PromptComputed, now: float) -> None:
        """Add the times of a prompt: of its computing, of the loads before, of messages, and of its slot.

        If its rank has computed other prompts meanwhile, the time of messages is unknown and left out.
        """
        self.slot(record, ended, now)
        size = record.num_tokens, record.num_tokens - ended.computed_tokens
        if self.state.prefills[ended.rank].running.keys() <= {record.request_id}:
            store_s = ended.store_s if isinstance(ended, PrefillEnded) else 0.0
            reported_s = ended.load_s + ended.compute_s + store_s
            self._costs.measured_messages(now - record.present.ordered_s - reported_s)
        self._costs.measured_prefill(ended.rank, *size, ended.compute_s)
        self._fetched(ended, record.present.load)
        for rank, seconds, nbytes, _ in record.present.promoted:
            self._costs.measured_load(rank, "ssd", nbytes, seconds)

    def slot(self, record: RequestRecord, computed: PrefillEnded | PromptComputed, now: float) -> None:
        """Add how long a prompt has had its slot, if it still has it and no other prompt runs there."""
        if self.state.prefills[computed.rank].running.keys() == {record.request_id}:
            size = record.num_tokens, record.num_tokens - computed.computed_tokens
            self._costs.measured_slot(*size, computed.compute_s, now - record.present.started_s)

    def loaded(self, record: RequestRecord, loaded: DecodeLoaded) -> None:
        """Add the time that a rank took to read the KV that it decodes on."""
        self._fetched(loaded, record.present.places)

    def _fetched(self, event: PrefillEnded | PromptComputed | DecodeLoaded, refs: list[BlockRef]) -> None:
        """Add the time of a read of the last `loaded_blocks` of these blocks."""
        near, far, rack = self._members.nbytes_from(refs[len(refs) - event.loaded_blocks :], event.rank)
        self._costs.measured_fetch(event.rank, near, far, event.load_s, rack)

    def decoded(self, record: RequestRecord, ended: DecodeEnded) -> None:
        """Add the decode steps of a rank, and the length of a finished answer."""
        self._costs.measured_steps(
            ended.rank, ended.steps, ended.sequences, ended.context_tokens, ended.steps_s
        )
        if ended.answer_tokens:
            self._costs.lengths.answered(record.asked.class_id, record.asked.num_tokens, ended.answer_tokens)
            self.state.decode_load.answered(ended.answer_tokens)
