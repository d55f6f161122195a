"""A rank of an instance in lockstep: when it ends, and what ends a wait for the others."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mooncake_lite import messages as m
from mooncake_lite.engine.members import Peers
from mooncake_lite.messages.members import Dismissed, MemberMail, MemberMove, MemberStep, PartEnded
from mooncake_lite.ranks.computing import members
from mooncake_lite.ranks.computing.loop import Loop
from mooncake_lite.ranks.computing.members import PATIENCE_S, FollowerLoop, Links, Watch, exchange_of
from mooncake_lite.ranks.conductor_link import ConductorLink
from scheduler.instance import Result, Step, TransferEnded
from store.objects import BlockRef
from tests.mooncake_lite.ranks.computing.test_stages import Conductor, Own
from tests.mooncake_lite.ranks.links import DEAD_AFTER_S, link_to
from transport.errors import MemberLost
from transport.exchange import SharedExchange

pytestmark = pytest.mark.quick

STOP = m.Stop("done", 2.0, False)
STEP = MemberStep(writes=[MemberMove(1, 1, [BlockRef(1, 9, 1000, 70)], [3], 0, [0])])


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(members.time, "monotonic", lambda: self.now)


def link_of(conductor: Conductor) -> tuple[ConductorLink, list[Any]]:
    marked: list[Any] = []
    names = ("counters", "moved_bytes", "served_bytes", "control_counters", "socket_counters")
    transfers: Any = SimpleNamespace(
        mark_lost=lambda rank, reason: marked.append((rank, reason)), serving_bytes=0,
        **{name: {} for name in names},
    )  # fmt: skip
    link = link_to(conductor, m.RankHello(3, "member", 0), transfers, conductor.signs)
    link._reported_at = float("inf")
    return link, marked


class Member:
    """A member that is not the first one. each_look: messages that come, one list at each look."""

    def __init__(self, conductor: Conductor, own: Any = None) -> None:
        self.told: list[Any] = []
        self.mail: list[list[Any]] = []
        self.conductor, self.own = conductor, own or Own()
        self.link, self.marked = link_of(conductor)
        self.watch = Watch(self.link, reads=True)
        self.peers = Peers(
            (2, 3), 1, self._receive, lambda number, message: self.told.append((number, message))
        )
        self.loop = FollowerLoop(self.peers, self.own, self.own, self.link, self.watch)
        self.looks = 0

    def _receive(self, wait_s: float) -> list[Any]:
        self.looks += 1
        return self.mail.pop(0) if self.mail else []


# ------------------------------------------------------------------------------- the loop of a member


def test_a_member_goes_on_after_a_stop_until_the_first_one_dismisses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Clock(monkeypatch)
    member = Member(Conductor(STOP))
    member.mail = [[], [STEP], [], [Dismissed()], [STEP]]
    member.loop.run()
    assert member.link.stop == STOP
    assert [len(step.writes) for step in member.own.steps] == [1, 0], "the first one was in its last pass"
    assert member.told == [(0, PartEnded(1, False, TransferEnded(1, sums=[[7]])))]
    assert member.looks == 4


def test_a_member_that_is_dismissed_ends_when_the_conductor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one may have heard the Stop before."""
    clock, conductor = Clock(monkeypatch), Conductor()
    member = Member(conductor)
    member.mail = [[Dismissed()]]
    turns = []

    def receive(wait_s: float) -> Any:
        turns.append(clock.now)
        return [STOP] if len(turns) == 5 else []

    conductor.receive = receive  # type: ignore[method-assign]
    member.loop.run()
    assert 5 <= len(turns) <= 6, "it is not over before, and soon after"
    assert clock.now == 1000.0


def test_a_member_ends_after_the_grace_when_the_first_one_does_not_dismiss_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    member = Member(Conductor(STOP))
    looked: list[float] = []

    def look(wait_s: float) -> list[Any]:
        looked.append(clock.now - 1000.0)
        assert len(looked) < 100, "it goes on for ever"
        clock.now += 0.5
        return []

    member.peers._receive = look
    member.loop.run()
    assert STOP.grace_s + PATIENCE_S - 0.5 <= looked[-1] <= STOP.grace_s + PATIENCE_S + 0.5
    assert member.link.stop == STOP


def test_a_member_ends_when_the_conductor_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    member = Member(Conductor())

    def look(wait_s: float) -> list[Any]:
        member.conductor.signs.silence_s += 1.0
        assert member.conductor.signs.silence_s < 100, "it goes on for ever"
        return []

    member.peers._receive = look
    member.loop.run()
    assert member.conductor.signs.silence_s == DEAD_AFTER_S + 1.0
    assert member.link.reason.endswith("gave no sign of life for 4.0 s")


def test_a_first_rank_dismisses_the_others_before_it_delivers_its_last_tokens() -> None:
    done: list[str] = []
    gateway: Any = SimpleNamespace(close=lambda: done.append("delivered"))
    nothing: Any = None
    loop = Loop(nothing, nothing, gateway, nothing)
    assert loop.close(1.0, leave=lambda: done.append("dismissed")) == 0
    assert done == ["dismissed", "delivered"]


# ------------------------------------------------------------------------------- waits for others


