"""The last decisions stay as they were made, and the oldest are dropped."""

from __future__ import annotations

import pytest

import scheduler as s
from scheduler.placement.decisions import Decisions
from tests.scheduler.cluster import POLICY, cluster, request

pytestmark = pytest.mark.quick


def test_a_kept_decision_is_what_was_compared_whatever_happens_afterwards() -> None:
    state, decisions, keys = cluster(prefill=3, decode=2, slots=9), Decisions(POLICY), (7, 8, 9)
    state.index.stored_run(list(keys), 0, 22, "dram")
    placements = {}
    for number in range(9):
        wanted = request(f"r{number}", 640, keys)
        table = s.explain(POLICY, state, wanted, 0.0)
        placement = decisions.choose(state, wanted, 0.0)
        assert placement == s.choose(POLICY, state, wanted, 0.0)
        assert isinstance(placement, s.Placement)
        placements[wanted.request_id] = table
        state.place(wanted, placement, 0.0)
        decisions.placed(wanted.request_id)
    state.costs.measured_prefill(1, 640, 0, 9.0)
    for name, table in placements.items():
        found = decisions.explain(name)
        assert found is not None
        assert (found.outcome, found.candidates) == ("placed", table)


def test_only_the_last_decisions_are_kept_and_a_placed_one_is_not_replaced() -> None:
    state, decisions = cluster(), Decisions(POLICY, limit=2)
    for name in "abc":
        decisions.choose(state, request(name), 0.0)
    assert decisions.request_ids == ["b", "c"]
    assert decisions.explain("a") is None
    decisions.placed("c")
    first = decisions.explain("c")
    decisions.choose(state, request("c", 64), 0.0)
    assert decisions.explain("c") == first
    decisions.refused("c", "its limit")
    last = decisions.explain("c")
    assert last is not None
    assert first is not None
    assert (last.outcome, last.reason, last.candidates) == ("refused", "its limit", first.candidates)
