"""What each placement policy prefers, and the sentences of the paper that Algorithm 1 rests on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

import scheduler as s
from scheduler.costs import CostConfig, Costs, DecodeCost, LoadCost, PrefillCost, TransferCost
from scheduler.placement import POLICIES, policy_of
from scheduler.placement.kvcache_centric import KVCacheCentric
from tests.scheduler.cluster import NO_TERMS

pytestmark = pytest.mark.quick

BLOCK_TOKENS, BLOCK_NBYTES = 64, 1 << 20
KEYS = list(range(1, 11))
"""Ten blocks: 640 tokens, 6.4 s at 10 ms per token."""


def cluster(
    instances: int = 3, far_bytes_per_s: float = 1e9, rack_bytes_per_s: float = 0.0, racks: Sequence[int] = ()
) -> s.State:
    """Prefill instances 1.. and store holders 21.., one of each per node; one decode instance."""
    costs = CostConfig(
        prefill=PrefillCost(0.0, 0.01),
        transfer=TransferCost(far_bytes_per_s, 0.0, rack_bytes_per_s),
        load=LoadCost(5e9, 1e9, 0.0),
        is_guess=False,
    )
    state = s.State(99, Costs(costs), block_nbytes=BLOCK_NBYTES, racks=racks)
    for node in range(instances):
        state.add_instance(1 + node, node, ["prefill"], 1)
        state.index.add_holder(21 + node, node)
    state.add_instance(11, 0, ["decode"], 999)
    return state


def chosen(name: str, state: s.State, request_id: str = "a", tokens: int = 700) -> s.Placement:
    """What a policy chooses for a prompt that begins with KEYS; put into the books."""
    wanted = s.Request(request_id, tokens, KEYS[: tokens // BLOCK_TOKENS], BLOCK_TOKENS, 16)
    placement = s.choose(POLICIES[name](), state, wanted, 0.0)
    assert isinstance(placement, s.Placement)
    state.place(wanted, placement, 0.0)
    return placement


def busy(state: s.State, instance: int, tokens: int) -> None:
    """Let a prompt of so many tokens, 10 ms each, wait at an instance."""
    name = f"busy-{instance}"
    wanted = s.Request(name, tokens, (), BLOCK_TOKENS, 16)
    state.place(wanted, s.Placement(name, instance, 11, False, 0, NO_TERMS), 0.0)


# ------------------------------------------------------------------------------ baselines


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_only_takes_instances_whose_requests_would_have_a_decode_slot(name: str) -> None:
    state = s.State(99)
    for number in (1, 2, 3):
        state.add_instance(number, 0, ["prefill", "decode"], 1)
    places = [chosen(name, state, f"r{number}", 70) for number in range(3)]
    assert sorted(place.prefill for place in places) == [1, 2, 3]
    wanted = s.Request("late", 70, (), BLOCK_TOKENS, 16)
    assert isinstance(s.choose(POLICIES[name](), state, wanted, 0.0), s.Wait)


def test_random_draws_by_the_request_alone_and_reaches_every_instance() -> None:
    drawn = [chosen("random", cluster(), f"r{number}").prefill for number in range(60)]
    assert drawn == [chosen("random", cluster(), f"r{number}").prefill for number in range(60)]
    assert min(Counter(drawn)[one] for one in (1, 2, 3)) >= 10


def test_round_robin_takes_turns() -> None:
    state = cluster()
    assert [chosen("round-robin", state, f"r{number}").prefill for number in range(6)] == [1, 2, 3, 1, 2, 3]


def test_of_two_that_are_drawn_the_one_that_could_begin_first_is_chosen() -> None:
    """With one busy instance of three, it is drawn with an idle one or not at all."""
    for number in range(30):
        state = cluster()
        busy(state, 2, 1000)
        assert chosen("two-choices", state, f"r{number}").prefill != 2


def test_least_loaded_looks_at_the_queue_and_not_at_the_cache() -> None:
    state = cluster()
    state.index.stored_run(KEYS, 0, 21, "dram")
    busy(state, 1, 10)
    placement = chosen("least-loaded", state)
    assert (placement.prefill, placement.fetch, placement.terms.reused_blocks) == (2, False, 0)


def test_local_cache_weighs_what_is_near_against_the_queue_and_fetches_nothing() -> None:
    for waiting_tokens, instance in ((500, 1), (700, 2)):  # the prefix is worth 640 tokens of waiting
        state = cluster()
        state.index.stored_run(KEYS, 0, 21, "dram")
        busy(state, 1, waiting_tokens)
        placement = chosen("local-cache", state)
        assert (placement.prefill, placement.fetch) == (instance, False)
        assert placement.terms.best_blocks == 10


def test_global_cache_fetches_the_longest_prefix_where_that_is_faster_than_computing_it() -> None:
    for far_bytes_per_s, fetch in ((1e9, True), (1e6, False)):  # 10 MB/s would be 1 s for 6.4 s of computing
        state = cluster(far_bytes_per_s=far_bytes_per_s)
        state.index.stored_run(KEYS, 0, 21, "dram")
        busy(state, 1, 700)
        placement = chosen("global-cache", state)
        assert (placement.prefill, placement.fetch) == (2, fetch)
        assert placement.terms.reused_blocks == (10 if fetch else 0)


def test_dynamo_counts_blocks_and_knows_no_transfer() -> None:
    state = cluster()
    state.index.stored_run(KEYS, 0, 21, "dram")
    assert chosen("dynamo", state).prefill == 1
    placement = chosen("dynamo", state, "b")  # 60 tokens wait at 1, and the other two would compute all
    assert (placement.prefill, placement.fetch) == (1, False)
    assert placement.terms.score == pytest.approx((60 + 60) / BLOCK_TOKENS)


# ------------------------------------------------------------------------------ Algorithm 1 (FAST'25, 4)


def test_ttft_is_transfer_plus_queue_plus_prefill() -> None:
    """The paper: "TTFT = T_transfer + T_queue + T_prefill"."""
    state = cluster()
    state.index.stored_run(KEYS, 0, 21, "dram")
    busy(state, 1, 5000)
    busy(state, 3, 100)
    terms = chosen("kvcache-centric", state).terms
    assert terms.queue_s == 0.0
    assert terms.transfer_s == pytest.approx(10 * BLOCK_NBYTES / 1e9)
    assert terms.prefill_s == pytest.approx(0.60)
    assert terms.score == terms.ttft_s == pytest.approx(terms.transfer_s + 0.60)


@pytest.mark.parametrize(("near", "fetches"), [(0, True), (4, True), (6, True), (7, False), (10, False)])
def test_a_prefix_is_fetched_if_it_is_longer_than_the_near_one_by_more_than_the_threshold(
    near: int, fetches: bool
) -> None:
    """The paper: "if best_len / i.prefix_len > kvcache_balancing_threshold: prefix = best_len"."""
    state = cluster(instances=2)
    state.index.stored_run(KEYS, 0, 22, "dram")
    state.index.stored_run(KEYS[:near], 0, 21, "dram")
    busy(state, 2, 5000)
    placement = chosen("kvcache-centric", state)
    assert placement.prefill == 1
    assert placement.terms.reused_blocks == (10 if fetches else near)
    assert placement.fetch == (fetches or near == 10)
    assert (placement.terms.transfer_s > 0) == fetches


def test_equality_at_the_threshold_does_not_fetch() -> None:
    """FAST'25 and the arXiv report differ here; ours is ">" as in FAST'25."""
    state = cluster(instances=2)
    state.index.stored_run(KEYS[:6], 0, 22, "dram")
    state.index.stored_run(KEYS[:4], 0, 21, "dram")
    busy(state, 2, 5000)
    wanted = s.Request("a", 700, KEYS, BLOCK_TOKENS, 16)
    for threshold, reused in ((1.5, 4), (1.49, 6)):
        choice = s.choose(KVCacheCentric(threshold), state, wanted, 0.0)
        assert isinstance(choice, s.Placement)
        assert choice.terms.reused_blocks == reused


def test_a_slow_network_computes_what_it_could_fetch() -> None:
    """Ours: Algorithm 1 would fetch, whatever that takes."""
    state = cluster(instances=2, far_bytes_per_s=1e6)
    state.index.stored_run(KEYS, 0, 22, "dram")
    busy(state, 2, 5000)
    placement = chosen("kvcache-centric", state)
    assert (placement.prefill, placement.fetch, placement.terms.reused_blocks) == (1, False, 0)


def test_transfers_under_way_at_the_sender_slow_the_next_one() -> None:
    """The paper: "T_transfer: size over present bandwidth, congestion at the sender included"."""
    state = cluster()
    state.index.stored_run(KEYS, 0, 21, "dram")
    busy(state, 1, 5000)
    first = chosen("kvcache-centric", state, "a")
    state.start("a", 0.0)
    state.flows.begin("a", [0])
    second = chosen("kvcache-centric", state, "b")
    assert second.terms.transfer_s == pytest.approx(2 * first.terms.transfer_s)
    state.end_prefill("a", 1.0)
    state.check()
    assert chosen("kvcache-centric", state, "c").terms.transfer_s == pytest.approx(first.terms.transfer_s)


def test_of_several_nodes_with_the_longest_prefix_the_least_busy_one_sends() -> None:
    state = cluster()
    state.index.stored_run(KEYS, 0, 21, "dram")
    state.index.stored_run(KEYS, 0, 22, "dram")
    for instance in (1, 2):
        busy(state, instance, 5000)
    chosen("kvcache-centric", state, "a")
    state.start("a", 0.0)
    state.flows.begin("a", [0])
    assert chosen("kvcache-centric", state, "b").terms.transfer_s == pytest.approx(10 * BLOCK_NBYTES / 1e9)


def test_blocks_on_ssd_count_with_the_time_to_load_them() -> None:
    state = cluster()
    state.index.stored_run(KEYS, 0, 21, "ssd")
    placement = chosen("kvcache-centric", state)
    assert placement.fetch
    assert placement.terms.transfer_s == pytest.approx(2 * 10 * BLOCK_NBYTES / 1e9)


def test_blocks_on_ssd_of_the_only_node_are_not_transferred() -> None:
    state = cluster(instances=1)
    state.index.stored_run(KEYS, 0, 21, "ssd")
    terms = chosen("kvcache-centric", state).terms
    assert terms.transfer_s == pytest.approx(10 * BLOCK_NBYTES / 1e9 + 10 * BLOCK_NBYTES / 5e9)


def test_loads_from_dram_of_the_node_and_messages_delay_the_first_token_and_decide_nothing() -> None:
    state = cluster(instances=1)
    state.index.stored_run(KEYS[:8], 0, 21, "dram")
    state.note_pages(1, KEYS[:3], [])
    state.costs.measured_messages(0.25)
    terms = chosen("kvcache-centric", state).terms
    assert terms.start_s == pytest.approx(0.25 + 5 * BLOCK_NBYTES / 5e9), "8 blocks, 3 of them in its pages"
    assert terms.ttft_s == pytest.approx(terms.score + terms.start_s)


def test_blocks_on_ssd_alone_are_fetched_below_the_threshold_too() -> None:
    state = cluster(instances=1)
    state.index.stored_run(KEYS[:8], 0, 21, "dram")
    state.index.stored_run(KEYS, 0, 21, "ssd")
    placement = chosen("kvcache-centric", state)
    assert (placement.fetch, placement.terms.near_blocks, placement.terms.reused_blocks) == (True, 8, 10)


def test_decode_goes_to_the_instance_that_will_be_fastest_with_the_request() -> None:
    state = cluster()
    state.add_instance(12, 0, ["decode"], 999)
    places = [chosen("kvcache-centric", state, f"r{number}") for number in range(4)]
    assert [place.decode for place in places] == [11, 12, 11, 12]


# ------------------------------------------------------------------------------ racks


def racked(racks: list[int], rack_bytes_per_s: float = 0.0, far_bytes_per_s: float = 1e9) -> s.State:
    """Four nodes of a `cluster` in these racks."""
    return cluster(4, far_bytes_per_s, rack_bytes_per_s, racks)


def test_topology_fetches_from_the_rack_what_would_take_too_long_from_elsewhere() -> None:
    """Node 0 reads 6 blocks in its rack in 0.6 s. The other 4 would take 40 s, and 2.56 s to compute."""
    state = racked([0, 0, 1, 1], rack_bytes_per_s=10 * BLOCK_NBYTES, far_bytes_per_s=BLOCK_NBYTES / 10)
    state.index.stored_run(KEYS[:6], 0, 22, "dram")
    state.index.stored_run(KEYS, 0, 23, "dram")
    for instance in (2, 3, 4):
        busy(state, instance, 5000)
    placement = chosen("topology", state)
    assert (placement.prefill, placement.fetch, placement.most_blocks) == (1, True, 6)
    assert placement.terms.reused_blocks == 6
    assert placement.terms.transfer_s == pytest.approx(0.6)
    assert placement.terms.score == pytest.approx(0.6 + 3.16)


def test_topology_reads_what_is_in_the_rack_there_and_the_rest_from_afar() -> None:
    state = racked([0, 0, 1, 1], rack_bytes_per_s=10 * BLOCK_NBYTES, far_bytes_per_s=5 * BLOCK_NBYTES)
    state.index.stored_run(KEYS[:6], 0, 22, "dram")
    state.index.stored_run(KEYS, 0, 23, "dram")
    for instance in (2, 3, 4):
        busy(state, instance, 5000)
    placement = chosen("topology", state)
    assert (placement.prefill, placement.fetch, placement.most_blocks) == (1, True, None)
    assert placement.terms.transfer_s == pytest.approx(6 / 10 + 4 / 5)


def test_nodes_of_a_rack_have_a_prefix_together() -> None:
    state = racked([0, 0, 0, 1], rack_bytes_per_s=1e9, far_bytes_per_s=1.0)
    state.index.stored_run(KEYS[:4], 0, 22, "dram")
    state.index.stored_run(KEYS[4:], 4, 23, "dram")
    for instance in (2, 3):
        busy(state, instance, 5000)
    placement = chosen("topology", state)
    assert (placement.prefill, placement.terms.reused_blocks) == (1, 10)


def decoding(state: s.State, instance: int, sequences: int) -> None:
    """Let an instance decode."""
    for number in range(sequences):
        wanted = s.Request(f"{instance}-{number}", 1, (), BLOCK_TOKENS, 16)
        state.resume(wanted, s.Placement(wanted.request_id, 1, instance, False, 0, NO_TERMS), 0.0)


def test_topology_decodes_in_the_rack_until_others_are_so_idle_that_the_way_pays() -> None:
    """The KV of 700 tokens takes 11 s to the other rack; each sequence adds 0.1 s to each of 16 tokens."""
    for sequences, instance in ((1, 12), (5, 12), (9, 11)):
        state = racked([0, 0, 1, 1], rack_bytes_per_s=1e12, far_bytes_per_s=BLOCK_NBYTES)
        state.add_instance(12, 2, ["decode"], 999)
        costs = msgspec.structs.replace(state.costs.config, decode=DecodeCost(0.0, 0.1, 0.0))
        state.costs = Costs(costs)
        for prefill in (1, 2):
            busy(state, prefill, 5000)
        decoding(state, 12, sequences)
        wanted = s.Request("a", 700, (), BLOCK_TOKENS, 16, predicted_tokens=16.0)
        placement = s.choose(POLICIES["topology"](), state, wanted, 0.0)
        assert isinstance(placement, s.Placement)
        assert (placement.prefill in (3, 4), placement.decode) == (True, instance), sequences


def test_topology_counts_the_way_to_the_decode_instance_for_the_prefill_instance() -> None:
    """Only rack 0 decodes. Rack 1 is idle, but its KV would come 11 s later."""
    for wait_tokens, racks in ((900, (0,)), (1300, (1,))):
        state = racked([0, 0, 1, 1], rack_bytes_per_s=1e12, far_bytes_per_s=BLOCK_NBYTES)
        for prefill in (1, 2):
            busy(state, prefill, wait_tokens)
        assert (chosen("topology", state).prefill - 1) // 2 in racks


def test_prompts_with_enough_tokens_to_compute_are_prefilled_where_nothing_decodes() -> None:
    for far_tokens, cached, far in ((701, 0, False), (700, 0, True), (700, 1, False), (0, 10, True)):
        state = racked([0, 0, 1, 1])
        state.index.stored_run(KEYS[:cached], 0, 21, "dram")
        wanted = s.Request("a", 700, KEYS, BLOCK_TOKENS, 16)
        placement = s.choose(policy_of("topology", far_tokens=far_tokens), state, wanted, 0.0)
        assert isinstance(placement, s.Placement)
        assert (placement.prefill > 2) == far, (far_tokens, cached)


@pytest.mark.parametrize("racks", [[0, 0, 0, 0], []])
def test_with_one_rack_or_without_racks_topology_is_global_cache(racks: list[int]) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        far_bytes_per_s = 10.0 ** rng.randrange(6, 10)
        states = [racked(racks, far_bytes_per_s=far_bytes_per_s) for _ in range(2)]
        runs = [(rng.randrange(11), 21 + rng.randrange(4)) for _ in range(3)]
        waits = [rng.randrange(1000) for _ in range(4)]
        for state in states:
            for blocks, holder in runs:
                state.index.stored_run(KEYS[:blocks], 0, holder, "dram")
            for instance, tokens in enumerate(waits, 1):
                busy(state, instance, 1 + tokens)
        topology, everywhere = chosen("topology", states[0]), chosen("global-cache", states[1])
        terms = [msgspec.structs.asdict(one.terms) for one in (topology, everywhere)]
        assert terms[0] == pytest.approx(terms[1]), seed
        assert (topology.prefill, topology.fetch) == (everywhere.prefill, everywhere.fetch), seed
