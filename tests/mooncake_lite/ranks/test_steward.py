"""The steward: passes losses of ranks on, replaces conductor and gateway, and ends with the cluster."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_lite import messages as m
from mooncake_lite.ranks.steward.loop import Steward
from mooncake_lite.ranks.steward.losses import Loss, LossQueue

pytestmark = pytest.mark.quick


class FakeChild:
    """A process that only has a name. started: the settings of each start."""

    def __init__(self, kind: str) -> None:
        self.kind, self.number, self.may_start_again, self.runs = kind, 0, True, True
        self.started: list[dict[str, Any]] = []

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"

    @property
    def pid(self) -> int:
        return 100 + self.number

    def start(self, **settings: Any) -> None:
        self.number += 1
        self.started.append(settings)

    def end_of(self, seen: str) -> str:
        return f"the {self.kind} ended"


class Around:
    """A steward between a fake conductor, a fake gateway and a fake monitor.

    sent     to the conductor, None where the connection was renewed
    watched  names that the monitor watches; killed, marked: what it and the transfers were told
    """

    def __init__(self) -> None:
        self.inbox: list[m.Message] = []
        self.sent: list[m.Message | None] = []
        self.watched: list[str] = []
        self.killed: list[tuple[str, str]] = []
        self.marked: list[int] = []
        self.losses = LossQueue(lambda: None)
        self.conductor, self.gateway = FakeChild("conductor"), FakeChild("gateway")
        spoke: Any = SimpleNamespace(
            receive=self.receive, send=self.sent.append, renew=lambda: self.sent.append(None)
        )
        self.monitor: Any = SimpleNamespace(
            term=0,
            watch_pid=lambda name, pid: self.watched.append(name),
            end=lambda *told: self.killed.append(told),
        )
        transfers: Any = SimpleNamespace(mark_lost=lambda rank, reason: self.marked.append(rank))
        self.failed: list[int] = []
        world: Any = SimpleNamespace(
            one_node=False, node_ranks=[0, 1], failed_ranks=lambda: [*self.failed, *self.failed]
        )
        parts: Any = spoke, self.monitor, world, transfers, self.losses, self.conductor, self.gateway
        self.steward = Steward(*parts)

    def receive(self, wait_s: float) -> list[m.Message]:
        received, self.inbox = self.inbox, []
        return received

    def turn(self, *messages: m.Message, lost: Loss | None = None) -> list[m.Message | None]:
        """Give the steward messages and a loss; what it sent."""
        before = len(self.sent)
        self.inbox += messages
        if lost is not None:
            self.losses.on_lost(*lost)
        self.steward.turn(0.0)
        return self.sent[before:]


def test_losses_wake_the_steward_and_are_taken_once_in_order() -> None:
    woken = threading.Semaphore(0)
    losses = LossQueue(woken.release)
    losses.on_lost("rank-2", "its process 5 ended", True)
    losses.on_fatal("monitor", "KeyError: 1")
    assert losses.take() == Loss("rank-2", "its process 5 ended", True)
    assert losses.take() == Loss("rank-0", "failed: thread monitor died: KeyError: 1", True)
    assert losses.take() is None
    assert [woken.acquire(blocking=False) for _ in range(3)] == [True, True, False]


def test_a_lost_rank_is_told_to_the_conductor_and_to_the_transfers() -> None:
    around = Around()
    assert around.sent == [m.StewardHello()]
    assert around.watched == ["gateway-0", "conductor-0"]
    (told,) = around.turn(lost=Loss("rank-2", "its process 5 ended", False))
    assert told == m.RankLost(2, 0, "died: its process 5 ended", False)
    assert around.marked == [2]
    around.turn(m.EndRank(3, "sent nonsense"), m.EndRank(1, "failed: out of paper"))
    assert around.killed == [("rank-3", "failed: sent nonsense"), ("rank-1", "failed: out of paper")]


def test_ranks_of_other_hosts_are_ended_once_when_mpi_knows_that_they_failed() -> None:
    around = Around()
    around.failed = [1, 3]
    around.turn()
    around.turn()
    assert around.killed == [("rank-3", "MPI reports that it failed")]
    around.failed = [1, 2, 3]
    around.turn(m.Stop("SIGTERM", 0.0))
    assert len(around.killed) == 1, "ranks leave now"


def test_the_next_conductor_learns_its_number_and_who_is_lost_and_hearts_learn_of_it_when_it_serves() -> None:
    around = Around()
    around.turn(m.Conducting(0), m.Readiness(True, []), lost=Loss("rank-2", "failed: out of paper"))
    assert around.turn(lost=Loss("conductor-0", "its process 100 ended")) == [None, m.StewardHello()]
    lost = [m.RankLost(2, 0, "failed: out of paper")]
    assert around.conductor.started == [{"term": 1, "lost": lost}]
    assert around.watched[-1] == "conductor-1"
    assert around.monitor.term == 0
    around.turn(m.Conducting(1), lost=Loss("conductor-0", "told again"))
    assert around.monitor.term == 1
    assert len(around.conductor.started) == 1


@pytest.mark.parametrize(("was_ready", "again"), [(False, True), (True, False)])
def test_a_conductor_that_ends_before_the_cluster_was_ready_or_too_often_ends_it(
    was_ready: bool, again: bool
) -> None:
    around = Around()
    around.turn(m.Readiness(was_ready, []))
    around.conductor.may_start_again, around.conductor.runs = again, False
    around.losses.on_lost("conductor-0", "its process 100 ended", True)
    assert around.steward.run() == m.Stop("the conductor ended", 0.0, True)
    assert around.conductor.started == []


@pytest.mark.parametrize("again", [True, False])
def test_a_lost_gateway_is_replaced_unless_it_ends_too_often(
    again: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    around = Around()
    around.gateway.may_start_again = again
    (told,) = around.turn(lost=Loss("gateway-0", "its process 100 ended"))
    assert told == m.GatewayLost("gateway-0", "the gateway ended", not again)
    assert len(around.gateway.started) == again
    assert (around.watched[-1] == "gateway-1") is again
    assert ("the gateway ended; the next one starts" in capfd.readouterr().err) is again


def test_after_a_stop_nothing_is_replaced_and_losses_of_ranks_are_told_until_the_conductor_has_ended() -> (
    None
):
    around = Around()
    around.turn(m.Readiness(True, []), m.Stop("asked to", 3.0))
    assert around.turn(lost=Loss("gateway-0", "its process 100 ended")) == []
    (told,) = around.turn(lost=Loss("rank-1", "its process 7 ended"))
    assert isinstance(told, m.RankLost)
    around.conductor.runs = False
    assert around.steward.run() == m.Stop("asked to", 3.0)
    assert (around.conductor.started, around.gateway.started) == ([], [])
