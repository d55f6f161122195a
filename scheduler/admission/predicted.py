"""Predictions for a new request: its times to first token and between tokens. Functions of the books.

Used by the forms of admission. Times are 0 while the costs are a guess: a guess refuses no request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.requests import Placement, Request

if TYPE_CHECKING:
    from scheduler.state import State


def ttft_s(state: State, request: Request, placement: Placement | None, now: float) -> float:
    """Predict the time to the first token.

    Without a place, the request waits for a decode slot. Until it has one, those before it are prefilled.
    """
    if not state.costs.is_measured:
        return 0.0
    if placement is not None:
        return placement.terms.ttft_s
    cached = request.cached_tokens(state.index.leading(request.keys).blocks)
    prefill_s = state.costs.held_s(float(state.costs.config.prefill.seconds(request.num_tokens, cached)))
    return begins_s(state, request, now) + prefill_s


def begins_s(state: State, request: Request, now: float) -> float:
    """Predict the time until all that waits now has begun, and the slots are free that the request needs."""
    return max(_slots_s(state, request), predicted_wait_s(state, now))


def predicted_wait_s(state: State, now: float) -> float:
    """Predict the time until the prefill of a new request could begin.

    The prefill instances share the held line. The request then waits for the instance that is free first. The
    time until a decode slot is free is not predicted.
    """
    if not state.prefills:
        return 0.0
    held_s = state.costs.held_s(state.held.prefill_s) / len(state.prefills)
    return float(state.queue_s(now).min()) + held_s


def _slots_s(state: State, request: Request) -> float:
    """Predict the time until the slots are free that those held and this request need."""
    if state.decode_load.answer_tokens is None or not state.costs.is_step_measured:
        return 0.0
    decode_s = state.decode_load.answer_tokens * mean_tbt_s(state, request, state.num_taken - request.n)
    return decode_s * (state.held.sequences + request.n) / max(1, state.num_taken)


def tbt_now_s(state: State, request: Request, decode: int) -> float:
    """Predict the time between tokens on a decode instance, with what decodes there now and this request."""
    if not state.costs.is_step_measured:
        return 0.0
    batch, context = state.decoding(decode)
    return float(state.costs.tbt_s(decode, batch, context, request.context, request.n))


def tbt_step_s(state: State, decode: int) -> float:
    """Predict the time between tokens on a decode instance with what decodes there now."""
    if not state.costs.is_step_measured:
        return 0.0
    return float(state.costs.step_s(decode, *state.decoding(decode)))


def mean_tbt_s(state: State, request: Request, others: int) -> float:
    """Predict the mean time between tokens of the decode instances, with this request and so many sequences.

    The costs are linear, so the mean is the time of an instance with the mean load.
    """
    alone_s, other_s = mean_tbt_terms(state, request)
    return alone_s + other_s * others


def mean_tbt_terms(state: State, request: Request) -> tuple[float, float]:
    """Predict the mean time between tokens with this request alone, and what each other sequence adds.

    Both are 0 after the loss of all decode instances.
    """
    if not state.costs.is_step_measured or not state.decodes:
        return 0.0, 0.0
    columns, step_s, n = state.decode_columns, state.costs.mean_step_s, request.n
    count, own = len(columns.instance), n * request.context
    each = float(columns.context.sum()) / max(1, state.num_taken)
    alone_s = step_s(n / count, own / count)
    return alone_s, step_s((n + 1) / count, (own + each) / count) - alone_s


def relief_s(state: State, request: Request, tbt_s: float, limit_s: float) -> float:
    """Predict when the time between tokens, now tbt_s, falls to a limit if no other request comes.

    All that decodes now ends evenly within the time that a decode takes. After that, nothing is better than
    the request alone.
    """
    alone_s = mean_tbt_s(state, request, 0)
    decode_s = (state.decode_load.answer_tokens or request.predicted_tokens) * tbt_s
    share = (tbt_s - limit_s) / (tbt_s - alone_s) if tbt_s > alone_s else 1.0
    return decode_s * min(1.0, share)
