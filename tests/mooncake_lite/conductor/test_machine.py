"""The conductor without clock or sockets: messages that lie, and messages that cannot be sent."""

from __future__ import annotations

import pytest

from mooncake_lite import messages as m
from mooncake_lite.conductor.gateways import Gateways
from mooncake_lite.conductor.machine import UNREACHABLE, Conductor, Facts, Sent, carry
from mooncake_lite.conductor.settings import control_config
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.control import Control
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.messages import pool as p
from store.layout import BlockLayout
from tests.mooncake_lite.conductor.wording import BLOCK, prefilled, submit

pytestmark = pytest.mark.quick

LAYOUT = BlockLayout(2, 1, BLOCK, 8, 4)


def conductor(ready: bool = True) -> Conductor:
    """Rank 1 prefills, rank 2 decodes, ranks 3 and 4 store 32 blocks each. ready: all have joined."""
    config = ServeConfig(block_size=BLOCK, overlap_transfers=False, store=2)
    machine = Conductor(Facts(1, 32), Control(control_config(config, LAYOUT, [0] * 5)))
    machine.on("gateway-0", m.GatewayHello("gateway-0", ["ipc://tokens"]), 0.0)
    for rank, role in ((1, "prefill"), (2, "decode"), (4, "store"), (3, "store"))[: 4 if ready else 3]:
        machine.on(f"rank-{rank}", m.RankHello(rank, role, 0, 32 * LAYOUT.nbytes * (rank > 2)), 0.0)
    return machine


def test_it_is_ready_when_all_ranks_and_a_gateway_have_joined() -> None:
    assert not conductor(ready=False).ready
    assert conductor().ready


@pytest.mark.parametrize(
    ("peer", "hello"),
    [
        ("rank-3", m.RankHello(3, "decode", 0)),
        ("rank-3", m.RankHello(3, "no such role", 0)),
        ("rank-2", m.RankHello(3, "store", 0, 64)),
        ("rank-9", m.RankHello(9, "store", 0, 64)),
        ("rank-0", m.RankHello(0, "steward", 0)),
    ],
)
def test_a_rank_that_says_it_is_another_does_not_join(peer: str, hello: m.RankHello) -> None:
    machine = conductor(ready=False)
    assert machine.on(peer, hello, 0.0) == []
    assert (machine.impostors, machine.ready) == (1, False)


@pytest.mark.parametrize("answers", [[], [[7, 8]], [[7], [8]]])
def test_a_request_whose_answers_so_far_are_not_what_it_says_fails_alone(answers: list[list[int]]) -> None:
    machine, lies = conductor(), submit("a", [5] * 70)
    so_far = [ev.AnswerSoFar(0, 1, False, lies.request.keys, lies.request.digests)]
    lies = m.Submit(m.RequestArrived(**{**as_dict(lies.request), "answers": so_far}), lies.body, answers)
    (told,) = machine.on("gateway-0", lies, 0.0)
    assert isinstance(told.message, m.Fail)
    assert (told.peer, told.message.request_id, machine.bodies) == ("gateway-0", "a", {})
    (start,) = machine.on("gateway-0", submit("b", [5] * 70), 0.0)
    assert isinstance(start.message, m.Start)


def as_dict(request: ev.RequestArrived) -> dict[str, object]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


def test_an_order_that_cannot_be_sent_is_taken_back() -> None:
    machine = conductor()
    (start,) = machine.on("gateway-0", submit("a", [5] * 70), 0.0)
    assert isinstance(start.about, fx.StartPrefill)
    again = machine.unsent(start, UNREACHABLE, 0.0)
    assert "rank 1 cannot be reached" in str(again)
    machine.control.check()


def test_what_the_steward_did_not_get_it_gets_once_when_it_greets() -> None:
    machine = conductor()
    (end,) = machine.on("rank-3 last word", m.RankLost(3, 0, "failed: out of paper"), 0.0)
    assert end == Sent("steward", m.EndRank(3, "failed: out of paper"))
    assert machine.unsent(end, UNREACHABLE, 0.0) == []
    greetings = [Sent("steward", m.Conducting(0)), Sent("steward", m.Readiness(True, []))]
    assert machine.on("steward", m.StewardHello(), 0.0) == [*greetings, end]
    assert machine.on("steward", m.StewardHello(), 0.0) == greetings


def test_metrics_that_are_too_large_become_their_reason_and_an_unreachable_asker_gets_nothing() -> None:
    machine = conductor()
    (reply,) = machine.on("gateway-0", m.MetricsRequest(1.0), 0.0)
    (instead,) = machine.unsent(reply, "it has 9 MiB", 0.0)
    assert isinstance(instead.message, m.MetricsReply)
    assert (instead.peer, instead.message.metrics) == ("gateway-0", [])
    assert "it has 9 MiB" in instead.message.problem
    assert machine.unsent(reply, UNREACHABLE, 0.0) == []


@pytest.mark.parametrize(("rank", "words"), [(2, "no rank is left"), (3, "the others go on")])
def test_the_notice_of_a_loss_says_whether_the_cluster_still_serves(rank: int, words: str) -> None:
    machine = conductor()
    machine.on("steward", m.RankLost(rank, 0, "died"), 0.0)
    (notice,) = machine.notices
    assert words in notice


def test_it_asks_to_be_woken_and_does_nothing_before() -> None:
    machine = conductor()
    machine.on("gateway-0", submit("a", [5] * 70), 0.0)
    assert 0.0 < machine.wake_at < float("inf")
    due = machine.wake_at
    machine.tick(due - 1.0)
    assert machine.wake_at == due
    machine.tick(due)
    assert machine.wake_at != due


