"""The link of a rank with the conductor: a new one, ends, losses, messages that are too large, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_lite import messages as m
from mooncake_lite.launch.rank_process import STOP_EXTRA_S
from mooncake_lite.launch.verdict import STEWARD
from mooncake_lite.ranks import conductor_link
from mooncake_lite.ranks.conductor_link import ConductorLink
from mooncake_lite.ranks.metrics import REPORT_EVERY_S
from tests.mooncake_lite.ranks.links import DEAD_AFTER_S, Signs, link_to
from transport.errors import WireError

pytestmark = pytest.mark.quick

HELLO = m.RankHello(3, "store", 1, 4096, True)
STOP = m.Stop("no more", 5.0)
HOLD = m.HoldBlocks(3, [])


class Conductor:
    """What waits for a rank at its spoke, and all that happens there, in order.

    later       messages by the second in which they come; now: seconds that were waited for
    too_large   type of the next message, if that is over the limit
    """

    def __init__(self, *inbox: m.Message) -> None:
        self.inbox, self.later = list(inbox), dict[float, m.Message]()
        self.seen: list[Any] = []
        self.now, self.waits = 0.0, list[float]()
        self.too_large: type | None = None

    def receive(self, wait_s: float) -> Sequence[m.Message]:
        self.waits.append(wait_s)
        self.now += wait_s
        came, self.inbox = self.inbox, []
        return came + [self.later.pop(at) for at in sorted(self.later) if at <= self.now]

    def send(self, message: Any) -> bool:
        if type(message) is self.too_large:
            self.too_large = None
            raise WireError("9 bytes, the limit is 8")
        self.seen.append(message)
        return True

    def renew(self) -> None:
        """Lose what waits, in both directions."""
        self.inbox = []
        self.seen.append("renewed")

    def wake(self) -> None:
        self.seen.append("woken")


class Engine:
    """Transfers: what is known to be lost."""

    def __init__(self) -> None:
        self.counters = self.moved_bytes = self.served_bytes = dict[Any, Any]()
        self.control_counters = self.socket_counters = dict[Any, Any]()
        self.serving_bytes, self.lost = 0, list[tuple[int, str]]()

    def mark_lost(self, rank: int, reason: str) -> None:
        self.lost.append((rank, reason))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Conductor:
    """A conductor whose waits are the only time that passes."""
    conductor = Conductor()
    clock = SimpleNamespace(monotonic=lambda: 100.0 + conductor.now)
    monkeypatch.setattr(conductor_link, "time", clock)
    return conductor


def link_of(conductor: Conductor, signs: Signs | None = None) -> tuple[ConductorLink, Engine]:
    engine = Engine()
    return link_to(conductor, HELLO, engine, signs), engine


def test_a_new_conductor_is_connected_to_once_and_joined_when_the_rank_may() -> None:
    conductor, signs = Conductor(), Signs()
    link, _ = link_of(conductor, signs)
    link.join()
    assert (link.new_term(), link.may_join, link.sender()) == (0, False, (3, 0))
    conductor.inbox, signs.term = [HOLD], 2
    assert link.new_term() == 2
    assert (link.new_term(), link.may_join) == (0, True)
    assert list(link.receive(0.0)) == [], "an order of the conductor before"
    assert link.sender() == (3, 0), "what it still says is for the conductor before"
    signs.term = 4
    assert link.new_term() == 4
    link.join()
    assert (link.may_join, link.sender()) == (False, (3, 4))
    joined = m.RankHello(3, "store", 1, 4096, True, epoch=4)
    assert conductor.seen == [HELLO, "renewed", "renewed", joined], "the second one has gone meanwhile"


def test_the_first_stop_ends_the_rank_and_the_second_lets_it_leave() -> None:
    link, _ = link_of(conductor := Conductor(HOLD, STOP, HOLD))
    assert not link.stopping
    assert list(link.receive(0.2)) == [HOLD, HOLD]
    assert (link.stop, link.stopping, link.may_leave, link.reason) == (STOP, True, False, "no more")
    conductor.inbox = [m.Stop("again", 0.0, True)]
    assert list(link.receive(0.2)) == []
    assert (link.stop, link.may_leave) == (STOP, True)


def test_transfers_with_a_lost_rank_fail_at_its_place_between_the_orders() -> None:
    link, engine = link_of(Conductor(HOLD, lost := m.MarkLost(5, "died"), HOLD))
    seen = [(message, list(engine.lost)) for message in link.receive(0.0)]
    assert seen == [(HOLD, []), (lost, [(5, "died")]), (HOLD, [(5, "died")])]


def test_a_conductor_is_gone_after_its_silence_and_not_before() -> None:
    signs = Signs()
    link, _ = link_of(Conductor(), signs)
    signs.silence_s = DEAD_AFTER_S
    assert (link.is_gone, link.stopping) == (False, False)
    signs.silence_s = DEAD_AFTER_S + 0.14
    assert (link.is_gone, link.stopping, link.stop) == (True, True, None)
    assert link.reason == f"{STEWARD} gave no sign of life for 3.1 s"


def leaves(link: ConductorLink, stop: m.Stop, conductor: Conductor) -> float:
    """For how long a rank that has flushed waits for the others."""
    conductor.inbox = [stop]
    list(link.receive(0.0))
    began_s = conductor.now
    link.leave(stop, 7)
    assert conductor.seen == [m.Stopped(7)]
    return conductor.now - began_s


def test_a_rank_leaves_with_the_others(clock: Conductor) -> None:
    clock.later = {0.3: HOLD, 1.0: STOP}
    link, _ = link_of(clock)
    assert leaves(link, STOP, clock) == pytest.approx(1.0)


def test_a_rank_that_is_the_last_one_leaves_at_once(clock: Conductor) -> None:
    link, _ = link_of(clock)
    clock.inbox = [STOP]
    list(link.receive(0.0))
    assert leaves(link, STOP, clock) == 0.0


def test_a_rank_waits_for_the_others_until_the_grace_is_over(clock: Conductor) -> None:
    link, _ = link_of(clock)
    assert leaves(link, STOP, clock) == pytest.approx(5.0 + 2 * STOP_EXTRA_S, abs=0.2)


def test_a_rank_does_not_wait_for_the_others_without_a_conductor(clock: Conductor) -> None:
    signs = Signs()
    signs.silence_s = DEAD_AFTER_S + 1.0
    link, _ = link_of(clock, signs)
    assert leaves(link, STOP, clock) == 0.0


def test_what_is_too_large_fails_its_request_alone() -> None:
    link, _ = link_of(conductor := Conductor())
    ended = m.PrefillEnded(2, 5, "a", 3, [], [], 0.0, 0.0, 0.0, 9, 0, [])
    loaded = m.BlocksLoaded(3, 5, 8, [True, False], [[1, 2], []], 0.5, "", True)
    for message in (m.Report(ended, [[7]]), loaded):
        conductor.too_large = type(message)
        link.send(message)
    problem = "9 bytes, the limit is 8"
    assert conductor.seen == [
        m.RequestFailed(2, 5, "a", 3, problem),
        m.BlocksLoaded(3, 5, 8, [False, False], [[], []], 0.0, problem, True),
    ]
    for message in (m.BlocksSaved(3, 0, [1], "written"), m.Report(m.PutsWanted(2, 5, 1, [], [], [], []), [])):
        conductor.too_large = type(message)
        with pytest.raises(WireError):
            link.send(message)
    assert len(conductor.seen) == 2, "a bug of ours is not hidden"


def test_metrics_are_sent_when_they_are_due_and_asked_for_only_then(clock: Conductor) -> None:
    link, _ = link_of(clock)
    asked: list[float] = []

    def values() -> dict[str, float]:
        asked.append(clock.now)
        return {"queued": 2.0}

    sent = []
    for now in (0.0, 0.9 * REPORT_EVERY_S, REPORT_EVERY_S, 1.1 * REPORT_EVERY_S):
        clock.now = now
        sent.append(link.report_when_due(values, {"pages": 8}))
    assert (sent, asked) == ([True, False, True, False], [0.0, REPORT_EVERY_S])
    assert [(stats.rank, stats.metrics[0].value, stats.metrics[1].value) for stats in clock.seen] == [
        (3, 2.0, 8.0)
    ] * 2


def test_a_thread_can_end_the_wait() -> None:
    link, _ = link_of(conductor := Conductor())
    link.wake()
    assert conductor.seen == ["woken"]
