"""Pipelines of prefill ranks: policies know the first rank of each, and all of its ranks die as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mooncake_lite.config.modes import DUTIES
from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.control.grants import UNKNOWN_S
from mooncake_lite.control.members import Members
from store.layout import BlockLayout
from tests.mooncake_lite.control.plane import BLOCK, E, only

pytestmark = pytest.mark.quick

LAYOUT = (2, 1, BLOCK, 8, 4, "none")
ROLES = ["steward", "prefill", "stage", "stage", "prefill", "stage", "stage", "decode", "store"]
ONE, TWO = [1, 2, 3], [4, 5, 6]
"""The ranks of each pipeline. Rank 7 decodes, rank 8 stores."""


def config_of(**options: Any) -> ControlConfig:
    return ControlConfig(layout=LAYOUT, roles=ROLES, nodes=[0] * len(ROLES), **options)


def joined(rank: int, epoch: int = 0) -> ev.RankJoined:
    blocks = 32 if ROLES[rank] == "store" else 0
    nbytes = blocks * BlockLayout(2, 1, BLOCK, 8, 4).nbytes
    return ev.RankJoined(rank, epoch, rank, DUTIES[ROLES[rank]], 0, slots=16, segment_bytes=nbytes)


class Cluster:
    """A control plane that checks every invariant after every event."""

    def __init__(self) -> None:
        self.control, self.now = Control(config_of()), 0.0
        for rank in range(1, len(ROLES)):
            self.on(joined(rank))
        assert only(fx.Readiness, self.on(ev.GatewayReady("gateway"))).ready

    def on(self, event: ev.Event) -> list[fx.Effect]:
        """Apply an event a millisecond after the last one."""
        self.now += 0.001
        effects = self.control.on(event, self.now)
        if not self.control.stopped:
            self.control.check()
        return effects

    def arrive(self, name: str) -> fx.StartPrefill:
        """Send a request whose prompt stores a block, and a tail."""
        return only(fx.StartPrefill, self.on(ev.RequestArrived(name, 70, 16, [], [])))

    def lose(self, rank: int, *, ended: bool = True, why: str = "died") -> list[fx.Effect]:
        return self.on(ev.RankLost(rank, 0, why, ended))

    @property
    def quarantined(self) -> int:
        """Bytes of the pool that a lost rank may still write."""
        return self.control.directory.stats()["quarantined_bytes"]


def of(kind: type[E], effects: Sequence[object]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def killed(effects: Sequence[object]) -> list[int]:
    return [effect.rank for effect in of(fx.EndRank, effects)]


# ------------------------------------------------------------------------------- what is known of it


def test_an_instance_is_the_first_rank_of_a_pipeline_and_dies_with_all_of_them() -> None:
    config = config_of()
    for pipeline in (ONE, TWO):
        assert [config.instance_of(rank) for rank in pipeline] == [pipeline] * 3
    assert (config.instance_of(7), config.instance_of(8)) == ([7], [8])


def test_a_stage_is_no_instance_of_policies_and_has_no_segment() -> None:
    control = Cluster().control
    assert [control.directory.has_segment(rank) for rank in range(1, 9)] == [False] * 7 + [True]
    assert (list(control.state.prefills), list(control.state.decodes)) == ([1, 4], [7])
    assert Members(config_of()).computes == [1, 4, 7]


def test_requests_go_to_the_first_ranks_alone() -> None:
    cluster = Cluster()
    assert {cluster.arrive(f"r{number}").rank for number in range(6)} == {1, 4}


def test_a_stage_is_not_told_to_forget_its_pages() -> None:
    cluster = Cluster()
    effects = cluster.on(ev.PoolCommand(1, "rm-all"))
    assert [effect.rank for effect in of(fx.ForgetPages, effects)] == [1, 4, 7]


def test_the_cluster_is_ready_when_all_stages_have_joined() -> None:
    control = Control(config_of())
    control.on(ev.GatewayReady("gateway"), 0.0)
    for rank in (1, 2, 4, 5, 6, 7, 8):
        effects = control.on(joined(rank), 0.1)
    assert only(fx.Readiness, effects).missing == [3]
    assert only(fx.Readiness, control.on(joined(3), 0.2)).ready


# ------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("rank", [*ONE, *TWO])
def test_the_loss_of_a_rank_kills_the_others_of_its_pipeline_once_and_no_other(rank: int) -> None:
    cluster = Cluster()
    pipeline = ONE if rank in ONE else TWO
    others = [other for other in pipeline if other != rank]
    effects = cluster.lose(rank)
    assert killed(effects) == others
    assert [effect.reason for effect in of(fx.EndRank, effects)] == [
        f"rank {rank} of its instance is lost"
    ] * 2
    assert [lost.rank for lost in of(fx.MarkLost, effects)] == [rank]
    for other in others:
        assert killed(cluster.lose(other)) == []
    assert cluster.arrive("a").rank == (4 if pipeline == ONE else 1)


@pytest.mark.parametrize("rank", [1, 7, 8])
def test_the_loss_of_a_rank_of_its_own_kills_no_rank(rank: int) -> None:
    cluster = Cluster()
    assert killed(cluster.lose(rank)) == ([2, 3] if rank == 1 else [])


def test_a_request_begins_anew_on_another_pipeline_when_the_first_rank_is_lost() -> None:
    cluster = Cluster()
    assert cluster.arrive("a").rank == 1
    assert of(fx.Recall, cluster.lose(3)) == [], "the first rank has not ended yet"
    recall = only(fx.Recall, cluster.lose(1))
    assert recall.reason == "rank 1 is lost"
    effects = cluster.on(ev.Recalled("a", recall.attempt, [ev.AnswerSoFar(0, 0, False)]))
    assert only(fx.StartPrefill, effects).rank == 4


@pytest.mark.parametrize("order", [(1, 2, 3), (2, 1, 3), (3, 2, 1)])
@pytest.mark.parametrize(("why", "counted"), [("died", 1), ("failed: out of memory", 2)])
def test_the_loss_of_a_pipeline_counts_once_for_its_request_and_as_the_first_of_its_ranks_was_lost(
    order: tuple[int, ...], why: str, counted: int
) -> None:
    """The steward says of ranks that the control plane has killed that they failed."""
    cluster = Cluster()
    assert cluster.arrive("a").rank == 1
    for rank in order:
        cluster.lose(
            rank, why=why if rank == order[0] else f"failed: rank {order[0]} of its instance is lost"
        )
    assert cluster.control.requests["a"].losses == counted
    assert cluster.control.requests["a"].lost_by == f"rank {order[0]} ({ROLES[order[0]]}) {why}"


@pytest.mark.parametrize("order", [(1, 2, 3), (2, 1, 3), (3, 2, 1)])
def test_what_a_pipeline_may_write_is_given_to_nobody_until_all_of_its_ranks_have_ended(
    order: tuple[int, ...],
) -> None:
    cluster = Cluster()
    block = BlockLayout(*LAYOUT).nbytes
    assert cluster.arrive("a").rank == 1
    for number, rank in enumerate(order):
        cluster.lose(rank)
        held = {*order[: number + 1]}
        expected = 2 * block if 1 in held and len(held) < 3 else 0
        assert cluster.quarantined == expected, f"after {held}"
    stats = cluster.control.directory.stats()
    assert stats["free_bytes"] == 32 * block


def test_the_places_of_a_pipeline_of_which_one_rank_cannot_be_reached_stay_in_quarantine() -> None:
    cluster = Cluster()
    cluster.arrive("a")
    cluster.lose(1)
    cluster.lose(2, ended=False)
    cluster.lose(3)
    held = cluster.quarantined
    assert held
    cluster.now += 10_000.0
    cluster.on(ev.Tick())
    assert cluster.quarantined == held


def test_a_failed_chunk_of_a_living_pipeline_leaves_quarantine_when_its_time_has_come() -> None:
    cluster = Cluster()
    order = cluster.arrive("a")
    cluster.on(ev.RequestFailed(1, 0, "a", order.attempt, "cut", True))
    assert cluster.quarantined
    cluster.now += 121.0
    cluster.on(ev.Tick())
    assert cluster.quarantined == 0


# ------------------------------------------------------------------------------- succession


def successor(*lost: ev.RankLost) -> tuple[Control, list[fx.Effect]]:
    """A conductor that was told of lost ranks, and what it does first."""
    control = Control(config_of(term=1, lost=list(lost)))
    return control, control.on(ev.Tick(), 0.0)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_new_conductor_that_was_told_of_a_lost_rank_kills_the_rest_of_its_pipeline(rank: int) -> None:
    control, effects = successor(ev.RankLost(rank, 0, "died"))
    others = [other for other in ONE if other != rank]
    assert killed(effects) == others
    for number, other in enumerate(others):
        assert killed(control.on(ev.RankLost(other, 0, "died"), 1.0 + number)) == []
    for other in (*TWO, 7):
        control.on(joined(other, 1), 5.0)
    control.on(joined(8, 1), 5.0)
    control.on(ev.Inventory(8, 1, [], True), 5.0)
    control.on(ev.GatewayReady("gateway"), 5.0)
    started = control.on(ev.RequestArrived("a", 70, 16, [], []), 6.0)
    assert only(fx.StartPrefill, started).rank == 4
    control.check()


def test_a_rank_that_does_not_report_to_a_new_conductor_in_time_is_killed() -> None:
    control, _ = successor()
    for rank in (*ONE, *TWO, 7):
        control.on(joined(rank, 1), 1.0)
    assert killed(control.on(ev.Tick(), UNKNOWN_S - 0.1)) == []
    assert killed(control.on(ev.Tick(), UNKNOWN_S)) == [8]
    before = control.ignored
    assert control.on(joined(7, 1), UNKNOWN_S + 1.0) == []
    assert control.ignored == before + 1, "it has joined already"
    control.check()


def test_a_new_conductor_that_was_told_of_a_whole_pipeline_or_of_other_ranks_kills_none() -> None:
    _, effects = successor(*(ev.RankLost(rank, 0, "died") for rank in (7, 3, 1, 2)))
    assert killed(effects) == []
