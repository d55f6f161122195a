"""Placement policies as sentences."""

from __future__ import annotations

import random

import pytest

import scheduler as s
from scheduler.placement import POLICIES
from tests.python import printed_by
from tests.scheduler.cluster import BLOCK_TOKENS, NO_TERMS, POLICY, choose, cluster, placed, request, started

pytestmark = pytest.mark.quick


def test_a_request_is_refused_before_any_instance_has_joined() -> None:
    refused = choose(s.State(8), request("a"), 0.0)
    assert refused == s.Rejection("a", "no prefill or no decode instance has joined", 1.0)
    for half in (cluster(prefill=0), cluster(decode=0)):
        assert isinstance(choose(half, request("a"), 0.0), s.Rejection)


def test_a_prefix_in_the_dram_of_a_node_attracts_the_request_to_that_node() -> None:
    state = cluster(prefill=2, decode=2)
    for key in (7, 8, 9):
        state.index.stored(key, 22, "dram")
    placement = placed(state, "a", 640, (7, 8, 9, 10))
    assert (placement.prefill, placement.decode, placement.cached_tokens) == (2, 11, 192)
    assert (placement.terms.near_blocks, placement.terms.reused_blocks, placement.fetch) == (3, 3, False)
    assert placement.terms.score == placement.terms.ttft_s == pytest.approx(448 * 0.005)


def test_a_prefix_in_the_pages_of_an_instance_attracts_the_request_to_it() -> None:
    state = cluster(prefill=2, decode=2)
    state.note_pages(2, [7, 8, 9], [])
    placement = placed(state, "a", 640, (7, 8, 9, 10))
    assert (placement.prefill, placement.cached_tokens, placement.terms.near_blocks) == (2, 192, 3)


def test_pages_that_an_instance_has_evicted_attract_no_request() -> None:
    state = cluster(prefill=2, decode=2)
    state.note_pages(2, [7, 8, 9], [])
    state.note_pages(2, [], [7])
    assert placed(state, "a", 640, (7, 8, 9, 10)).prefill == 1


def test_what_a_decode_instance_reports_changes_nothing() -> None:
    state = cluster(prefill=2, decode=2)
    state.note_pages(11, [7, 8, 9], [])
    assert placed(state, "a", 640, (7, 8, 9, 10)).cached_tokens == 0


def test_blocks_that_are_not_leading_attract_no_request() -> None:
    state = cluster(prefill=2)
    for key in (8, 9, 10):
        state.index.stored(key, 22, "dram")
    assert placed(state, "a", 640, (7, 8, 9, 10)).prefill == 1


def test_a_prefix_attracts_until_its_node_has_that_many_more_tokens_pending() -> None:
    """A prefix of 192 tokens is worth 192 tokens of waiting, no more."""
    for busy_tokens, chosen in ((191, 1), (193, 2)):
        state = cluster(prefill=2)
        for key in (7, 8, 9):
            state.index.stored(key, 21, "dram")
        assert placed(state, "busy", busy_tokens).prefill == 1
        assert placed(state, "a", 640, (7, 8, 9, 10)).prefill == chosen, busy_tokens


def test_prompts_that_share_one_block_do_not_all_go_to_the_node_that_has_it() -> None:
    state = cluster(prefill=4, slots=100)
    state.index.stored(7, 21, "dram")
    chosen = [placed(state, f"r{i}", 640, (7, 100 + i)).prefill for i in range(40)]
    assert all(9 <= chosen.count(instance) <= 11 for instance in (1, 2, 3, 4))


def test_equal_scores_go_to_the_lower_number() -> None:
    state = cluster(prefill=3, decode=2)
    assert [placed(state, name).prefill for name in "abcd"] == [1, 2, 3, 1]


def test_a_block_on_ssd_attracts_no_request() -> None:
    state = cluster(prefill=2)
    placed(state, "busy", 10)
    state.index.stored(7, 21, "ssd")
    placement = placed(state, "a", 640, (7,))
    assert (placement.prefill, placement.cached_tokens, placement.terms.best_blocks) == (2, 0, 1)


def test_the_last_token_of_a_full_hit_is_still_computed() -> None:
    state = cluster()
    state.index.stored(7, 21, "dram")
    placement = placed(state, "a", 64, (7,))
    assert (placement.cached_tokens, placement.terms.near_blocks) == (63, 1)
    assert state.prefills[1].pending_tokens == 1


def test_decode_goes_to_the_least_predicted_time_between_tokens_and_then_to_the_lower_number() -> None:
    state = cluster(decode=2, slots=2)
    state.add_instance(13, 0, ["decode"], 3)
    assert [placed(state, f"r{i}").decode for i in range(7)] == [11, 12, 13, 11, 12, 13, 13]


def test_a_request_waits_while_no_decode_instance_has_a_free_slot() -> None:
    state = cluster(slots=1)
    placed(state, "a")
    assert isinstance(choose(state, request("b"), 0.0), s.Wait)
    started(state)
    state.end_prefill("a", 0.0)
    assert isinstance(choose(state, request("b"), 0.0), s.Wait)
    state.forget("a", 0.0)
    assert isinstance(choose(state, request("b"), 0.0), s.Placement)


def random_cluster(rng: random.Random) -> s.State:
    state = cluster(prefill=rng.randrange(1, 6), decode=rng.randrange(1, 4), slots=6, max_queue=99)
    for number in range(rng.randrange(3)):
        state.add_instance(8 + number, number, ["prefill", "decode"], 2)
    for _ in range(30):
        state.index.stored(rng.randrange(12), rng.choice([21, 22]), rng.choice(["dram", "ssd"]))
    return state


