"""Closed forms: against values that books give, against queues and batches that are played, and bounds."""

from __future__ import annotations

from math import inf
from random import Random

import numpy as np
import pytest

from mooncake_lite.planner import forms
from mooncake_lite.planner.bounds import central_queue_s
from scheduler.costs import DecodeCost

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("servers", "load", "probability"),
    [(1, 0.5, 0.5), (1, 0.9, 0.9), (2, 1.0, 1 / 3), (3, 2.0, 4 / 9), (10, 8.0, 0.409180)],
)
def test_the_probability_to_wait_is_erlangs(servers: int, load: float, probability: float) -> None:
    assert forms.erlang_c(servers, load) == pytest.approx(probability, abs=1e-6)


def test_one_server_waits_as_pollaczek_and_khinchine_say() -> None:
    service_s = np.array([0.1, 0.1, 0.4, 1.0])
    rate = 1.5
    mean_s, square = service_s.mean(), (service_s**2).mean()
    exact_s = rate * square / (2 * (1 - rate * mean_s))
    assert forms.wait_of(rate, service_s, 1).mean_s == pytest.approx(exact_s)


def test_an_overloaded_queue_waits_for_ever() -> None:
    wait = forms.wait_of(2.1, np.array([0.5, 0.5]), 1)
    assert wait.mean_s == inf
    assert forms.share_within(1e9, wait, np.array([0.5])) == 0


def quantile_s(share: float, wait: forms.Wait, service_s: np.ndarray) -> float:
    """The TTFT that this share of requests stays within, by `share_within`."""
    low, high = 0.0, float(service_s.max()) + 50 * wait.mean_s
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if forms.share_within(middle, wait, service_s) >= share else (middle, high)
    return high


@pytest.mark.parametrize("servers", [1, 2, 4, 8])
@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("kind", ["exponential", "lengths of prompts"])
def test_the_wait_is_that_of_a_central_queue(servers: int, load: float, kind: str) -> None:
    """Within 15 % in mean and 90th percentile of TTFT, over eight seeds of 5,000 requests."""
    means, tails, service_s = list[float](), list[float](), np.zeros(0)
    for seed in range(8):
        dice = np.random.default_rng(seed)
        drawn = dice.exponential(1.0, 5_000) if kind == "exponential" else dice.lognormal(0, 1.0, 5_000)
        service_s = np.concatenate([service_s, drawn])
        arrived_s = np.cumsum(dice.exponential(drawn.mean() / (servers * load), len(drawn)))
        ttft_s = central_queue_s(arrived_s.tolist(), drawn.tolist(), servers, range(len(drawn)))
        means.append(float(np.mean(ttft_s)))
        tails.append(float(np.quantile(ttft_s, 0.9)))
    wait = forms.wait_of(servers * load / service_s.mean(), service_s, servers)
    assert wait.mean_s + service_s.mean() == pytest.approx(np.mean(means), rel=0.15)
    assert quantile_s(0.9, wait, service_s) == pytest.approx(np.mean(tails), rel=0.15)


@pytest.mark.parametrize("rate", [0.5, 2.0, 3.0])
def test_the_step_is_the_fixed_point_of_a_batch_that_is_played(rate: float) -> None:
    """A batch in which sequences come at random and stay for their answers, step by step."""
    cost, dice = DecodeCost(0.02, 0.0004, 2e-8), np.random.default_rng(3)
    count = 4_000
    tokens, answers = dice.integers(500, 20_000, count), dice.integers(2, 600, count)
    arrived_s, now, begun, running = np.cumsum(dice.exponential(1 / rate, count)), 0.0, 0, list[list[int]]()
    batches, contexts, steps = list[int](), list[int](), list[float]()
    while begun < count:
        while begun < count and arrived_s[begun] <= now:
            running.append([int(answers[begun]) - 1, int(tokens[begun]) + 1])
            begun += 1
        if not running:
            now = float(arrived_s[begun])
            continue
        took_s = float(cost.step_s(len(running), sum(one[1] for one in running)))
        batches.append(len(running))
        contexts.append(sum(one[1] for one in running))
        steps.append(took_s)
        now += took_s
        running = [[left - 1, context + 1] for left, context in running if left > 1]
    step_s = forms.step_s(rate, tokens, answers, cost)
    weights = np.array(steps)
    assert rate * (answers - 1).mean() * step_s == pytest.approx(
        np.average(batches, weights=weights), rel=0.1
    )
    mean, deviation = forms.kv_tokens(rate, tokens, answers, step_s, cost.base_s)
    assert mean == pytest.approx(np.average(contexts, weights=weights), rel=0.1)
    spread = (
        np.average((np.array(contexts) - np.average(contexts, weights=weights)) ** 2, weights=weights) ** 0.5
    )
    assert deviation == pytest.approx(spread, rel=0.2)


def test_no_batch_is_stable_that_adds_more_than_a_step_to_a_step() -> None:
    cost = DecodeCost(0.02, 0.001, 0.0)
    ids = np.array([100])
    assert forms.step_s(9.9, ids, np.array([101]), cost) == pytest.approx(0.02 / 0.01)
    assert forms.step_s(10.0, ids, np.array([101]), cost) == inf


def test_short_answers_are_as_slow_as_their_first_gap() -> None:
    answers, gap_s = np.array([2, 11, 12, 101, 1]), np.full(5, 0.5)
    assert forms.tbt_s(answers, 0.03, gap_s).tolist() == pytest.approx([0.5, 0.5, 0.265, 0.077, 0])
    assert forms.tpot_s(answers, 0.03, gap_s).tolist() == pytest.approx([0.5, 0.077, 0.8 / 11, 0.0347, 0])


def test_more_of_what_serves_never_waits_longer() -> None:
    dice = Random(5)
    for _ in range(200):
        service_s = np.array([dice.lognormvariate(0, dice.random()) for _ in range(20)])
        servers, load = dice.randint(1, 20), dice.uniform(0.05, 0.99)
        rate = load * servers / service_s.mean()
        wait = forms.wait_of(rate, service_s, servers)
        assert forms.wait_of(rate, service_s, servers + 1).mean_s <= wait.mean_s
        assert forms.wait_of(2 * rate, service_s, 2 * servers).mean_s <= wait.mean_s * (1 + 1e-9)
        assert forms.wait_of(rate, service_s, servers, 2.0).mean_s >= wait.mean_s
        shares = [forms.share_within(limit_s, wait, service_s) for limit_s in (0.1, 0.5, 1, 5, 50)]
        assert shares == sorted(shares)


def test_a_first_gap_waits_for_the_loads_of_others() -> None:
    """M/G/1 with a load and a step for each: 2 a second of 0.25 s wait for 0.125 s."""
    gap_s = forms.first_gap_s(2.0, 0.05, np.array([0.1, 0.3]), np.array([0.2, 0.2]))
    assert gap_s.tolist() == pytest.approx([0.1 + 0.125 + 0.2 + 0.1, 0.3 + 0.125 + 0.2 + 0.1])
