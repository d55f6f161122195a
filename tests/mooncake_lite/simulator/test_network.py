"""Senders share their bandwidth equally; copies within a node do not."""

from __future__ import annotations

import pytest

from mooncake_lite.simulator.clock import Clock
from mooncake_lite.simulator.network import Network

pytestmark = pytest.mark.quick


def ends(*moves: tuple[float, dict[tuple[int, int], int]]) -> list[float]:
    """Begin moves at their times, on a network of 100 B/s, 1,000 B/s within a node. Returns their ends."""
    clock = Clock()
    network = Network(clock, near_bytes_per_s=1000.0, far_bytes_per_s=100.0, latency_s=0.5)
    found = [0.0] * len(moves)

    def begin(number: int, parts: dict[tuple[int, int], int]) -> None:
        network.move(parts, lambda: found.__setitem__(number, clock.now))

    for number, (at, parts) in enumerate(moves):
        clock.at(at, lambda number=number, parts=parts: begin(number, parts))
    while clock.step():
        pass
    return found


def test_a_transfer_alone_has_the_bandwidth_of_its_sender() -> None:
    assert ends((1.0, {(0, 1): 200})) == pytest.approx([3.5])


def test_two_transfers_of_one_sender_share_its_bandwidth_while_both_are_under_way() -> None:
    # The first one sends 100 B alone, then 100 B at half the rate. The second one then sends the rest alone.
    assert ends((0.0, {(0, 1): 200}), (1.0, {(0, 2): 200})) == pytest.approx([3.5, 4.5])


def test_transfers_of_different_senders_do_not_slow_each_other() -> None:
    assert ends((0.0, {(0, 2): 200}), (0.0, {(1, 2): 200})) == pytest.approx([2.5, 2.5])


def test_equal_transfers_end_together() -> None:
    assert ends((0.0, {(0, 1): 100}), (0.0, {(0, 2): 100})) == pytest.approx([2.5, 2.5])


def test_a_move_ends_with_its_last_part_and_a_near_part_has_no_latency() -> None:
    assert ends((0.0, {(1, 1): 1000, (0, 1): 20})) == pytest.approx([1.0])
    assert ends((0.0, {(1, 1): 100, (0, 1): 20})) == pytest.approx([0.7])


def test_nothing_to_move_takes_no_time() -> None:
    assert ends((2.0, {})) == ends((2.0, {(0, 1): 0})) == [2.0]