def random_request(rng: random.Random, name: str) -> s.Request:
    first = rng.randrange(8)
    keys = tuple(range(first, first + rng.randrange(6)))
    return request(name, len(keys) * BLOCK_TOKENS + rng.randrange(1, 64), keys)


def changed(rng: random.Random, state: s.State) -> None:
    """Change the pool and the pages at random."""
    key, tier = rng.randrange(12), rng.choice(["dram", "ssd"])
    rng.choice([state.index.stored, state.index.removed])(key, rng.choice([21, 22]), tier)
    chain = list(range(rng.randrange(6), rng.randrange(6, 12)))
    state.index.stored_run(chain, chain[0], rng.choice([21, 22]), "dram")
    rng.choice([state.pages.stored, state.pages.removed])(key, 1, "dram")


@pytest.mark.parametrize("seed", range(20))
def test_a_choice_changes_no_answer_of_the_books(seed: int) -> None:
    """Two clusters with one history, and only one of them is asked for places that no request takes."""
    print("seed", seed)
    asked, left_alone = (random_cluster(random.Random(seed)) for _ in range(2))
    questions = random.Random(seed + 1)
    for step in range(60):
        for state in (asked, left_alone):
            changed(random.Random(f"{seed} {step}"), state)
        for _ in range(3):
            wanted = random_request(questions, "question")
            assert s.explain(POLICY, asked, wanted, float(step)) == s.explain(
                POLICY, asked, wanted, float(step)
            )
        if step % 10 == 9:
            wanted = random_request(questions, f"r{step}")
            first, second = (choose(state, wanted, float(step)) for state in (asked, left_alone))
            assert first == second
            if isinstance(first, s.Placement):
                asked.place(wanted, first, float(step))
                left_alone.place(wanted, first, float(step))
        assert asked.index.places() == left_alone.index.places()
        assert asked.pages.places() == left_alone.pages.places()
        assert [*asked.queue_s(step)] == [*left_alone.queue_s(step)]
        assert "question" not in asked
        asked.check()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(20))
def test_the_first_row_of_the_explanation_is_the_choice_and_its_terms(seed: int, name: str) -> None:
    print("seed", seed)
    rng, policy = random.Random(seed), POLICIES[name]()
    state = random_cluster(rng)
    state.block_nbytes = 1 << 20
    for step in range(40):
        wanted = random_request(rng, f"r{step}")
        choice = s.choose(policy, state, wanted, float(step))
        table = s.explain(policy, state, wanted, float(step))
        if isinstance(choice, s.Wait):
            assert table == []
            state.forget(f"r{rng.randrange(step)}", float(step))
            continue
        assert isinstance(choice, s.Placement)
        assert len(table) == len(state.open_prefills())
        first = table[0]
        assert (choice.prefill, choice.decode, choice.terms) == (first.prefill, first.decode, first.terms)
        assert choice.terms.score == min(row.terms.score for row in table)
        state.place(wanted, choice, 0.0)


def test_the_same_history_gives_the_same_answers_in_every_process() -> None:
    found, again = (printed_by("-m", "tests.scheduler.history", PYTHONHASHSEED=seed) for seed in ("1", "2"))
    assert found == again
    for kind in ("Placement", "Wait", "Rejection", "the predicted wait is", "requests are waiting"):
        assert kind in found, kind


def colocated(*slots: int) -> s.State:
    """Instances 1, 2, ... of both duties."""
    state = cluster(prefill=0, decode=0)
    for number, count in enumerate(slots, 1):
        state.add_instance(number, 0, ["prefill", "decode"], count)
    return state


def test_an_instance_of_both_duties_decodes_what_it_prefills() -> None:
    state = colocated(4, 4)
    places = [placed(state, f"r{number}") for number in range(8)]
    assert all(place.prefill == place.decode for place in places)
    assert {1, 2} == {place.prefill for place in places}
    state.forget("r0", 0.0)
    state.forget("r1", 0.0)
    with pytest.raises(AssertionError, match="decodes what it prefills"):
        state.place(request("r0"), s.Placement("r0", 1, 2, False, 0, NO_TERMS), 0.0)


def test_of_idle_instances_of_both_duties_the_one_with_more_free_decode_slots_is_chosen() -> None:
    state = colocated(4, 4)
    for name in "abc":
        placed(state, name)
        started(state)
        state.end_prefill(name, 0.0)
    assert [len(one.taken) for one in state.decodes.values()] == [2, 1]
    assert placed(state, "d").prefill == 2


def test_an_instance_of_both_duties_without_a_free_decode_slot_is_no_candidate() -> None:
    state = colocated(1, 2)
    assert [placed(state, name).prefill for name in "abc"] == [1, 2, 2]
    assert not len(state.open_prefills())
    assert isinstance(choose(state, request("d"), 0.0), s.Wait)
    state.forget("a", 0.0)
    assert state.prefill_columns.instance[state.open_prefills()].tolist() == [1]
    assert placed(state, "d").prefill == 1


def test_answers_to_one_prompt_take_a_slot_each_on_one_instance_until_they_end() -> None:
    state = cluster(decode=2, slots=4)
    for name, instance in (("a", 11), ("b", 12)):
        assert placed(state, name, n=3).decode == instance
        state.check()
    assert isinstance(choose(state, request("c", n=2), 0.0), s.Wait), "two slots are free, on two instances"
    state.keep_slots("b", 2, 0.0)
    state.check()
    choice = choose(state, request("c", n=2), 0.0)
    assert isinstance(choice, s.Placement)
    assert choice.decode == 12
    state.forget("a", 0.0)
    assert state.decodes[11].free == 4
    refused = choose(state, request("d", n=5), 0.0)
    assert isinstance(refused, s.Rejection)
    assert refused.reason == "5 answers need as many decode slots, an instance has 4"
