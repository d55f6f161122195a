"""The Conductor's policy as sentences. Time is an argument, so nothing here waits."""

import random

import pytest

import scheduler as s

pytestmark = pytest.mark.quick


def request(name: str, tokens: int = 640, keys: tuple[int, ...] = ()) -> s.Request:
    return s.Request(name, tokens, keys, 64, 16)


def conductor(prefill: int = 1, decode: int = 1, slots: int = 4, max_queue: int = 8) -> s.Conductor:
    """Prefill ranks 1.., decode ranks 11.., store ranks 21, 22; odd ones on node 0."""
    policy = s.Conductor(max_queue)
    for i in range(prefill):
        policy.on(s.RankJoined(1 + i, "prefill", i % 2), 0.0)
    for i in range(decode):
        policy.on(s.RankJoined(11 + i, "decode", i % 2, slots), 0.0)
    policy.on(s.RankJoined(21, "store", 0), 0.0)
    policy.on(s.RankJoined(22, "store", 1), 0.0)
    return policy


def test_a_request_is_refused_before_any_rank_has_joined() -> None:
    assert isinstance(s.Conductor(8).decide(request("a"), 0.0), s.Rejection)


@pytest.mark.parametrize("holder", [2, 22, 12], ids=["prefill", "store", "decode"])
def test_a_prefix_in_the_dram_of_a_node_draws_the_request_to_that_node_whoever_lends_it(holder: int) -> None:
    policy = conductor(prefill=2, decode=2)
    for key in (7, 8, 9):
        policy.on(s.BlockStored(key, holder, "dram"), 0.0)
    placement = policy.decide(request("a", 640, (7, 8, 9, 10)), 0.0)
    assert placement == s.Placement("a", 2, 11, 192)


def test_among_equal_prefixes_the_least_loaded_prefill_rank_wins() -> None:
    policy = conductor(prefill=2)
    assert policy.decide(request("long", 2000), 0.0).prefill == 1
    assert policy.decide(request("short", 100), 0.0).prefill == 2
    assert policy.decide(request("third", 100), 0.0).prefill == 2


def test_a_longer_prefix_wins_over_a_lower_load() -> None:
    policy = conductor(prefill=2)
    policy.on(s.BlockStored(7, 21, "dram"), 0.0)
    policy.decide(request("busy", 4000), 0.0)
    assert policy.decide(request("a", 640, (7,)), 0.0).prefill == 1


def test_a_block_on_ssd_counts_as_cached_but_draws_nobody() -> None:
    policy = conductor(prefill=2)
    policy.decide(request("busy", 4000), 0.0)
    policy.on(s.BlockStored(7, 21, "ssd"), 0.0)
    assert policy.decide(request("a", 640, (7,)), 0.0) == s.Placement("a", 2, 11, 64)


def test_the_last_token_of_a_full_hit_is_still_computed() -> None:
    policy = conductor()
    policy.on(s.BlockStored(7, 21, "dram"), 0.0)
    assert policy.decide(request("a", 64, (7,)), 0.0).cached_tokens == 63


def test_one_request_more_than_the_queue_holds_is_refused_with_a_time_to_retry() -> None:
    policy = conductor(max_queue=2)
    assert isinstance(policy.decide(request("a"), 0.0), s.Placement)
    policy.next_dispatches(0.0)
    for name in "bc":
        assert isinstance(policy.decide(request(name), 0.0), s.Placement)
    refused = policy.decide(request("d"), 0.0)
    assert isinstance(refused, s.Rejection)
    assert refused.retry_after_s >= 1.0
    assert "limit is 2" in refused.reason


def test_retry_after_follows_the_measured_prefill_rate() -> None:
    def refusal(seconds: float) -> float:
        policy = conductor(max_queue=1)
        for i in range(40):
            policy.decide(request(f"warm{i}", 1000), 0.0)
            policy.next_dispatches(0.0)
            policy.on(s.PrefillEnded(f"warm{i}", 1000, seconds), 0.0)
            policy.on(s.DecodeEnded(f"warm{i}"), 0.0)
        policy.decide(request("a", 4000), 0.0)
        return policy.decide(request("b", 4000), 0.0).retry_after_s

    assert refusal(10.0) == pytest.approx(20.0, rel=0.1)
    assert refusal(1.0) < refusal(10.0)


