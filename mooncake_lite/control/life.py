"""The life of a request: its stages, and the steps between them.

Used by `machine.py`. The picture in docs/explain/control.md is drawn from TRANSITIONS.
"""

from __future__ import annotations

from enum import Enum


class Stage(Enum):
    """The stage of a request that was not refused on arrival.

    HELD        no decode instance has a free slot
    QUEUED      the request has a place, and waits for its prefill instance or for space in the pool
    PROMOTING   blocks of its prefix are being read from SSD, or copied into its rack
    PREFILLING  a rank computes its prompt
    LOADING     its decode rank loads its KV
    DECODING    its decode rank writes the answer
    ENDING      the last token was sent, and its gateway has not said that it has it
    RECALLING   what it was doing is lost, and its gateway was asked for the answer so far
    CANCELLED   its client has left, and a rank or a tier has not dropped it yet
    OVER        the request has ended
    """

    __hash__ = object.__hash__  # Enum's own is a Python function, and every event looks stages up

    HELD = "held"
    QUEUED = "queued"
    PROMOTING = "promoting"
    PREFILLING = "prefilling"
    LOADING = "loading"
    DECODING = "decoding"
    ENDING = "ending"
    RECALLING = "recalling"
    CANCELLED = "cancelled"
    OVER = "over"


OPEN_STAGES: tuple[Stage, ...] = tuple(stage for stage in Stage if stage is not Stage.OVER)


class Step(Enum):
    """An event in the life of a request."""

    __hash__ = object.__hash__

    PLACE = "a policy has placed it"
    REFUSE = "it could never fit into the pool, or would decode too slowly (admission after-prefill)"
    PROMOTE = "part of its prefix is on SSD only"
    RESTART = "a block did not come from SSD"
    PREFILL = "its prefix is in DRAM"
    PREFILLED = "its KV is where its decode rank can load it"
    COMPUTED = "its prompt is computed on the rank that decodes it too"
    LOADED = "its KV is in the decode rank's pages"
    PREEMPT = "its rank has no free page"
    LOSE = "its rank, its place or its KV is lost"
    RECALLED = "its gateway has said what the client has"
    RESUME = "a policy has placed it, and the pool has all of its KV"
    ANSWERED = "its last token was sent"
    FINISH = "its gateway has its last token"
    FAIL = "it cannot be finished"
    CANCEL = "its client has left"
    DROP = "the rank or the tier has dropped it"


TRANSITIONS: dict[tuple[Stage, Step], Stage] = {
    (Stage.HELD, Step.PLACE): Stage.QUEUED,
    (Stage.HELD, Step.RESUME): Stage.LOADING,
    (Stage.HELD, Step.REFUSE): Stage.OVER,
    (Stage.HELD, Step.FAIL): Stage.OVER,
    (Stage.HELD, Step.CANCEL): Stage.OVER,
    (Stage.QUEUED, Step.PROMOTE): Stage.PROMOTING,
    (Stage.QUEUED, Step.PREFILL): Stage.PREFILLING,
    (Stage.QUEUED, Step.LOSE): Stage.HELD,
    (Stage.QUEUED, Step.REFUSE): Stage.OVER,
    (Stage.QUEUED, Step.FAIL): Stage.OVER,
    (Stage.QUEUED, Step.CANCEL): Stage.OVER,
    (Stage.PROMOTING, Step.PREFILL): Stage.PREFILLING,
    (Stage.PROMOTING, Step.RESTART): Stage.QUEUED,
    (Stage.PROMOTING, Step.LOSE): Stage.HELD,
    (Stage.PROMOTING, Step.FAIL): Stage.OVER,
    (Stage.PROMOTING, Step.CANCEL): Stage.CANCELLED,
    (Stage.PREFILLING, Step.PREFILLED): Stage.LOADING,
    (Stage.PREFILLING, Step.COMPUTED): Stage.DECODING,
    (Stage.PREFILLING, Step.PREEMPT): Stage.HELD,
    (Stage.PREFILLING, Step.LOSE): Stage.RECALLING,
    (Stage.PREFILLING, Step.REFUSE): Stage.OVER,
    (Stage.PREFILLING, Step.ANSWERED): Stage.ENDING,
    (Stage.PREFILLING, Step.FINISH): Stage.OVER,
    (Stage.PREFILLING, Step.FAIL): Stage.OVER,
    (Stage.PREFILLING, Step.CANCEL): Stage.CANCELLED,
    (Stage.LOADING, Step.LOADED): Stage.DECODING,
    (Stage.LOADING, Step.PREEMPT): Stage.HELD,
    (Stage.LOADING, Step.LOSE): Stage.RECALLING,
    (Stage.LOADING, Step.ANSWERED): Stage.ENDING,
    (Stage.LOADING, Step.FINISH): Stage.OVER,
    (Stage.LOADING, Step.FAIL): Stage.OVER,
    (Stage.LOADING, Step.CANCEL): Stage.CANCELLED,
    (Stage.DECODING, Step.PREEMPT): Stage.HELD,
    (Stage.DECODING, Step.LOSE): Stage.RECALLING,
    (Stage.DECODING, Step.ANSWERED): Stage.ENDING,
    (Stage.DECODING, Step.FINISH): Stage.OVER,
    (Stage.DECODING, Step.FAIL): Stage.OVER,
    (Stage.DECODING, Step.CANCEL): Stage.CANCELLED,
    (Stage.ENDING, Step.LOSE): Stage.RECALLING,
    (Stage.ENDING, Step.FINISH): Stage.OVER,
    (Stage.ENDING, Step.FAIL): Stage.OVER,
    (Stage.ENDING, Step.CANCEL): Stage.OVER,
    (Stage.RECALLING, Step.RECALLED): Stage.HELD,
    (Stage.RECALLING, Step.FINISH): Stage.OVER,
    (Stage.RECALLING, Step.FAIL): Stage.OVER,
    (Stage.RECALLING, Step.CANCEL): Stage.OVER,
    (Stage.CANCELLED, Step.DROP): Stage.OVER,
    (Stage.CANCELLED, Step.FAIL): Stage.OVER,
}
"""A pair that is not in the table cannot happen. An event that asks for it changes nothing and is counted."""
