"""The paper's formulas and the lines of Algorithm 1 that placement rests on, one test each.

FAST'25, section 4 and Algorithm 1, and formulas of arXiv 2407.00079. Sentences are in our words; lines of
Algorithm 1 stand as they do there. Tests of the threshold and of sources are in test_policies.py. Those of
the section on overload are in test_overload.py, and those of copies in test_hot_spots.py.
"""

from __future__ import annotations

import msgspec
import pytest

import scheduler as s
from scheduler.costs import CostConfig, Costs, DecodeCost, LoadCost, PrefillCost, TransferCost
from scheduler.hot_spots import TIMES, HotSpots
from scheduler.placement import COPYING, POLICIES
from scheduler.placement.kvcache_centric import THRESHOLD, KVCacheCentric
from tests.scheduler.cluster import NO_TERMS

pytestmark = pytest.mark.quick

BLOCK_TOKENS, BLOCK_NBYTES = 64, 1_000_000
KEYS = list(range(10))
"""Ten blocks, each computed in 0.64 s and moved in 10 ms."""

CONFIG = CostConfig(
    prefill=PrefillCost(0.0, 0.01), decode=DecodeCost(0.02, 0.001, 0.0),
    transfer=TransferCost(100e6, 0.0), load=LoadCost(1e15, 1e9, 0.0), is_guess=False,
)  # fmt: skip


def cluster(nodes: int = 3, config: CostConfig = CONFIG, block_nbytes: int = BLOCK_NBYTES) -> s.State:
    """A prefill instance (1..) and a store holder (21..) on each node; decode instances 11 and 12."""
    state = s.State(99, Costs(config), block_nbytes=block_nbytes)
    for node in range(nodes):
        state.add_instance(1 + node, node, ["prefill"], 1)
        state.index.add_holder(21 + node, node)
    for decode in (11, 12):
        state.add_instance(decode, 0, ["decode"], 99)
    return state


