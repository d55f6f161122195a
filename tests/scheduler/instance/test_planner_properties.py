"""A planner alone: the books balance after every step. Faults and full pages come in simulated clusters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.instance import DECODE, PREFILL
from scheduler.instance.outcomes import Ended, Token
from tests.conftest import examples
from tests.scheduler.instance.rank import Rank, job

pytestmark = pytest.mark.quick


@settings(max_examples=examples(10))
@given(st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=30), min_size=1, max_size=6))
def test_a_rank_with_both_duties_answers_without_any_transfer(prompts: list[list[int]]) -> None:
    rank = Rank(PREFILL, DECODE, num_pages=120, half_blocks=0, num_slots=0)
    for number, prompt in enumerate(prompts):
        rank.arrive(job(f"r{number}", [PREFILL, DECODE], prompt))
    said = rank.settle()
    rank.assert_idle()
    assert sum(isinstance(outcome, Ended) for outcome in said) == len(prompts)
    assert sum(isinstance(outcome, Token) for outcome in said) == 8 * len(prompts)
