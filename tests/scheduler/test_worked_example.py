"""The example of Algorithm 1 in docs/explain/conductor.md: its table is what the policy computes."""

from __future__ import annotations

from pathlib import Path

import pytest

import scheduler as s
from scheduler.costs import CostConfig, Costs, DecodeCost, LoadCost, PrefillCost, TransferCost
from scheduler.placement.kvcache_centric import THRESHOLD, KVCacheCentric
from tests.scheduler.cluster import NO_TERMS

pytestmark = pytest.mark.quick

PAGE = Path(__file__).parents[2] / "docs" / "explain" / "conductor.md"
BLOCK_TOKENS = 64
KEYS = tuple(range(15))
"""Of a prompt of 1,000 tokens: 15 full blocks and 40 tokens."""

NEAR = 12, 9, 4, 0
QUEUED_TOKENS = 900, 300, 200, 500
"""By node. Each has a store holder, 21 and so on, and a prefill instance, 1 and so on."""


def cluster() -> s.State:
    costs = CostConfig(
        prefill=PrefillCost(0.0, 0.001),
        decode=DecodeCost(0.02, 0.001, 0.0),
        transfer=TransferCost(100e6, 0.0),
        load=LoadCost(5e9, 1e9, 0.0),
        is_guess=False,
    )
    state = s.State(99, Costs(costs), block_nbytes=1_000_000)
    for node in range(4):
        state.add_instance(1 + node, node, ["prefill"], 1)
        state.index.add_holder(21 + node, node)
        state.index.stored_run(list(KEYS[: NEAR[node]]), 0, 21 + node, "dram")
    for decode in (11, 12):
        state.add_instance(decode, 0, ["decode"], 8)
    for node, tokens in enumerate(QUEUED_TOKENS):
        name, decode = f"waits-{node}", 12 if node == 3 else 11
        wanted = s.Request(name, tokens, (), BLOCK_TOKENS, 16)
        state.place(wanted, s.Placement(name, 1 + node, decode, False, 0, NO_TERMS), 0.0)
    return state


def test_the_worked_example_of_the_page_is_what_the_policy_computes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = s.explain(KVCacheCentric(), cluster(), s.Request("r", 1000, KEYS, BLOCK_TOKENS, 16), 0.0)
    for row in sorted(rows, key=lambda row: row.prefill):
        t = row.terms
        ratio = f"{t.best_blocks / t.near_blocks:.2f}" if t.near_blocks else "none"
        times = t.transfer_s, t.queue_s, t.prefill_s, t.score
        cells = [row.prefill, t.near_blocks, ratio, t.reused_blocks, *(f"{each:.3f}" for each in times)]
        assert f"| {' | '.join(map(str, cells))} |" in page
        assert (t.reused_blocks == 12) == (t.best_blocks > THRESHOLD * t.near_blocks or t.near_blocks == 12)
    assert (rows[0].prefill, rows[0].decode) == (3, 12)
    assert f"{1e3 * rows[0].terms.tbt_s:.0f} ms" in page