def request(name: str = "r", tokens: int = 700, keys: list[int] = KEYS) -> s.Request:
    return s.Request(name, tokens, keys[: tokens // BLOCK_TOKENS], BLOCK_TOKENS, 16)


def waits(state: s.State, instance: int, name: str, tokens: int, cached: int = 0) -> None:
    """Let a prompt wait at an instance, or begin there."""
    wanted = s.Request(name, tokens, (), BLOCK_TOKENS, 16)
    state.place(wanted, s.Placement(name, instance, 11, False, cached, NO_TERMS), 0.0)


def table(state: s.State, wanted: s.Request | None = None) -> dict[int, s.Terms]:
    """The terms of Algorithm 1 on each instance."""
    rows = s.explain(KVCacheCentric(), state, wanted or request(), 0.0)
    return {row.prefill: row.terms for row in rows}


# ------------------------------------------------------------------------------ formulas


@pytest.mark.parametrize(("flops", "published"), [(8 * 312e12, 6e9), (8 * 989e12, 19e9)])
@pytest.mark.parametrize("policy", ["kvcache-centric", "global-cache"])
def test_loading_a_prefix_beats_computing_it_above_the_papers_bandwidth(
    flops: float, published: float, policy: str
) -> None:
    """ "B/G > 2*d*s / (gqa * (a*p*d + b*d^2))": 6 GB/s on 8xA800 and 19 GB/s on 8xH800 for p = 8192.

    LLaMA3-70B: d = 8192, 80 layers, 8 query heads per KV head, s = 2 bytes; a = 4, b = 22.
    """
    d, p, layers, gqa, a, b = 8192, 8192, 80, 8, 4, 22
    least = flops * 2 * d * 2 / (gqa * (a * p * d + b * d * d))
    assert least == pytest.approx(published, rel=0.03)
    pairs = 2 * layers * a * d / flops  # a prompt of n tokens has n^2 / 2 pairs
    prefill = PrefillCost(0.0, layers * b * d * d / flops, pairs)
    for bandwidth, loads in ((1.01 * least, True), (0.99 * least, False)):
        config = CostConfig(
            prefill=prefill, transfer=TransferCost(bandwidth, 0.0), load=LoadCost(1e15, 1e15, 0.0)
        )
        state = cluster(2, config, block_nbytes=512 * layers * 2 * d // gqa * 2)
        keys = list(range(p // 512))
        state.index.stored_run(keys, 0, 22, "dram")
        waits(state, 2, "busy", 500_000)
        choice = s.choose(POLICIES[policy](), state, s.Request("r", p + 512, keys, 512, 16), 0.0)
        assert isinstance(choice, s.Placement)
        assert (choice.prefill, choice.fetch) == (1, loads)


def test_t_queue_is_the_sum_over_the_queue_of_the_node() -> None:
    """ "T_queue: the sum over the node's queue", what is cached left out, and the rest of what runs."""
    state = cluster()
    for name, tokens, cached in (("a", 500, 0), ("b", 300, 200), ("c", 100, 0)):
        waits(state, 2, name, tokens, cached)
    assert [terms.queue_s for terms in table(state).values()] == pytest.approx([0.0, 0.0, 5 + 1 + 1])
    state.start("a", 0.0)
    assert state.queue_s(2.0)[1] == pytest.approx(3 + 1 + 1)


# ------------------------------------------------------------------------------ Algorithm 1, line by line


def test_the_best_match_is_the_longest_prefix_and_may_lie_on_several_nodes() -> None:
    """ "best_len, best = FindBestPrefixMatch(P, keys)". The paper's is of one instance; ours of all nodes."""
    state = cluster()
    state.index.stored_run(KEYS[:4], 0, 21, "dram")
    state.index.stored_run(KEYS[:6], 0, 22, "dram")
    assert {terms.best_blocks for terms in table(state).values()} == {6}
    state.index.stored_run(KEYS[6:8], 6, 23, "dram")
    found = table(state)
    assert {terms.best_blocks for terms in found.values()} == {8}
    assert [found[instance].near_blocks for instance in (1, 2, 3)] == [4, 6, 0]


def test_the_transfer_is_estimated_for_what_the_instance_lacks() -> None:
    """ "prefix = best_len; T_tr = Estimate(best_len - i.prefix_len)", and "T_tr = 0" otherwise."""
    state = cluster()
    state.index.stored_run(KEYS, 0, 21, "dram")
    state.index.stored_run(KEYS[:4], 0, 22, "dram")
    state.index.stored_run(KEYS[:7], 0, 23, "dram")
    found = table(state)
    assert [found[instance].transfer_s for instance in (1, 2, 3)] == pytest.approx([0.0, 0.06, 0.0])
    assert [found[instance].reused_blocks for instance in (1, 2, 3)] == [10, 10, 7]


def test_ttft_is_computed_for_each_prefill_instance_and_the_least_is_chosen() -> None:
    """ "for each prefill instance i: TTFT_i = T_tr + T_queue(i) + T_prefill(len(R), prefix)";
    "p = argmin TTFT_i". A transfer adds to the queue, and does not lengthen it for others (ours)."""
    state = cluster()
    state.index.stored_run(KEYS, 0, 21, "dram")
    for instance, tokens in ((1, 100), (2, 30), (3, 99)):
        waits(state, instance, f"w{instance}", tokens)
    found = table(state)
    for terms in found.values():
        assert terms.score == pytest.approx(terms.transfer_s + terms.queue_s + terms.prefill_s)
    expected = {1: 0.0 + 1.0 + 0.6, 2: 0.1 + 0.3 + 0.6, 3: 0.1 + 0.99 + 0.6}
    assert {instance: terms.score for instance, terms in found.items()} == pytest.approx(expected)
    choice = s.choose(KVCacheCentric(), state, request(), 0.0)
    assert isinstance(choice, s.Placement)
    assert choice.prefill == min(expected, key=lambda instance: expected[instance]) == 2
    state.place(request(), choice, 0.0)
    assert state.queue_s(0.0)[1] == pytest.approx(0.3 + 0.6)


def test_the_decode_instance_is_chosen_after_the_prefill_instance_by_its_time_between_tokens() -> None:
    """ "d, TBT = SelectDecodingInstance(D)". The paper gives no rule; ours is the least predicted TBT."""
    long_contexts = msgspec.structs.replace(CONFIG, decode=DecodeCost(0.02, 0.001, 1e-5))
    state = cluster(config=long_contexts)
    waits(state, 1, "long", 1000)
    for number in range(3):
        name = f"short-{number}"
        state.place(request(name, 64), s.Placement(name, 1, 12, False, 0, NO_TERMS), 0.0)
    terms = table(state, request(tokens=100))[1]
    assert terms.decode_batch == 3, "three short contexts are less than a long one"
    assert terms.tbt_s == pytest.approx(0.02 + 4 * 0.001 + (3 * 64 + 100) * 1e-5)


@pytest.mark.parametrize(
    ("ttft_s", "tbt_s", "refused"),
    [
        (1.01, 0.022, None),
        (0.99, 0.022, "time to first token is 1 s, the limit 990 ms"),
        (1.01, 0.0209, "time between tokens is 21 ms, the limit 20.9 ms"),
    ],
)
def test_a_request_over_either_limit_on_the_chosen_instances_is_rejected(
    ttft_s: float, tbt_s: float, refused: str | None
) -> None:
    """ "if TTFT_p > TTFT_SLO or TBT > TBT_SLO: reject" """
    state = cluster()
    waits(state, 1, "a", 30)
    for instance in (2, 3):
        waits(state, instance, f"w{instance}", 5000)
    wanted = s.Request("r", 70, (), BLOCK_TOKENS, 16, slo_ttft_s=ttft_s, slo_tbt_s=tbt_s)
    choice = s.choose(KVCacheCentric(), state, wanted, 0.0)
    assert isinstance(choice, s.Placement)
    answer = s.ADMISSIONS["early-rejection"]().on_place(state, wanted, choice, 0.0)
    assert answer and refused in answer.reason if refused else answer is None, answer


def test_the_node_of_the_chosen_instance_gets_copies_and_so_may_every_node() -> None:
    """ "if best_len / p.prefix_len > kvcache_balancing_threshold: TransferKVCache(best, p)". No cap: ours."""
    spots = HotSpots(THRESHOLD)
    for node in range(1, 50):
        copied = [spots.on_read(node, KEYS, [True] * 6 + [False] * 4, float(n)) for n in range(TIMES)]
        assert copied == [[]] * (TIMES - 1) + [KEYS[6:]], "10 / 6 is above 1.5"
        assert not any(spots.on_read(node, KEYS, [True] * 7 + [False] * 3, 9.0) for _ in range(TIMES))
    assert {KVCacheCentric.name} == COPYING, "no baseline of the paper copies"


def test_the_papers_baselines_are_there() -> None:
    """Figure 5: random, load-balancing, local cache-aware, global cache-aware."""
    assert {"random", "least-loaded", "local-cache", "global-cache"} < POLICIES.keys()
