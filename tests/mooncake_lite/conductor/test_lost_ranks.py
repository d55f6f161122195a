"""The conductor goes on without a lost rank, or a lost gateway: messages in, messages out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mooncake_lite import messages as m
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.control import events as ev
from store.keys import block_digests, prefix_keys
from tests.mooncake_lite.conductor.fake_hub import new_role
from tests.mooncake_lite.conductor.test_modes import LAYOUT, TOKENS, Conductor
from tests.mooncake_lite.conductor.wording import BLOCK, kind, left, prefilled, submit
from transport.channel import Hub, Spoke
from transport.wire import Decoder

pytestmark = pytest.mark.quick


class Cluster(Conductor):
    """Rank 1 prefills, ranks 2 and 3 decode, rank 4 stores."""

    def __init__(self, **options: Any) -> None:
        super().__init__(decode=2, **options)

    def loses(self, rank: int, reason: str = "its process 5 ended", ended: bool = True) -> list[Any]:
        """Lose a rank; what was sent because of it, but for the news itself."""
        why = reason if reason.startswith("failed: ") else f"died: {reason}"
        news = m.MarkLost | m.ClusterStatus | m.Stop
        told = self.tell("steward", m.RankLost(rank, 0, why, ended))
        return [sent for sent in told if not isinstance(sent, news)]

    def decoding(self, name: str = "a", n: int = 1) -> m.Start:
        """A request whose decode rank has its KV; returns what that rank was told."""
        (job,) = self.tell("gateway-0", submit(name, TOKENS, n=n))
        *_, decode = self.tell("rank-1", prefilled(job, range(7, 7 + n)))
        rank = decode.order.rank
        self.tell(f"rank-{rank}", m.DecodeLoaded(rank, 0, name, decode.order.attempt))
        return decode

    def recalled(self, recall: m.Recall, *answers: list[int], whole: bool = False) -> list[Any]:
        """Say what a client has, of each branch that its gateway is asked about."""
        so_far = []
        for branch, answer in zip(recall.branches, answers, strict=True):
            tokens = [*TOKENS, *answer]
            keys, digests = prefix_keys(tokens, BLOCK, b"model"), block_digests(tokens, BLOCK)
            so_far.append(m.AnswerSoFar(branch, len(answer), whole, keys, digests))
        event = m.Recalled(recall.request_id, recall.attempt, so_far)
        return self.tell("gateway-0", m.Report(event, list(answers)))

    def count(self, name: str) -> float:
        """A metric, added up over its labels; 0 before it has counted."""
        (reply,) = self.tell("gateway-0", m.MetricsRequest(1))
        return sum(one.value for one in reply.metrics if one.name == name)


def test_the_others_and_the_gateways_are_told_of_a_lost_rank_and_the_cluster_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = Cluster()
    before = len(cluster.hub.sent)
    cluster.loses(2, "no sign of life for 6.1 s", ended=False)
    reason = "rank 2 (decode) died: no sign of life for 6.1 s"
    sent = cluster.hub.sent[before:]
    assert [peer for peer, one in sent if one == m.MarkLost(2, reason)] == ["rank-1", "rank-3", "rank-4"]
    told = [one for peer, one in sent if peer == "rank-2"]
    assert told == [m.Stop(reason, 0.0, True)], (
        "it may only have been out of reach, and ends when it wakes up"
    )
    (status,) = [one for peer, one in sent if peer == "gateway-0"]
    assert status == m.ClusterStatus(True, "ready", [f"{reason}; it is missing until the next start"])
    assert capsys.readouterr().err == f"mooncake-lite: {reason}; the others go on\n"
    assert (cluster.role.machine.stop, cluster.count("ranks_lost_total")) == (None, 1)
    assert cluster.count("rank_up") == 3
    assert [cluster.decoding(name).order.rank for name in "ab"] == [3, 3]


def statuses(cluster: Cluster, since: int, gateway: str = "gateway-0") -> list[m.ClusterStatus]:
    """What a gateway was told of the cluster after the first `since` messages."""
    sent = cluster.hub.sent[since:]
    return [one for peer, one in sent if peer == gateway and isinstance(one, m.ClusterStatus)]


@pytest.mark.parametrize(
    ("ranks", "duty"), [((1,), "prefill"), ((3, 2), "decode"), ((4,), "store"), ((4, 1), "prefill or store")]
)
def test_gateways_are_told_that_no_rank_is_left_for_a_duty_and_later_ones_too(
    ranks: tuple[int, ...], duty: str
) -> None:
    cluster = Cluster(wait_for_rank_s=0.0)
    since = len(cluster.hub.sent)
    for rank in ranks:
        assert all(status.serves for status in statuses(cluster, since)) or duty == "prefill or store"
        cluster.loses(rank)
    why = f"no rank is left that can {duty}"
    *_, status = statuses(cluster, since)
    assert (status.ready, status.serves, status.detail) == (True, False, why)
    assert len(status.degraded) == len(ranks)
    (refused,) = cluster.tell("gateway-0", submit("a", TOKENS))
    assert (refused.reason, refused.kind) == (why, "unavailable")
    assert cluster.count("requests_rejected_total") == 1

    since = len(cluster.hub.sent)
    cluster.tell("gateway-1", m.GatewayHello("gateway-1", ["ipc://next"]))
    assert statuses(cluster, since, "gateway-1") == [status]
    assert all(one.ready for one in cluster.hub.to_steward if isinstance(one, m.Readiness) and one.closed)
    assert cluster.role.machine.stop is None


def test_of_the_last_metrics_of_a_lost_rank_the_counters_alone_stay() -> None:
    cluster = Cluster()
    for rank in (2, 3):
        counter = m.Metric("tokens_total", "counter", "Tokens", {"rank": str(rank)}, 5.0)
        gauge = m.Metric("pages_free", "gauge", "Pages", {"rank": str(rank)}, 7.0)
        cluster.tell(f"rank-{rank}", m.RankStats(rank, [counter, gauge]))
    cluster.loses(2)
    assert (cluster.count("tokens_total"), cluster.count("pages_free")) == (10.0, 7.0)


def test_what_a_lost_rank_still_says_changes_nothing() -> None:
    cluster = Cluster()
    decode = cluster.decoding()
    rank, attempt = decode.order.rank, decode.order.attempt
    cluster.loses(rank)
    ignored = cluster.role.control.ignored
    assert cluster.tell(f"rank-{rank}", m.DecodeEnded(rank, 0, "a", attempt)) == []
    assert cluster.tell(f"rank-{rank}", m.RequestFailed(rank, 0, "a", attempt, "a cable")) == []
    assert (cluster.role.control.ignored, cluster.role.machine.bodies.keys()) == (ignored + 2, {"a"})


def test_a_request_whose_decode_rank_is_lost_goes_on_at_once_from_what_its_client_has() -> None:
    cluster = Cluster()
    decode = cluster.decoding()
    lost = decode.order.rank
    (recall,) = cluster.loses(lost)
    assert recall == m.Recall("a", decode.order.attempt, [0], f"rank {lost} is lost")
    (again,) = cluster.recalled(recall, [7, 8, 9])
    assert isinstance(again.order, m.StartPrefill)
    assert (again.body.token_ids, again.body.answered) == ([*TOKENS, 7, 8, 9], 3)
    assert again.order.attempt > decode.order.attempt
    assert again.order.cached["dram"] == 128, "the blocks of its prompt are in the pool"
    *_, decode = cluster.tell("rank-1", prefilled(again, [10]))
    assert (decode.order.rank, decode.body.token_ids) == (5 - lost, [*TOKENS, 7, 8, 9, 10])
    assert decode.body.answered == 4
    assert cluster.count("requests_recalled_total") == 1


def test_an_answer_to_an_older_recall_changes_nothing() -> None:
    cluster = Cluster()
    decode = cluster.decoding()
    (recall,) = cluster.loses(decode.order.rank)
    assert cluster.recalled(replace(recall, attempt=recall.attempt - 1), [99]) == []
    (again,) = cluster.recalled(recall, [7])
    assert cluster.recalled(recall, [7, 99]) == []
    assert (again.body.token_ids, cluster.role.machine.bodies["a"].body.token_ids) == (
        [*TOKENS, 7],
        [*TOKENS, 7],
    )


def test_branches_that_have_begun_go_on_alone_when_their_rank_is_lost() -> None:
    cluster = Cluster()
    decode = cluster.decoding(n=2)
    (recall,) = cluster.loses(decode.order.rank)
    assert recall.branches == [0, 1]
    (first,) = cluster.recalled(recall, [7, 8], [9])
    assert cluster.role.machine.bodies.keys() == {"a#0", "a#1"}
    assert (first.body.token_ids, first.body.branch, first.body.n) == ([*TOKENS, 7, 8], 0, 1)
    sent = cluster.tell("rank-1", prefilled(first, [5]))
    (second,) = [one for one in sent if kind(one) is m.StartPrefill]
    assert (second.order.request_id, second.body.token_ids) == ("a#1", [*TOKENS, 9])
    assert second.body.branch == 1


def test_branches_none_of_which_has_begun_begin_again_together() -> None:
    cluster = Cluster()
    decode = cluster.decoding(n=2)
    (recall,) = cluster.loses(decode.order.rank)
    (again,) = cluster.recalled(recall, [], [])
    assert (again.order.request_id, again.body.n, again.body.answered) == ("a", 2, 0)
    assert again.body.token_ids == TOKENS


def test_a_request_whose_rank_is_lost_ends_when_its_client_has_everything() -> None:
    cluster = Cluster()
    decode = cluster.decoding()
    rank = decode.order.rank
    cluster.tell(f"rank-{rank}", m.DecodeEnded(rank, 0, "a", decode.order.attempt))
    assert cluster.role.control.requests.stage_of("a").value == "ending"
    (recall,) = cluster.loses(rank)
    assert recall.branches == [0]
    assert cluster.recalled(recall, [7, 8], whole=True) == []
    assert cluster.role.machine.bodies == {}
    assert cluster.count("requests_finished_total") == 1


def test_a_rank_with_a_malformed_report_is_killed_once_and_its_work_goes_on_when_it_has_ended() -> None:
    cluster = Cluster()
    decode = cluster.decoding()
    rank = decode.order.rank
    malformed = m.Preempted(rank, 0, "a", decode.order.attempt, 151, [1, 2], [1])
    for _ in range(2):
        assert cluster.tell(f"rank-{rank}", m.Report(malformed, [[*TOKENS, 7]])) == []
    ((killed, reason),) = cluster.hub.killed
    assert killed == rank
    assert reason.startswith("sent a malformed Preempted: ")
    assert cluster.role.machine.stop is None
    (recall,) = cluster.loses(rank, f"failed: {reason}")
    assert cluster.recalled(recall, [8])[0].body.token_ids == [*TOKENS, 8]


@pytest.mark.parametrize("why", [m.Preempted, m.Swapped])
@pytest.mark.parametrize(
    "wrong",
    [{"rank": 5}, {"epoch": 1}, {"attempt": 9}, {"keys": []}, {"branch": 1}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_report_that_the_control_plane_ignores_changes_no_token(why: Any, wrong: dict[str, Any]) -> None:
    cluster = Cluster()
    decode = cluster.decoding()
    rank = decode.order.rank
    report = left(why, decode, [*TOKENS, 7])
    if "rank" in wrong:
        wrong = {"rank": wrong["rank"] - rank}
    report = replace(report, event=replace(report.event, **wrong))
    assert cluster.tell(f"rank-{report.event.rank}", report) == []
    (recall,) = cluster.loses(rank)
    assert cluster.recalled(recall, [8])[0].body.token_ids == [*TOKENS, 8]


def test_a_first_token_from_a_rank_that_was_given_no_prompt_is_in_no_order() -> None:
    cluster = Cluster()
    (job,) = cluster.tell("gateway-0", submit("a", TOKENS))
    wrong = prefilled(job, [9])
    assert cluster.tell("rank-2", replace(wrong, event=replace(wrong.event, rank=2))) == []
    *_, decode = cluster.tell("rank-1", prefilled(job, [7]))
    assert decode.body.token_ids == [*TOKENS, 7]


@pytest.mark.parametrize("why", [m.Preempted, m.Swapped, m.PrefillEnded])
@pytest.mark.parametrize("token_ids", [[], [[]], [[7], [7]], [[7] * 200]])
def test_a_rank_whose_report_has_other_tokens_than_it_says_is_killed(
    why: Any, token_ids: list[list[int]]
) -> None:
    cluster, rank = Cluster(), 1
    if why is m.PrefillEnded:
        (job,) = cluster.tell("gateway-0", submit("a", TOKENS))
        report = prefilled(job)
    else:
        job = cluster.decoding()
        rank, report = job.order.rank, left(why, job, [*TOKENS, 7])
    assert cluster.tell(f"rank-{rank}", replace(report, token_ids=token_ids)) == []
    ((killed, reason),) = cluster.hub.killed
    assert (killed, cluster.role.machine.stop) == (rank, None)
    assert reason.startswith(f"sent a malformed {why.__name__}: ")
    assert cluster.role.machine.bodies["a"].body.token_ids[:-1] in (TOKENS, TOKENS[:-1])


def test_an_answer_so_far_with_other_tokens_than_it_says_changes_nothing() -> None:
    cluster = Cluster()
    decode = cluster.decoding()
    (recall,) = cluster.loses(decode.order.rank)
    event = m.Recalled("a", recall.attempt, [m.AnswerSoFar(0, 2, False, [], [])])
    for token_ids in ([], [[7]], [[7, 8], [7]]):
        assert cluster.tell("gateway-0", m.Report(event, token_ids)) == []
    assert cluster.recalled(recall, [7, 8])[0].body.token_ids == [*TOKENS, 7, 8]


def gateway_lost(cluster: Cluster, final: bool = False) -> list[tuple[str, m.Message]]:
    """The process of gateway-0 ends; what was sent because of it, to whom."""
    before = len(cluster.hub.sent)
    cluster.tell("steward", ev.GatewayLost("gateway-0", "the gateway ended", final))
    return cluster.hub.sent[before:]


def test_requests_of_a_lost_gateway_are_cancelled_and_those_of_the_next_one_are_served() -> None:
    cluster = Cluster()
    decode = cluster.decoding()
    rank = decode.order.rank
    assert gateway_lost(cluster) == [(f"rank-{rank}", m.CancelOn(rank, "a", decode.order.attempt))]
    cluster.tell(f"rank-{rank}", m.DecodeEnded(rank, 0, "a", decode.order.attempt))
    assert cluster.role.machine.bodies == {}
    sent = cluster.tell("gateway-1", m.GatewayHello("gateway-1", ["ipc://next"]))
    assert sent.count(m.GatewayAt("gateway-1", "ipc://next")) == 3, "every rank that sends tokens"
    assert m.ClusterStatus(True, "ready") in sent
    message = submit("b", TOKENS)
    request, body = replace(message.request, gateway="gateway-1"), replace(message.body, gateway="gateway-1")
    (job,) = cluster.tell("gateway-1", m.Submit(request, body))
    assert job.body.gateway == "gateway-1"


def test_introductions_of_lost_gateways_are_forgotten() -> None:
    cluster = Cluster()
    for number in (1, 2, 3):
        cluster.tell("steward", ev.GatewayLost(f"gateway-{number - 1}", "the gateway ended", False))
        name = f"gateway-{number}"
        sent = cluster.tell(name, m.GatewayHello(name, [f"ipc://{number}"]))
        assert sent.count(m.GatewayAt(name, f"ipc://{number}")) == 3
        assert cluster.role.machine.gateways.names == [name]


def test_the_final_loss_of_a_gateway_ends_the_cluster() -> None:
    cluster = Cluster()
    gateway_lost(cluster, final=True)
    assert cluster.role.machine.stop == m.Stop("the gateway ended", 0.0, True)


LIMIT_S = 20.0


@pytest.mark.parametrize(
    ("peer", "message", "killed"),
    [
        ("gateway-1", m.GatewayHello("gateway-1", ["ipc://tokens"]), [1]),
        ("rank-3 last word", m.RankLost(3, 0, "failed: thread heart died"), [3, 1]),
    ],
)
def test_a_new_conductor_has_ranks_killed_though_others_speak_to_it_before_the_steward(
    tmp_path: Path, peer: str, message: m.Message, killed: list[int]
) -> None:
    endpoint, config = f"ipc://{tmp_path}/control", ServeConfig(prefill=2, pipeline_parallel_size=2)
    with (
        Hub([endpoint], Decoder(m.TO_CONDUCTOR)) as hub,
        Spoke(endpoint, peer, Decoder(m.ClusterStatus | m.OpenTokens)) as early,
        Spoke(endpoint, "steward", Decoder(m.TO_STEWARD)) as steward,
    ):
        role = new_role(config, LAYOUT, hub, term=1, lost=[ev.RankLost(2, 0, "died: its process 5 ended")])
        early.send(message)
        role.step(hub.receive(LIMIT_S))
        role.machine.wake_at = 0.0
        role.step([])
        greetings: list[m.Message] = [m.Conducting(1), m.Readiness(True, [])]
        for expected in (killed, []):
            steward.send(m.StewardHello())
            role.step(hub.receive(LIMIT_S))
            hub.send("steward", m.Stop("that was all", 0.0))
            told: list[m.Message] = []
            while m.Stop("that was all", 0.0) not in told:
                told += steward.receive(LIMIT_S)
            assert told[:2] == greetings
            assert [one.rank for one in told if isinstance(one, m.EndRank)] == expected


def test_a_steward_that_greets_a_new_conductor_while_ranks_flush_is_told_of_the_stop(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/control"
    with (
        Hub([endpoint], Decoder(m.TO_CONDUCTOR)) as hub,
        Spoke(endpoint, "steward", Decoder(m.TO_STEWARD)) as steward,
    ):
        role = new_role(ServeConfig(), LAYOUT, hub, term=1)
        role.step([("gateway-0", m.StopRequested("asked to", 1.0))])
        assert role.machine.stop is not None
        steward.send(m.StewardHello())
        for peer, message in hub.receive(LIMIT_S):
            role.after_stop(peer, message)
        told: list[m.Message] = []
        while role.machine.stop not in told:
            more = steward.receive(LIMIT_S)
            assert more, f"the steward was told {told} alone"
            told += more
        assert told[0] == m.Conducting(1)


def test_a_mechanism_that_never_works_is_told_as_degraded_until_it_works() -> None:
    cluster = Cluster()
    since, mechanisms = len(cluster.hub.sent), cluster.role.control.mechanisms
    for tried, failed in ((19, 19), (1, 1), (1, 1), (1, 0)):
        mechanisms.count("ssd_loads", tried, failed)
        cluster.role.step([])
    told = [status.degraded for status in statuses(cluster, since)]
    assert told == [["ssd loads: all have failed so far"], []]
