"""The loop and the links of a computing rank: what they do beside the machine."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_lite import messages as m
from mooncake_lite.ranks import conductor_link
from mooncake_lite.ranks.computing.gateway_link import GatewayLink
from mooncake_lite.ranks.computing.loop import Loop
from scheduler.instance import DECODE, PREFILL
from tests.mooncake_lite.conductor.wording import kind
from tests.mooncake_lite.ranks.computing.test_machine import CANCEL, Rank, prefill
from tests.mooncake_lite.ranks.links import DEAD_AFTER_S, Signs, link_to
from tests.scheduler.instance.model_runner import BLOCK
from transport.channel import LINGER_MS, Spoke
from transport.errors import WireError
from transport.wire import Decoder

pytestmark = pytest.mark.quick


class Wire:
    """A conductor or a gateway: what the rank receives next, and what it has sent.

    too_large   kind of message that is over the limit
    """

    def __init__(self) -> None:
        self.inbox: list[m.Message] = []
        self.waits: list[float] = []
        self.sent: list[Any] = []
        self.too_large: type | None = None
        self.closed = False

    def receive(self, wait_s: float) -> list[m.Message]:
        self.waits.append(wait_s)
        received, self.inbox = self.inbox, []
        return received

    def send(self, message: m.Message) -> bool:
        if kind(message) is self.too_large:
            raise WireError("Report has 9 bytes, the limit is 8")
        self.sent.append(message)
        return True

    def renew(self) -> None:
        assert not self.closed

    def close(self) -> None:
        self.closed = True


class Process:
    """Rank 2 with its loop, and its links to wires. signs: of the conductor's life."""

    def __init__(self, *duties: str) -> None:
        self.conductor, self.signs = Wire(), Signs(5)
        self.gateways: dict[str, Wire] = {}
        rank = Rank(*duties)
        names = ("counters", "moved_bytes", "served_bytes", "control_counters", "socket_counters")
        transfers: Any = SimpleNamespace(serving_bytes=0, **{name: {} for name in names})
        self.link = link_to(self.conductor, rank.machine.hello, transfers, self.signs)
        self.gateway = GatewayLink(self.open)
        self.loop = Loop(rank.machine, self.link, self.gateway, rank.runner)
        self.hear(m.GatewayAt("gateway-0", "ipc://tokens"))

    def open(self, endpoint: str) -> Any:
        assert endpoint not in self.gateways, "a gateway is connected to twice"
        return self.gateways.setdefault(endpoint, Wire())

    def hear(self, *messages: m.Message) -> None:
        """Take one turn with these messages."""
        self.conductor.inbox += messages
        self.loop.turn(0.0)

    def until_idle(self) -> None:
        while self.loop.rank.state.busy:
            self.hear()

    def told(self) -> list[m.Message]:
        """What the conductor was told, without metrics."""
        return [message for message in self.conductor.sent if not isinstance(message, m.RankStats)]


def test_tokens_go_to_the_gateway_of_the_request_and_events_to_the_conductor() -> None:
    process = Process(PREFILL)
    process.hear(m.GatewayAt("gateway-0", "ipc://tokens"))
    process.hear(prefill([*range(9)], [], store=3))
    process.until_idle()
    assert [type(sent) for sent in process.gateways["ipc://tokens"].sent] == [m.Tokens]
    assert [kind(sent) for sent in process.told()] == [m.PromptComputed, m.PrefillEnded]
    assert process.loop.close(0.0) == 0
    assert [wire.closed for wire in process.gateways.values()] == [True]


def test_a_new_gateway_takes_the_place_of_the_one_that_has_died() -> None:
    """Each connection is a socket and a thread. Tokens for the clients of the old one are dropped."""
    process = Process(PREFILL)
    process.hear(prefill([*range(9)], [], store=3))
    for number in (1, 2):
        process.hear(m.GatewayAt(f"gateway-{number}", f"ipc://{number}"))
        assert [wire.closed for wire in process.gateways.values()] == [True] * number + [False]
    process.until_idle()
    assert all(wire.sent == [] for wire in process.gateways.values())
    assert [kind(sent) for sent in process.told()] == [m.PromptComputed, m.PrefillEnded]
    assert process.loop.rank.counters["token_messages_dropped_total"] == 1
    assert process.gateway.send("gateway-2", m.Tokens("b", 0, [7]))
    assert len(process.gateways["ipc://2"].sent) == 1


