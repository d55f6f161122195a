"""Predicted / measured, from the events and effects of the control plane."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_lite.conductor.predictions import Predictions
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from scheduler import CostConfig, Costs, Terms

pytestmark = pytest.mark.quick

ARRIVED = ev.RequestArrived("a", 64, 16, [], [])


def decided(attempt: int = 1) -> fx.Decided:
    """Decided with a TTFT of 3 s and a TBT of 20 ms."""
    return fx.Decided("a", attempt, 1, 2, 0, Terms(3.0, 1.0, 0.5, 1.5, 0, 0, 0, 0, 0.02))


def seen(*steps: tuple[float, ev.Event, *tuple[fx.Effect, ...]], is_guess: bool = False) -> dict[str, float]:
    """The ratios after these steps: (time, event, its effects)."""
    found: list[tuple[str, float]] = []
    predictions = Predictions(
        Costs(CostConfig(is_guess=is_guess)), lambda what, ratio: found.append((what, ratio))
    )
    for now, event, *effects in steps:
        predictions.on(event, effects, now)
    assert len(dict(found)) == len(found), "compared twice"
    return dict(found)


def prefilled(attempt: int = 1, store_s: float = 0.0) -> ev.PrefillEnded:
    return ev.PrefillEnded(1, 0, "a", attempt, [], [], 0.0, 0.1, store_s)


def ended(tokens: int = 11) -> ev.DecodeEnded:
    return ev.DecodeEnded(2, 0, "a", 1, answer_tokens=tokens)


LOADED = ev.DecodeLoaded(2, 0, "a", 1)


def test_the_times_of_a_request_are_compared_with_the_terms_of_its_decision() -> None:
    ratios = seen((5.0, ARRIVED, decided()), (9.0, prefilled()), (9.5, LOADED), (10.0, ended()))
    assert ratios == {"ttft": pytest.approx(3 / 4), "tbt": pytest.approx(0.02 / 0.05)}


def test_the_time_that_a_request_was_held_counts_as_predicted_when_it_is_placed() -> None:
    ratios = seen((5.0, ARRIVED), (6.0, ev.Tick(), decided()), (9.0, prefilled()))
    assert ratios == {"ttft": pytest.approx(1.0)}


def test_the_first_token_is_sent_before_the_blocks_of_the_prompt_are_stored() -> None:
    assert seen((5.0, ARRIVED, decided()), (9.0, prefilled(store_s=2.0))) == {"ttft": pytest.approx(3 / 2)}


def test_a_rank_that_decodes_what_it_prefills_has_no_load() -> None:
    computed = ev.PromptComputed(1, 0, "a", 1, 64, 0.1)
    assert seen((0.0, ARRIVED, decided()), (3.0, computed), (3.2, ended()))["tbt"] == pytest.approx(1.0)


def test_the_prediction_of_another_decode_rank_replaces_the_first_one() -> None:
    moved = fx.Moved("a", 1, 3, 0.05)
    steps: Any = (0.0, ARRIVED, decided()), (3.0, prefilled(), moved), (3.0, LOADED), (3.5, ended())
    assert seen(*steps)["tbt"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "steps",
    [
        [(3.0, prefilled(attempt=2))],
        [(3.0, ev.Tick(), fx.Forget("a", "failed")), (4.0, prefilled())],
        [(3.0, ended())],
    ],
)
def test_an_answer_of_another_attempt_or_of_a_request_that_is_over_is_not_compared(steps: Any) -> None:
    assert seen((0.0, ARRIVED, decided()), *steps) == {}


def test_a_guess_an_answer_of_one_token_and_a_preempted_request_are_not_compared() -> None:
    rest: Any = (3.0, prefilled()), (3.0, LOADED)
    assert seen((0.0, ARRIVED, decided()), *rest, (4.0, ended()), is_guess=True) == {}
    assert "tbt" not in seen((0.0, ARRIVED, decided()), *rest, (4.0, ended(1)))
    preempted = ev.Preempted(2, 0, "a", 1, 70, [], [])
    again: Any = (4.0, preempted, decided(2)), (5.0, prefilled(2)), (6.0, ended())
    assert "tbt" not in seen((0.0, ARRIVED, decided()), *rest, *again)