def test_a_large_cluster_that_starts_names_some_of_the_ranks_that_it_waits_for() -> None:
    config = ServeConfig(block_size=BLOCK, decode=30)
    machine = Conductor(Facts(1, 32), Control(control_config(config, LAYOUT, [0] * 33)))
    *_, told = machine.on("gateway-0", m.GatewayHello("gateway-0", ["ipc://tokens"]), 0.0)
    status = machine.gateways.status
    assert isinstance(told.message, m.Readiness)
    assert "1 (prefill), 2 (decode)" in status.detail
    assert status.detail.endswith("16 (decode), and 16 more")


def test_when_nothing_is_due_any_more_it_does_not_ask_to_be_woken() -> None:
    machine = conductor()
    machine.wake_at = 5.0
    assert machine.tick(5.0) == []
    assert machine.wake_at == float("inf")


def test_the_steward_speaks_for_ranks_only_of_their_loss() -> None:
    machine = conductor()
    (start,) = machine.on("gateway-0", submit("a", [5] * 70), 0.0)
    assert isinstance(start.message, m.Start)
    assert machine.on("steward", prefilled(start.message), 0.0) == []
    assert machine.impostors == 1


def test_a_rank_that_joins_a_new_conductor_is_told_which_ranks_are_lost() -> None:
    config = ServeConfig(block_size=BLOCK, prefill=2)
    lost = [ev.RankLost(2, 0, "died: its process 5 ended")]
    decides = control_config(config, LAYOUT, [0] * 5, term=1, lost=lost)
    machine = Conductor(Facts(1, 32), Control(decides))
    told = machine.on("rank-1", m.RankHello(1, "prefill", 0, epoch=1), 0.0)
    assert Sent("rank-1", m.MarkLost(2, "rank 2 (prefill) died: its process 5 ended")) in told


def test_a_lost_rank_that_comes_to_a_new_conductor_is_told_to_end() -> None:
    config = ServeConfig(block_size=BLOCK, prefill=2)
    lost = [ev.RankLost(2, 0, "was silent for 9 s", ended=False)]
    machine = Conductor(Facts(1, 32), Control(control_config(config, LAYOUT, [0] * 5, term=1, lost=lost)))
    told = machine.on("rank-2", m.RankHello(2, "prefill", 0, epoch=1), 0.0)
    assert told == [Sent("rank-2", m.Stop("rank 2 (prefill) was silent for 9 s", 0.0, True))]
    machine.on("gateway-0", m.GatewayHello("gateway-0", ["ipc://tokens"]), 0.0)
    assert machine.gateways.new_introductions() == []


def test_ranks_are_introduced_to_a_gateway_once_and_lost_ones_never() -> None:
    at, gateways = ["ipc://tokens", "tcp://10.0.0.1:5"], Gateways([0, 0, 1, 1], "10.0.0.1")
    for rank in (1, 2, 3):
        gateways.add_compute_rank(rank)
    assert not gateways.greet(m.GatewayHello("gateway-0", at[:1])), "ranks on the other host cannot reach it"
    assert gateways.new_introductions() == []
    gateways.lose_rank(2, "rank 2 died")
    for expected in ([(1, m.GatewayAt("gateway-0", at[0])), (3, m.GatewayAt("gateway-0", at[1]))], []):
        assert gateways.greet(m.GatewayHello("gateway-0", at))
        assert gateways.new_introductions() == expected


def test_nobody_is_introduced_to_a_gateway_that_has_ended() -> None:
    at, gateways = ["ipc://tokens", "tcp://10.0.0.1:5"], Gateways([0, 1], "10.0.0.1")
    gateways.add_compute_rank(1)
    gateways.greet(m.GatewayHello("gateway-0", at[:1]))
    gateways.lose("gateway-0")
    gateways.greet(m.GatewayHello("gateway-1", at))
    assert gateways.new_introductions() == [(1, m.GatewayAt("gateway-1", at[1]))]


def test_what_follows_an_answer_that_cannot_be_sent_is_sent_unless_it_is_of_the_same_command() -> None:
    status, progress, end = m.ClusterStatus(True, "ready"), p.PoolProgress(0, 0, []), m.PoolEnded("")
    gone = [Sent("gateway-0", status), Sent("store", progress, 7), Sent("store", end, 7)]
    there = [Sent("gateway-1", status), Sent("verify", progress, 8)]
    tried: list[Sent] = []

    def send(one: Sent) -> str | None:
        tried.append(one)
        return UNREACHABLE if one in gone else None

    carry(conductor(), [*gone, *there], send, lambda: 0.0)
    assert tried == [*gone[:2], *there]


def test_a_rank_that_comes_after_the_gateway_is_introduced_to_it_too() -> None:
    gateways = Gateways([0, 0], "")
    assert gateways.greet(m.GatewayHello("gateway-0", ["ipc://tokens"]))
    gateways.add_compute_rank(1)
    assert gateways.new_introductions() == [(1, m.GatewayAt("gateway-0", "ipc://tokens"))]


def test_of_a_lost_rank_its_loss_alone_is_told() -> None:
    gateways = Gateways([0, 0, 0], "")
    for rank in (1, 2):
        gateways.set_degraded(m.Degraded(rank, "disk", "it is full"), "store")
    gateways.lose_rank(2, "rank 2 died")
    told = gateways.status.degraded
    assert told == ["rank 1 (store): it is full", "rank 2 died; it is missing until the next start"]


def test_an_answer_that_is_too_large_is_replaced_under_its_number() -> None:
    (instead,) = conductor().unsent(Sent("gateway-0", m.PoolEnded("", number=5), 3), "it has 9 MiB", 0.0)
    assert isinstance(instead.message, m.PoolEnded)
    assert (instead.message.number, "it has 9 MiB" in instead.message.problem) == (5, True)