def test_tokens_that_wait_for_a_dead_gateway_do_not_delay_its_successor(tmp_path: Path) -> None:
    process, spoken = Process(PREFILL), []

    def open_gateway(endpoint: str) -> Spoke:
        spoken.append(Spoke(endpoint, "rank-2", Decoder(m.Stop)))
        return spoken[-1]

    process.gateway._connect = open_gateway
    took_s = []
    try:
        for number in range(4):
            began_s = time.monotonic()
            process.hear(m.GatewayAt(f"{number}", f"ipc://{tmp_path}/{number}"))
            took_s.append(time.monotonic() - began_s)
            process.gateway.send(f"{number}", m.Tokens("a", 0, [7]))
    finally:
        process.gateway.meet(m.GatewayAt("last", f"ipc://{tmp_path}/last"))
        process.gateway.close()
    assert min(took_s[1:]) < LINGER_MS / 1000
    assert all(spoke.closed for spoke in spoken)


def test_the_loop_ends_with_the_first_stop_and_keeps_its_reason() -> None:
    process = Process(PREFILL)
    process.hear(prefill([*range(30)], [], store=8))
    process.conductor.inbox = [m.Stop("no more", 5.0)]
    process.loop.run()
    assert process.link.stop == m.Stop("no more", 5.0)
    assert not process.link.may_leave
    process.hear(m.Stop("again", 0.0))
    assert process.link.stop == m.Stop("no more", 5.0)
    assert process.link.may_leave


def test_the_loop_ends_when_the_conductor_is_gone() -> None:
    process = Process(DECODE)
    process.signs.silence_s = DEAD_AFTER_S + 0.1
    process.loop.run()
    assert process.link.stop is None


def test_a_new_conductor_is_joined_without_waiting_for_a_message() -> None:
    process = Process(PREFILL)
    process.loop.turn(0.2)
    process.signs.term = 6
    process.loop.turn(0.2)
    process.loop.turn(0.2)
    assert process.conductor.waits[-3:] == [0.2, 0.0, 0.2]
    assert [(kind(sent), sent.epoch) for sent in process.told()] == [(m.RankHello, 6), (m.PagesChanged, 6)]


def test_the_loss_of_another_rank_is_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    process, orders, lost = Process(PREFILL), list[Any](), list[tuple[int, str]]()
    monkeypatch.setattr(process.loop.rank, "on", lambda order, now: orders.append(order) or [])
    monkeypatch.setattr(
        process.link._transfers, "mark_lost", lambda *about: lost.append(about), raising=False
    )
    process.hear(m.MarkLost(4, "died"), CANCEL)
    assert (orders, lost) == ([CANCEL], [(4, "died")])


def test_a_report_that_is_too_large_fails_its_request_alone() -> None:
    process = Process(PREFILL)
    process.conductor.too_large = m.PrefillEnded
    process.hear(prefill([*range(3)], [], store=1))
    process.until_idle()
    failed = m.RequestFailed(2, 5, "a", 3, "Report has 9 bytes, the limit is 8")
    assert process.told()[1:] == [failed]
    process.conductor.too_large = None
    process.hear(prefill([*range(3)], [], store=1, attempt=4))
    process.until_idle()
    kinds = [kind(sent) for sent in process.told()]
    assert kinds == [m.PromptComputed, m.RequestFailed, m.PromptComputed, m.PrefillEnded]


def test_a_message_about_no_request_that_is_too_large_is_a_bug_of_ours() -> None:
    process = Process(PREFILL)
    for message in (
        m.PagesChanged(2, 5, [1], []),
        m.Report(m.PutsWanted(2, 5, 1, [7], [8], [(None, 0)], ["a"]), [[1] * BLOCK]),
    ):
        process.conductor.too_large = kind(message)
        with pytest.raises(WireError):
            process.link.send(message)
    assert process.told() == []


def test_metrics_tell_what_the_machine_counted_and_what_its_books_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process(PREFILL)
    process.hear(prefill([*range(9)], [], store=3), CANCEL)
    process.hear(prefill([*range(9)], [], store=3, attempt=4))
    process.until_idle()
    process.loop.rank.reused["pages"] = 8
    monkeypatch.setattr(conductor_link, "REPORT_EVERY_S", 0.0)
    process.hear()
    stats = process.conductor.sent[-1]
    assert isinstance(stats, m.RankStats)
    assert stats.rank == 2
    found = {(one.name, one.labels.get("tier")): one.value for one in stats.metrics}
    assert found["prefix_cache_queries_total", None] == 9
    assert found["prefix_cache_hits_total", "pages"] == 8
    assert found["prefill_computed_tokens_total", None] == 9
    assert found["kv_cache_pages", None] == 64
    assert found["kv_cache_pages_used", None] == 0


def test_the_gauges_are_those_of_the_duties() -> None:
    def gauges(process: Process) -> list[str]:
        return [name for name in process.loop._values() if name.startswith("decode_")]

    assert gauges(Process(PREFILL)) == []
    assert len(gauges(Process(DECODE))) == 3
