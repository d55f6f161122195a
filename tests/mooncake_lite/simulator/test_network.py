"""Rates are max-min fair, and flows take as long as their bytes need at these rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lite.simulator.clock import Clock
from mooncake_lite.simulator.network import Link, Network, max_min

pytestmark = pytest.mark.quick

Flows = Sequence[Sequence[Link]]
NEAR = 1e-9
"""Relative error that rounding may cause."""

CAPACITIES = st.lists(st.integers(1, 1000), min_size=12, max_size=12)
FLOWS = st.lists(
    st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True).map(tuple), min_size=1, max_size=40
)


def exact(flows: Flows, capacities: Mapping[Link, int]) -> list[Fraction]:
    """Fill links in steps: find the fullest one, give its flows their share, take them out."""
    rates: dict[int, Fraction] = {}
    while len(rates) < len(flows):
        shares = {}
        for link in capacities:
            on = [number for number, links in enumerate(flows) if link in links]
            free = capacities[link] - sum((rates[number] for number in on if number in rates), Fraction())
            if growing := [number for number in on if number not in rates]:
                shares[free / len(growing)] = growing
        least = min(shares)
        rates.update(dict.fromkeys(shares[least], least))
    return [rates[number] for number in range(len(flows))]


@given(FLOWS, CAPACITIES)
def test_rates_are_those_of_an_exact_oracle(flows: Flows, capacities: list[int]) -> None:
    named = dict(enumerate(capacities))
    assert max_min(flows, named) == pytest.approx([float(rate) for rate in exact(flows, named)], rel=NEAR)


@given(FLOWS, CAPACITIES)
def test_every_flow_has_a_full_link_on_which_no_rate_is_higher(flows: Flows, capacities: list[int]) -> None:
    rates = max_min(flows, dict(enumerate(capacities)))
    on = defaultdict(list)
    for links, rate in zip(flows, rates):
        for link in links:
            on[link].append(rate)
    for link, shares in on.items():
        assert sum(shares) <= capacities[link] * (1 + NEAR)
    for links, rate in zip(flows, rates):
        assert any(
            sum(on[link]) >= capacities[link] * (1 - NEAR) and rate >= max(on[link]) * (1 - NEAR)
            for link in links
        )


@given(st.permutations(range(12)), FLOWS, CAPACITIES, st.randoms(use_true_random=False))
def test_rates_do_not_depend_on_the_order_or_the_numbers_of_flows_and_links(
    renamed: list[int], flows: Flows, capacities: list[int], dice: Random
) -> None:
    order = dice.sample(range(len(flows)), len(flows))
    others = [
        tuple(dice.sample([renamed[link] for link in flows[number]], len(flows[number]))) for number in order
    ]
    found = max_min(others, {renamed[link]: capacity for link, capacity in enumerate(capacities)})
    rates = max_min(flows, dict(enumerate(capacities)))
    assert found == pytest.approx([rates[number] for number in order], rel=NEAR)


def test_a_worked_example() -> None:
    # Link 1 is full first: both of its flows get 4. The first flow gets what they leave of link 0.
    assert max_min([(0,), (0, 1), (1, 2)], {0: 10.0, 1: 8.0, 2: 100.0}) == [6.0, 4.0, 4.0]
    assert max_min([], {}) == []


# ------------------------------------------------------------------------------ flows in time

Sent = tuple[float, Sequence[Link], int]
"""When a flow begins, its links, its bytes."""


def played(sent: Sequence[Sent], capacities: Mapping[Link, float]) -> tuple[list[float], list[int], Clock]:
    """Send flows. Returns when each was done, the order in which they were, and the clock."""
    clock, order = Clock(), list[int]()
    network, ends = Network(clock, capacities.__getitem__), [-1.0] * len(sent)

    def done(number: int) -> None:
        ends[number] = clock.now
        order.append(number)

    for number, (at, links, nbytes) in enumerate(sent):
        clock.at(
            at,
            lambda links=links, nbytes=nbytes, number=number: network.send(
                links, nbytes, lambda: done(number)
            ),
        )
    while clock.step():
        pass
    return ends, order, clock


def fluid(sent: Sequence[Sent], capacities: Mapping[Link, int]) -> list[Fraction]:
    """Return when each flow ends: all rates are computed anew whenever any flow begins or ends."""
    now, left, ends = Fraction(), dict[int, Fraction](), dict[int, Fraction]()
    coming = sorted(range(len(sent)), key=lambda number: sent[number][0])
    while coming or left:
        rates = dict(zip(left, exact([sent[number][1] for number in left], capacities)))
        until = [now + left[number] / rates[number] for number in left]
        until += [Fraction(sent[number][0]) for number in coming[:1]]
        for number in left:
            left[number] -= (min(until) - now) * rates[number]
        now = min(until)
        for number in [number for number in left if not left[number]]:
            del left[number]
            ends[number] = now
        while coming and sent[coming[0]][0] <= now:
            left[coming[0]] = Fraction(sent[coming[0]][2])
            del coming[0]
    return [ends[number] for number in range(len(sent))]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 40).map(float),
            st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True).map(tuple),
            st.integers(1, 5000),
        ),
        min_size=1,
        max_size=12,
    ),
    CAPACITIES,
)
def test_flows_end_when_their_bytes_have_left_at_max_min_rates(
    sent: list[Sent], capacities: list[int]
) -> None:
    named = dict(enumerate(capacities))
    ends, order, _ = played(sent, named)
    assert ends == pytest.approx([float(end) for end in fluid(sent, named)], rel=1e-9, abs=1e-9)
    assert sorted(order) == list(range(len(sent)))
    assert (ends, order) == played(sent, named)[:2]


def test_a_flow_alone_has_the_least_capacity_of_its_links() -> None:
    assert played([(1.0, (0, 1, 2), 200)], {0: 400.0, 1: 100.0, 2: 200.0})[0] == [3.0]


def test_two_flows_share_a_link_while_both_are_under_way() -> None:
    # The first one sends 100 B alone, then 100 B at half the rate. The second one then sends the rest alone.
    sent = [(0.0, (0, 2), 200), (1.0, (1, 2), 200)]
    assert played(sent, dict.fromkeys(range(3), 100.0))[0] == [3.0, 4.0]


def test_flows_without_a_common_link_do_not_slow_each_other() -> None:
    assert played([(0.0, (0,), 200), (0.0, (1,), 200)], {0: 100.0, 1: 100.0})[0] == [2.0, 2.0]


def test_flows_that_end_together_are_done_in_the_order_in_which_they_were_sent() -> None:
    # Each link is a component of its own. All flows end after 3 s; some began later, or on a faster link.
    sent = [(1.0, (0,), 200), (0.0, (0,), 400), (0.0, (1,), 300), (0.0, (2,), 450), (1.5, (2,), 150)]
    sent += [(0.0, (3,), 30), (0.0, (3,), 30)]
    capacities = {0: 200.0, 1: 100.0, 2: 200.0, 3: 20.0}
    ends, order, _ = played(sent, capacities)
    assert ends == [3.0] * len(sent)
    assert order == [number for number, _ in sorted(enumerate(sent), key=lambda each: each[1][0])]


def test_latency_comes_on_top_and_no_bytes_take_no_time() -> None:
    clock, ends = Clock(), list[tuple[str, float]]()
    network = Network(clock, lambda link: 100.0)
    network.send((0,), 100, lambda: ends.append(("slow", clock.now)), latency_s=0.5)
    network.send((0,), 100, lambda: ends.append(("fast", clock.now)))
    network.send((0,), 0, lambda: ends.append(("none", clock.now)))
    while clock.step():
        pass
    assert ends == [("none", 0.0), ("fast", 2.0), ("slow", 2.5)]


def test_a_flow_that_others_slow_down_leaves_few_events_on_the_clock() -> None:
    clock = Clock()
    network, waiting = Network(clock, lambda link: 1000.0), list[int]()

    def next_one(left: int) -> None:
        waiting.append(len(clock._heap))
        if left:
            network.send((1, 2), 10, lambda: next_one(left - 1))

    network.send((0, 1), 100_000, lambda: None)
    network.send((2, 3), 100_000, lambda: None)
    next_one(1000)
    while clock.step():
        pass
    assert max(waiting) <= 3


@given(
    st.lists(
        st.tuples(
            st.integers(0, 20).map(float),
            st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True).map(tuple),
            st.integers(1, 5000),
            st.none() | st.integers(1, 500),
        ),
        min_size=1,
        max_size=5,
    ),
    CAPACITIES,
)
def test_a_flow_that_comes_slowly_is_one_that_passes_a_link_of_its_own(
    sent: list[tuple[float, tuple[Link, ...], int, int | None]], capacities: list[int]
) -> None:
    named, ends = dict(enumerate(capacities)), [-1.0] * len(sent)
    clock = Clock()
    network = Network(clock, named.__getitem__)

    def send(number: int) -> None:
        _, links, nbytes, most = sent[number]
        network.send(links, nbytes, lambda: ends.__setitem__(number, clock.now), most=most or inf)

    for number, (at, *_) in enumerate(sent):
        clock.at(at, partial(send, number))
    while clock.step():
        pass
    slow = {12 + number: most for number, (*_, most) in enumerate(sent) if most}
    flows = [
        (at, (*links, 12 + number) if most else links, nbytes)
        for number, (at, links, nbytes, most) in enumerate(sent)
    ]
    expected = fluid(flows, {**named, **slow})
    assert ends == pytest.approx([float(end) for end in expected], rel=1e-9, abs=1e-9)
    assert min(network._on) >= 0 <= min(network._capacities), "links of single flows are gone"