def test_a_member_in_a_wait_hears_of_lost_ranks_and_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, conductor = Clock(monkeypatch), Conductor(m.MarkLost(5, "died"), STOP)
    member = Member(conductor)
    member.watch()
    assert (member.marked, member.link.stop) == ([(5, "died")], STOP)
    conductor.signs.silence_s = DEAD_AFTER_S + 1
    assert member.watch.is_over, "nobody is left that could wait for it"
    conductor.signs.silence_s = 0.0
    clock.now += STOP.grace_s + PATIENCE_S
    member.watch()
    clock.now += 0.1
    with pytest.raises(MemberLost, match="while it waited for other members: done"):
        member.watch()


def test_a_first_rank_in_a_wait_leaves_the_conductors_messages_to_its_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, conductor = Clock(monkeypatch), Conductor(STOP)
    link, _ = link_of(conductor)
    watch = Watch(link, reads=False)
    watch()
    clock.now += 100.0
    watch()
    assert conductor.messages == [STOP]
    list(link.receive(0.0))  # its loop
    watch()
    clock.now += STOP.grace_s + PATIENCE_S + 0.1
    with pytest.raises(MemberLost, match="done"):
        watch()
    conductor.signs.silence_s = DEAD_AFTER_S + 1
    other = Watch(link_of(Conductor())[0], reads=False)
    other()
    with pytest.raises(MemberLost):
        watch()


@pytest.mark.parametrize("reads", [True, False])
def test_a_wait_for_a_member_that_does_not_come_ends_when_the_conductor_is_gone(reads: bool) -> None:
    conductor = Conductor()
    link, _ = link_of(conductor)
    asked = threading.Event()

    class Noted(Watch):
        def __call__(self) -> None:
            asked.set()
            super().__call__()

    memory = np.zeros(SharedExchange.nbytes(2, 64), np.uint8)
    exchange = SharedExchange(memory, 0, 2, 60.0, Noted(link, reads))
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            exchange.sum(np.ones(4, np.float32))
        except MemberLost as error:
            failed.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert asked.wait(30), "it does not look while it waits"
    assert thread.is_alive(), "the conductor is there"
    conductor.signs.silence_s = DEAD_AFTER_S + 1
    began = time.monotonic()
    thread.join(30)
    assert not thread.is_alive()
    assert time.monotonic() - began < 10
    assert "gave no sign of life" in str(failed[0])
    with pytest.raises(Exception, match=r"has failed or has not ended|no sign of life"):
        exchange.sum(np.ones(4, np.float32))


def test_an_exchange_lies_at_the_end_of_the_first_ranks_segment() -> None:
    segment = np.zeros(SharedExchange.nbytes(2, 1 << 20) + 640, np.uint8)
    mapped: list[int] = []

    def map_(rank: int) -> np.ndarray:
        mapped.append(rank)
        return segment

    config: Any = SimpleNamespace(
        decode_context_parallel_size=2, tensor_parallel_size=1, role_of=lambda rank: "decode"
    )
    world: Any = SimpleNamespace(node_of=[0, 0, 0, 0, 0])
    transfers: Any = SimpleNamespace(mapped=map_)
    both: list[Any] = []
    asked = threading.Event()
    for number in range(2):
        links: Any = SimpleNamespace(ranks=[3, 4], number=number)
        both.append(exchange_of(links, config, world, transfers, asked.set))  # type: ignore[arg-type]
    assert mapped == [3, 3]
    assert [(one.member, one.count) for one in both] == [(0, 2), (1, 2)]
    other = threading.Thread(target=both[1].gather, args=(np.arange(3, dtype=np.float32),), daemon=True)
    other.start()
    assert asked.wait(30), "a member that waits asks its watch"
    found = both[0].gather(np.arange(2, dtype=np.float32) + 5)
    other.join(30)
    assert [one.tolist() for one in found] == [[5, 6], [0, 1, 2]]
    assert segment[:640].max() == 0
    assert segment[640:].max() > 0


# ------------------------------------------------------------------------------- messages between members


def test_members_number_their_messages_to_each_other_apart() -> None:
    sent: list[tuple[int, MemberMail]] = []
    links: Any = Links.__new__(Links)
    spoke = lambda number: SimpleNamespace(send=lambda mail: sent.append((number, mail)) or True)  # noqa: E731
    links._spokes, links._sent = {0: spoke(0), 2: spoke(2)}, members.Counter()
    for number in (0, 2, 0):
        links.tell(number, Dismissed())
    assert [(number, mail.number) for number, mail in sent] == [(0, 0), (2, 0), (0, 1)]


def test_a_member_that_does_not_read_its_messages_ends_the_one_that_tells_it() -> None:
    links: Any = Links.__new__(Links)
    links.ranks, links._sent = [4, 5], members.Counter()
    links._spokes = {1: SimpleNamespace(send=lambda mail: False)}
    with pytest.raises(RuntimeError, match="rank 5 of the instance does not read its messages"):
        links.tell(1, Dismissed())


def test_a_member_reports_ends_while_it_computes() -> None:
    class Moving(Own):
        def run(self, step: Step, moved: Any) -> Result:
            if step.chunks:
                moved([TransferEnded(1)])
            return super().run(step, moved)

    chunk = m.members.MemberChunk(("a", 0, 0), [5], 3, [0], None, [], 0, [], [0], None, False)
    member = Member(Conductor(), Moving())
    member.mail = [[MemberStep(chunks=[chunk])]]
    member.loop.turn()
    assert member.told == [(0, PartEnded(1, False, TransferEnded(1)))]
    (step,) = member.own.steps
    assert [len(one.draws) for one in step.chunks] == [1]
