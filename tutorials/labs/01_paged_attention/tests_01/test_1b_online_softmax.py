"""1b: an online softmax takes tokens in piece by piece, and ends with what all of them together give."""

from __future__ import annotations

import msgspec
import numpy as np

from mooncake_lite.labs.judging import Judge

from .cases import eighths, encoded, expect_near

Pieces = list[tuple[np.ndarray, np.ndarray]]


class State(msgspec.Struct):
    """What holds after a piece."""

    highest: float | None
    total: float | None
    sums: list[float | None]


def pieces_of(scores: np.ndarray, values: np.ndarray, tokens: int) -> Pieces:
    """Return runs of at most so many tokens."""
    return [(scores[at : at + tokens], values[at : at + tokens]) for at in range(0, len(scores), tokens)]


def inputs_of(pieces: Pieces, dtype: str) -> dict[str, object]:
    told = [{"scores": scores.tolist(), "values": encoded(values, dtype)} for scores, values in pieces]
    return {"pieces": told, "head_dim": pieces[0][1].shape[1], "dtype": dtype}


def taken(lab: Judge, pieces: Pieces, rule: str, dtype: str = "float32") -> None:
    """Take the pieces in, and expect the right state after each of them."""
    tokens = [len(scores) for scores, _ in pieces]
    seen = lab.ask("add_tokens", inputs_of(pieces, dtype), list[State], f"add_tokens with {tokens} tokens")
    for number, state in enumerate(seen):
        scores, values = (np.concatenate(part) for part in zip(*pieces[: number + 1]))
        called = f"add_tokens with {len(pieces[number][0])} tokens, call {number + 1}"
        highest = float(scores.max())
        expect_near(lab, np.array([state.highest], float), np.array([highest]), f"{called} (highest)", rule)
        weights = np.exp(scores - highest)
        total = np.array([state.total], float) / weights.sum()
        expect_near(lab, total, np.ones(1), f"{called} (total, as a share of the right one)", rule)
        sums, wanted = np.array(state.sums, float), (weights[:, None] * values).sum(axis=0)
        expect_near(lab, sums / weights.sum(), wanted / weights.sum(), f"{called} (sums / right total)", rule)


def context(lab: Judge, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    return eighths(lab.random, tokens), eighths(lab.random, tokens, lab.size.head_dim)


def test_the_first_tokens_make_a_plain_softmax(lab: Judge) -> None:
    taken(lab, [context(lab, 5)], "total is the sum of exp(score - highest), and sums weighs the values so")


def test_pieces_give_what_all_tokens_give(lab: Judge) -> None:
    pieces = pieces_of(*context(lab, 5 * lab.size.page_tokens + 1), lab.size.page_tokens)
    taken(lab, pieces, "after each piece the state is that of all tokens so far")


def test_a_higher_score_shrinks_what_came_before(lab: Judge) -> None:
    scores, values = context(lab, 12)
    rule = "exp(score - new) = exp(score - old) * exp(old - new), for total and for sums"
    taken(lab, pieces_of(np.sort(scores), values, 3), rule)


def test_lower_scores_leave_the_highest_as_it_is(lab: Judge) -> None:
    scores, values = context(lab, 12)
    taken(lab, pieces_of(np.sort(scores)[::-1], values, 3), "highest is that of all tokens so far")


def test_large_scores_do_not_overflow(lab: Judge) -> None:
    scores, values = context(lab, 10)
    taken(lab, pieces_of(scores + 300, values, 4), "no power is above exp(0)")


def test_values_of_16_bits_are_widened(lab: Judge) -> None:
    pieces = pieces_of(*context(lab, 9), 4)
    taken(lab, pieces, "after each piece the state is that of all tokens so far")
    taken(lab, pieces, "values are read through widen", "bfloat16")


def test_each_token_costs_one_exponential(lab: Judge) -> None:
    tokens, page = lab.size.context, lab.size.page_tokens
    pieces = pieces_of(*context(lab, tokens), page)
    taken(lab, pieces, "a context is taken in page by page")
    lab.cost(lab.ask("exponentials", inputs_of(pieces, "float32"), int), tokens + 2 * len(pieces))
