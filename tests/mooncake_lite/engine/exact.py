"""Answers compared with transformers in float64, where rounding may differ.

A first difference is excused where the two best logits lie within GAP of each other, or, sampled, where the
draw lies within BORDER of another token's part. With top_k and top_p tokens are drawn in the order of their
logits: two tokens whose logits lie within GAP of each other may have changed places.

The comparison goes on from the oracle's token. More than MOST_EXCUSED of all tokens may not be excused; one
may always be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mooncake_lite.messages import Sampling

GAP = 1e-4
BORDER = 1e-5
MOST_EXCUSED = 1e-3
ROWS = 64
"""Texts that the oracle reads at a time."""


@dataclass(frozen=True, slots=True)
class Case:
    """An answer to be compared. The first `agreed` tokens of it are those of the oracle."""

    prompt: tuple[int, ...]
    sampling: Sampling
    answer: tuple[int, ...]
    branch: int = 0
    agreed: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """The oracle's token.

    margin   how near it was to being another one; below 1 a difference is excused
    twins    tokens that may stand in its place in the order of the draw
    """

    token: int
    margin: float
    twins: frozenset[int] = frozenset()


Continue = Callable[[Sequence[Case]], Sequence[tuple[int, ...]]]
"""Computes the answers of cases again, at the same length, after the tokens that are agreed upon."""


def assert_answers(oracle: Any, cases: Sequence[Case], go_on: Continue) -> int:
    """Assert that answers are those of the oracle. Returns how many tokens were excused.

    oracle   a causal language model of transformers, in float64
    go_on    computes answers again, from the oracle's token on
    """
    total = sum(len(case.answer) for case in cases)
    excused = 0
    left = list(cases)
    while left:
        again = []
        for case, choices in zip(left, _choices(oracle, left)):
            for index in range(case.agreed, len(case.answer)):
                choice = choices[index]
                if choice.token == case.answer[index]:
                    continue
                assert choice.margin < 1 or case.answer[index] in choice.twins, (
                    f"token {index} of the answer to {len(case.prompt)} tokens is {case.answer[index]}, not "
                    f"{choice.token}; {choice.margin:.3g} times what rounding excuses ({case.sampling})"
                )
                excused += 1
                if index + 1 < len(case.answer):
                    right = (*case.answer[:index], choice.token, *case.answer[index + 1 :])
                    again.append(replace(case, answer=right, agreed=index + 1))
                break
        answers = go_on(again) if again else []
        left = [replace(case, answer=answer) for case, answer in zip(again, answers, strict=True)]
    assert excused <= max(1, MOST_EXCUSED * total), f"{excused} of {total} tokens differ by rounding"
    return excused


def _choices(oracle: Any, cases: Sequence[Case]) -> list[list[Choice]]:
    """What the oracle would choose at each place of each answer, after the tokens that stand before it."""
    order = sorted(range(len(cases)), key=lambda i: len(cases[i].prompt) + len(cases[i].answer))
    found: dict[int, list[Choice]] = {}
    for first in range(0, len(order), ROWS):
        rows = order[first : first + ROWS]
        texts = [[*cases[i].prompt, *cases[i].answer[:-1]] for i in rows]
        longest = max(map(len, texts))
        ids = torch.tensor(
            [[*text, *[0] * (longest - len(text))] for text in texts]
        )  # causal: no mask needed
        with torch.inference_mode():
            logits = oracle(ids).logits.numpy()
        assert logits.dtype == np.float64
        for i, text, of_text in zip(rows, texts, logits):
            begin = len(cases[i].prompt) - 1
            found[i] = [
                choice(row, cases[i], begin + 1 + index)
                for index, row in enumerate(of_text[begin : len(text)])
            ]
    return [found[i] for i in range(len(cases))]


def choice(logits: np.ndarray, case: Case, position: int) -> Choice:
    """The token at a position, given its logits (vocab,) float64."""
    how = case.sampling
    for token, bias in how.logit_bias.items():
        logits[token] += bias
    if how.temperature == 0:
        best, second = np.sort(logits)[:-3:-1]
        return Choice(int(logits.argmax()), float(best - second) / GAP)
    weights = np.exp((logits - logits.max()) / how.temperature)
    weights /= weights.sum()
    order, margin = _kept(logits, weights, how)
    reached = np.cumsum(weights[order])
    reached /= reached[-1]
    key = (how.seed + case.branch) % 2**64
    uniform = np.random.Generator(np.random.Philox(key=key, counter=position)).random()
    index = int(np.searchsorted(reached, uniform, side="right"))
    borders = [reached[index], reached[index - 1] if index else np.inf]
    margin = min(margin, *(abs(uniform - border) / BORDER for border in borders))
    token = int(order[index])
    near = np.flatnonzero(np.abs(logits - logits[token]) < GAP) if _is_ordered(how) else []
    return Choice(token, float(margin), frozenset(map(int, near)))


def _is_ordered(how: Sampling) -> bool:
    """Tell whether tokens are drawn in the order of their logits; otherwise in that of their ids."""
    return bool(how.top_k) or how.top_p < 1


def _kept(logits: np.ndarray, weights: np.ndarray, how: Sampling) -> tuple[np.ndarray, float]:
    """Ids that may be drawn, in the order of the draw; how near top_k or top_p was to another set of them."""
    if not _is_ordered(how):
        return np.arange(len(weights)), np.inf
    order, margin = np.argsort(-weights, kind="stable"), float("inf")
    if how.top_k:
        margin = float(logits[order[how.top_k - 1]] - logits[order[how.top_k]]) / GAP
        order = order[: how.top_k]
    if how.top_p < 1:
        reached = np.cumsum(weights[order]) / weights[order].sum()
        count = int(np.searchsorted(reached, how.top_p)) + 1
        margin = min(margin, float(np.abs(reached - how.top_p).min()) / BORDER)
        order = order[:count]
    return order, margin