def test_a_prefill_rank_works_on_one_request_at_a_time_in_order_of_arrival() -> None:
    policy = conductor()
    for name in "abc":
        policy.decide(request(name), 0.0)
    assert [p.request_id for p in policy.next_dispatches(0.0)] == ["a"]
    assert policy.next_dispatches(0.0) == []
    policy.on(s.PrefillEnded("a", 640, 1.0), 1.0)
    assert [p.request_id for p in policy.next_dispatches(1.0)] == ["b"]


def test_a_request_waits_until_its_decode_rank_has_a_slot() -> None:
    policy = conductor(slots=1)
    for name in "ab":
        policy.decide(request(name), 0.0)
    policy.next_dispatches(0.0)
    policy.on(s.PrefillEnded("a", 640, 1.0), 1.0)
    assert policy.next_dispatches(1.0) == []
    policy.on(s.DecodeEnded("a"), 2.0)
    assert [p.request_id for p in policy.next_dispatches(2.0)] == ["b"]


def test_a_deferred_request_keeps_its_place_at_the_head() -> None:
    policy = conductor()
    for name in "ab":
        policy.decide(request(name), 0.0)
    policy.next_dispatches(0.0)
    policy.on(s.RequestDeferred("a"), 0.0)
    assert [p.request_id for p in policy.next_dispatches(0.0)] == ["a"]


def test_a_preempted_request_goes_ahead_of_those_that_wait_even_when_the_queue_is_full() -> None:
    policy = conductor(max_queue=1)
    policy.decide(request("a"), 0.0)
    policy.next_dispatches(0.0)
    policy.on(s.PrefillEnded("a", 640, 1.0), 1.0)
    policy.decide(request("b"), 1.0)
    policy.on(s.RequestResumed("a", 700, (), 64, 16), 2.0)
    assert [p.request_id for p in policy.next_dispatches(2.0)] == ["a"]
    policy.check()


def test_the_same_request_id_is_not_taken_twice() -> None:
    policy = conductor()
    policy.decide(request("a"), 0.0)
    assert isinstance(policy.decide(request("a"), 0.0), s.Rejection)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_the_books_balance(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    policy = conductor(prefill=3, decode=2, slots=2, max_queue=6)
    prefilling: list[str] = []
    decoding: list[str] = []
    for step in range(600):
        action = rng.random()
        if action < 0.4:
            policy.decide(request(f"r{step}", rng.randrange(1, 3000)), step)
        elif action < 0.7:
            prefilling += [p.request_id for p in policy.next_dispatches(step)]
        elif action < 0.85 and prefilling:
            name = prefilling.pop(rng.randrange(len(prefilling)))
            if rng.random() < 0.7:
                policy.on(s.PrefillEnded(name, 100, 0.5), step)
                decoding.append(name)
            else:
                policy.on(rng.choice([s.RequestDropped, s.RequestDeferred])(name), step)
        elif decoding:
            name = decoding.pop(rng.randrange(len(decoding)))
            resumed = s.RequestResumed(name, 500, (), 64, 16)
            policy.on(rng.choice([s.DecodeEnded(name), s.RequestDropped(name), resumed]), step)
        policy.on(s.RequestDropped("never heard of"), step)
        policy.check()


def test_the_same_events_give_the_same_decisions() -> None:
    def run() -> list[object]:
        rng = random.Random(3)
        policy = conductor(prefill=3, decode=3)
        found: list[object] = []
        for i in range(100):
            policy.on(s.BlockStored(rng.randrange(20), rng.choice([21, 22]), "dram"), i)
            found.append(policy.decide(request(f"r{i}", 700, tuple(rng.sample(range(20), 4))), i))
            for placement in policy.next_dispatches(i):
                policy.on(s.PrefillEnded(placement.request_id, 700, 0.1), i)
                policy.on(s.DecodeEnded(placement.request_id), i)
        return found

    assert run() == run()
