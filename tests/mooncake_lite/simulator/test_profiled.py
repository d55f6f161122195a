"""Transfers of profiled hardware take what a formula says while they are alone, and share links otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from mooncake_lite.profiles.compute import PassLoad
from mooncake_lite.profiles.file import OverheadsSection
from mooncake_lite.simulator.clock import Action, Clock
from mooncake_lite.simulator.profiled import ProfiledHardware, Sites
from scheduler.costs import CostConfig, LoadCost, TransferCost
from store.objects import BlockRef

pytestmark = pytest.mark.quick

NODES = (0, 1, 2, 3, 0)
"""Ranks 0 and 4 are on one node."""

NEAR, FAR, SSD, LATENCY_S, SSD_LATENCY_S = 1000.0, 100.0, 50.0, 0.5, 0.25

ONE_SITE = Sites()

Begin = Callable[[ProfiledHardware, Action], None]


def ends(*moves: Begin, far: float = FAR, near: float = NEAR, sites: Sites = ONE_SITE) -> list[float]:
    """Begin all moves at once, and return when each is done."""
    clock = Clock()
    costs = CostConfig(transfer=TransferCost(far, LATENCY_S), load=LoadCost(near, SSD, SSD_LATENCY_S))
    hardware = ProfiledHardware(clock, lambda load: 0.0, costs, NODES, OverheadsSection(), sites=sites)
    found = [-1.0] * len(moves)
    for number, begin in enumerate(moves):
        begin(hardware, lambda number=number: found.__setitem__(number, clock.now))
    while clock.step():
        pass
    return found


def read(rank: int, *sources: int, nbytes: int = 100) -> Begin:
    return lambda hardware, done: hardware.read(rank, refs(sources, nbytes), done)


def write(rank: int, *targets: int, nbytes: int = 100) -> Begin:
    return lambda hardware, done: hardware.write(rank, refs(targets, nbytes), done)


def refs(ranks: Sequence[int], nbytes: int) -> list[BlockRef]:
    return [BlockRef(0, rank, 0, nbytes) for rank in ranks]


@pytest.mark.parametrize("move", [read, write])
def test_a_far_transfer_alone_takes_the_latency_and_its_bytes_over_the_least_bandwidth(
    move: Callable[..., Begin],
) -> None:
    assert ends(move(0, 1, 1)) == [LATENCY_S + 200 / FAR]
    assert ends(move(0, 1, 1), near=40.0) == [LATENCY_S + 200 / 40.0]
    assert ends(move(0, 1, 1), far=400.0) == [LATENCY_S + 200 / 400.0]


def test_a_near_transfer_has_the_bandwidth_of_the_memory_and_no_latency() -> None:
    assert ends(read(0, 0), write(1, 1), read(2)) == [100 / NEAR, 100 / NEAR, 0.0]


def test_two_transfers_into_one_node_or_out_of_one_take_twice_as_long() -> None:
    alone, twice = LATENCY_S + 100 / FAR, LATENCY_S + 200 / FAR
    assert ends(read(0, 1), read(0, 2)) == ends(read(1, 0), read(2, 0)) == [twice, twice]
    assert ends(write(1, 0), write(2, 0)) == ends(write(0, 1), read(2, 0)) == [twice, twice]
    assert ends(read(0, 1), read(2, 3)) == ends(read(0, 1), read(1, 0)) == [alone, alone]


def test_the_ranks_of_a_node_share_its_memory_whether_bytes_come_from_near_or_far() -> None:
    assert ends(read(0, 0), read(4, 4)) == [200 / NEAR, 200 / NEAR]
    # Each gets half of 100 B/s. The near one sends 100 B in 2 s, and so does the far one.
    assert ends(read(0, 0), read(4, 1), near=FAR) == [2.0, 2.0 + LATENCY_S]


def test_a_transfer_of_several_nodes_ends_with_its_last_part() -> None:
    assert ends(read(0, 0, 1)) == [LATENCY_S + 100 / FAR]
    assert ends(read(0, 1, 2, 2)) == [LATENCY_S + 300 / FAR]


def load(rank: int, nbytes: int = 100) -> Begin:
    return lambda hardware, done: hardware.load(rank, nbytes, done)


def save(rank: int, nbytes: int = 100) -> Begin:
    return lambda hardware, done: hardware.save(rank, nbytes, done)


def copy(rank: int, *sources: int, nbytes: int = 100) -> Begin:
    return lambda hardware, done: hardware.copy(rank, refs(sources, nbytes), done)


def test_reads_and_writes_share_the_disk_of_their_node() -> None:
    alone, shared = SSD_LATENCY_S + 100 / SSD, SSD_LATENCY_S + 200 / SSD
    assert ends(load(0)) == ends(save(1)) == [alone]
    assert ends(load(0), save(4)) == [shared, shared]
    assert ends(load(0), load(1), read(0, 1)) == [alone, alone, LATENCY_S + 100 / FAR]


def test_a_copy_goes_over_the_links_of_two_nodes_and_not_into_pages() -> None:
    assert ends(copy(0, 1), near=40.0) == [LATENCY_S + 100 / FAR]
    assert ends(copy(0, 4)) == [100 / NEAR]
    assert ends(copy(0, 1), read(0, 2)) == [LATENCY_S + 200 / FAR] * 2


def test_what_goes_between_sites_shares_their_uplinks_and_comes_later() -> None:
    sites = Sites([7, 7, 9, 9], bytes_per_s=50.0, latency_s=0.25)
    away_s = LATENCY_S + 0.25
    assert ends(read(0, 1), read(0, 2), sites=sites) == [LATENCY_S + 2.0, away_s + 2.0]  # 50 B/s each
    assert ends(read(0, 2), read(1, 3), sites=sites) == [away_s + 4.0] * 2, "into one site"
    assert ends(read(0, 2), write(1, 3), sites=sites) == [away_s + 2.0] * 2, "each way has a link of its own"
    assert ends(copy(2, 0), write(1, 3), sites=sites) == [away_s + 4.0] * 2
    assert ends(read(0, 2, nbytes=20), far=10.0, sites=sites) == [away_s + 2.0], "the least of all links"


def test_bytes_and_messages_between_sites_are_told_apart() -> None:
    clock = Clock()
    sites = Sites([0, 0, 1, 1], latency_s=0.25)
    hardware = ProfiledHardware(
        clock, lambda load: 0.0, CostConfig(), NODES, OverheadsSection(), sites=sites
    )  # fmt: skip
    hardware.read(0, refs([1, 2, 3, 0], 10), lambda: None)
    assert hardware.bytes_moved() == {"near": 10, "far": 30, "disk": 0, "sites": 20}
    assert [hardware.away_s(rank) for rank in range(5)] == [0.0, 0.0, 0.25, 0.25, 0.0]


def test_a_pass_is_outside_the_profile_that_has_more_of_anything_than_was_measured() -> None:
    measured = PassLoad(100, 5_000, 8, 9_000)
    hardware = ProfiledHardware(
        Clock(), lambda load: 0.0, CostConfig(), NODES, OverheadsSection(), covered=measured
    )
    for load in (PassLoad(100, 5_000), PassLoad(101, 5_000), PassLoad(100, 5_001)):
        hardware.count(load, 1)
    for load in (PassLoad(0, 0, 8, 9_000), PassLoad(0, 0, 9, 9_000), PassLoad(0, 0, 8, 9_001)):
        hardware.count(load, 2)
    assert hardware.outside() == {"prefill": pytest.approx(2 / 3), "decode": pytest.approx(2 / 3)}
