"""The conductor role as a conversation: messages in, messages out, books that balance. No sockets."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec.structs import replace

from mooncake_lite import messages as m
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.control import events as ev
from mooncake_lite.messages.pool import PoolProgress
from store.keys import block_digests, prefix_keys
from store.layout import BlockLayout
from store.policies.sieve import SIEVE
from tests.mooncake_lite.conductor.fake_hub import FakeHub, Playable, new_role
from tests.mooncake_lite.conductor.wording import BLOCK, SUMS, kind, left, prefilled, submit
from transport.wire import DEFAULT_MAX_BYTES

pytestmark = pytest.mark.quick

LAYOUT = BlockLayout(2, 1, BLOCK, 8, 4)
SEGMENT_GAUGES = ("pool_segment_bytes", "pool_segment_free_bytes", "pool_segment_blocks")


class Cluster(Playable):
    """Rank 1 prefills and lends `lent` blocks, rank 2 decodes, rank 3 stores `blocks` blocks."""

    def __init__(
        self, blocks: int = 32, tier: tuple[int, ...] = (), lent: int = 0, **options: object
    ) -> None:
        config = ServeConfig(block_size=BLOCK, **{"overlap_transfers": False} | options)
        self.hub = FakeHub()
        self.waited_s = 0.0
        self.role = new_role(config, LAYOUT, self.hub, clock=lambda: time.monotonic() + self.waited_s)
        self.directory = self.role.control.directory
        nbytes = blocks * LAYOUT.nbytes
        digests = [self.digest_of[key] for key in tier]
        self.tell("gateway-0", m.GatewayHello("gateway-0", ["ipc://tokens"]))
        self.tell("rank-3", m.RankHello(3, "store", 0, nbytes, True))
        self.tell("rank-3", m.TierIndexed(3, 0, list(tier), digests, True))
        self.tell("rank-1", m.RankHello(1, "prefill", 0, lent * LAYOUT.nbytes))
        self.tell("rank-2", m.RankHello(2, "decode", 0))
        self.hub.sent.clear()

    digest_of: dict[int, int] = {}  # noqa: RUF012

    def later(self, seconds: float) -> list[Any]:
        """Let time pass; what was sent because of it."""
        before = len(self.hub.sent)
        self.waited_s += seconds
        self.role.step([])
        return [sent for _, sent in self.hub.sent[before:]]

    def says(self, rank: int, kind: type[ev.RequestEvent], name: str, *fields: Any, **more: Any) -> list[Any]:
        """Deliver a rank's event about the attempt that it was given last.

        Before the end of a branch comes the news that the gateway has all of its tokens.
        """
        body = self.role.machine.bodies[name]
        if kind is m.DecodeEnded:
            self.tell("gateway-0", m.AnswerReceived(body.client_id, more.get("branch", body.body.branch)))
        attempt = self.role.control.requests[name].attempt
        return self.tell(f"rank-{rank}", kind(rank, 0, name, attempt, *fields, **more))

    def recalled(self, recall: m.Recall, *answers: list[int]) -> list[Any]:
        """Deliver what the client of a gateway has, of each branch that it is asked about."""
        prompt = self.role.machine.bodies[recall.request_id].body.token_ids
        tokens = [[*prompt, *answer] for answer in answers]
        so_far = [
            m.AnswerSoFar(
                branch, len(answer), False, prefix_keys(all_, BLOCK, b"model"), block_digests(all_, BLOCK)
            )
            for branch, answer, all_ in zip(recall.branches, answers, tokens, strict=True)
        ]
        event = m.Recalled(recall.request_id, recall.attempt, so_far)
        return self.tell("gateway-0", m.Report(event, list(answers)))

    def ends(self, rank: int) -> list[Any]:
        """Let a rank end that was to end; what was sent because of it."""
        (reason,) = [reason for killed, reason in self.hub.killed if killed == rank]
        return self.tell("steward", m.RankLost(rank, 0, reason))

    def submit(self, name: str, tokens: list[int], salt: bytes = b"model") -> list[Any]:
        message = submit(name, tokens, salt)
        self.digest_of.update(zip(message.request.keys, message.request.digests))
        return self.tell("gateway-0", message)

    def prefill_done(self, start: m.Start, finish: str | None = None) -> list[Any]:
        order = start.order
        assert isinstance(order, m.StartPrefill)
        computed = len(start.body.token_ids) - sum(order.cached.values())
        report = prefilled(start, finished=[0] if finish else [], computed_tokens=computed)
        return self.tell("rank-1", report)

    def serve(self, name: str, tokens: list[int], salt: bytes = b"model") -> m.StartPrefill:
        """A request from its arrival to its end; returns what the prefill rank was told."""
        (start,) = self.submit(name, tokens, salt)
        self.prefill_done(start)
        self.says(2, m.DecodeLoaded, name)
        self.says(2, m.DecodeEnded, name)
        assert isinstance(start.order, m.StartPrefill)
        return start.order

    @property
    def idle_bytes(self) -> int:
        """Bytes of objects that are neither visible nor free: 0 when nothing is under way."""
        stats = self.directory.stats()
        return stats["writing_bytes"] + stats["private_bytes"] + stats["quarantined_bytes"]


def test_after_prefill_the_blocks_are_saved_and_the_decode_rank_gets_all_of_them() -> None:
    cluster = Cluster()
    (job,) = cluster.submit("a", list(range(150)))
    save, decode = cluster.prefill_done(job)
    assert sorted(ref.offset for ref in save.refs) == sorted(ref.offset for ref in job.order.store)
    assert save.checksums == [SUMS, SUMS]
    assert decode.body.token_ids == [*range(150), 7]
    assert decode.order.blocks == job.order.store
    assert decode.order.tail == job.order.tail


def test_a_decode_rank_gets_the_tokens_of_the_blocks_that_it_can_load_already() -> None:
    cluster = Cluster(overlap_transfers=True)
    (job,) = cluster.submit("a", list(range(150)))
    sent = cluster.says(1, m.ChunkStored, "a", 0, [SUMS])
    (ahead,) = [message for message in sent if isinstance(message, m.PrefetchTokens)]
    assert ahead.order.rank == 2
    assert [replace(ref, check=0) for ref in ahead.order.blocks] == job.order.store[:1]
    assert (ahead.token_ids, ahead.salt) == (list(range(BLOCK)), b"model")
    assert ahead.keys == job.body.keys[:1]
    *_, decode = cluster.prefill_done(job)
    assert decode.order.blocks == job.order.store


def test_blocks_on_ssd_are_read_into_dram_before_prefill_starts() -> None:
    tokens = list(range(150))
    keys = prefix_keys(tokens, BLOCK, b"model")
    Cluster.digest_of.update(zip(keys, block_digests(tokens, BLOCK)))
    cluster = Cluster(tier=tuple(keys))
    (ask,) = cluster.submit("a", tokens)
    assert ask.keys == keys
    (job,) = cluster.tell("rank-3", m.BlocksLoaded(3, 0, ask.number, [True, True], [SUMS, SUMS], 0.01))
    assert job.order.load == ask.refs
    assert job.order.cached == {"dram": 0, "ssd": 128}
    assert [load[0] for load in job.order.promoted] == [3]


def test_after_prefill_a_gateway_is_told_that_tokens_may_be_shown_or_that_the_request_is_refused() -> None:
    cluster = Cluster(admission="after-prefill", slo_tpot_ms=1e6)
    (job,) = cluster.submit("a", list(range(150)))
    _, released, decode = cluster.prefill_done(job)
    assert released == m.Release("a")
    assert isinstance(decode.order, m.StartDecode)
    cluster.says(2, m.DecodeLoaded, "a")
    cluster.says(2, m.DecodeEnded, "a", answer_tokens=3, steps=20, sequences=20, steps_s=1e6)
    (job,) = cluster.submit("b", list(range(1000, 1150)))
    _, refused = cluster.prefill_done(job)
    assert isinstance(refused, m.Reject)
    assert refused.request_id == "b"
    assert cluster.role.machine.bodies == {}
    assert cluster.idle_bytes == 0
    assert len(cluster.directory.visible_objects()) == 4, "blocks of both prefills stay for others"


def test_a_prefill_rank_lends_and_the_store_rank_saves_loads_and_checks_its_blocks() -> None:
    cluster = Cluster(blocks=1, lent=8, ssd_dir="tier")
    tokens = list(range(5 * BLOCK + 1))
    (job,) = cluster.submit("a", tokens)
    assert [ref.rank for ref in job.order.store] == [1] * 5
    cluster.prefill_done(job)
    saves = [(peer, sent) for peer, sent in cluster.hub.sent if isinstance(sent, m.SaveBlocks)]
    assert [peer for peer, _ in saves] == ["rank-3"]
    save = saves[0][1]
    assert [ref.rank for ref in save.refs] == [1] * 4  # half a segment may wait, and one is skipped
    cluster.tell("rank-3", m.BlocksSaved(3, 0, save.keys, "written"))
    cluster.tell("rank-3", m.BlocksSaved(3, 0, save.keys, "durable"))
    assert cluster.directory.stats()["keys_ssd"] == 4
    cluster.tell("pool-1", m.PoolQuery("verify"))
    (peer, check) = cluster.hub.sent[-1]
    assert (peer, {ref.rank for ref in check.refs}) == ("rank-3", {1})


def test_blocks_on_ssd_come_back_into_lent_dram_and_those_of_a_failed_transfer_are_computed() -> None:
    tokens = list(range(3 * BLOCK + 1))
    keys = prefix_keys(tokens, BLOCK, b"model")
    Cluster.digest_of.update(zip(keys, block_digests(tokens, BLOCK)))
    cluster = Cluster(blocks=1, lent=8, tier=tuple(keys), ssd_dir="tier")
    own, lent = cluster.submit("a", tokens)
    assert isinstance(own, m.LoadBlocks)
    assert isinstance(lent, m.LoadBlocks)
    assert ([ref.rank for ref in own.refs], [ref.rank for ref in lent.refs]) == ([3], [1, 1])
    assert cluster.tell("rank-3", m.BlocksLoaded(3, 0, own.number, [True], [SUMS], 0.01)) == []
    loaded = m.BlocksLoaded(3, 0, lent.number, [True, False], [SUMS, []], 0.01, "rank 1 has gone", True)
    (job,) = cluster.tell("rank-3", loaded)
    assert (job.order.load, len(job.order.store)) == ([], 3)
    late = cluster.directory.stats()["quarantined_bytes"]
    assert late == LAYOUT.nbytes
    assert cluster.directory.stats()["keys_ssd"] == 3
    assert cluster.directory.counters["tier_bad_blocks"] == 0


def test_the_metrics_and_the_figures_of_the_pool_name_each_rank_that_lends() -> None:
    cluster = Cluster(blocks=4, lent=8)
    (reply,) = cluster.tell("gateway-0", m.MetricsRequest(1))
    sizes = {s.labels["role"]: s.value for s in reply.metrics if s.name == "pool_segment_bytes"}
    assert sizes == {"prefill": 8 * LAYOUT.nbytes, "store": 4 * LAYOUT.nbytes}
    blocks = [s.value for s in reply.metrics if s.name == "pool_segment_blocks"]
    assert blocks == [0, 0]
    (figures,) = cluster.tell("pool-1", m.PoolQuery("stat"))
    assert [(one.rank, one.role) for one in figures.segments] == [(1, "prefill"), (3, "store")]


def test_the_blocks_of_each_segment_are_counted() -> None:
    cluster = Cluster(blocks=4, lent=8)
    cluster.serve("a", list(range(6 * BLOCK)))
    (reply,) = cluster.tell("gateway-0", m.MetricsRequest(1))
    found = {name: [s.value for s in reply.metrics if s.name == name] for name in SEGMENT_GAUGES}
    used = [(size - free) / LAYOUT.nbytes for size, free in zip(*list(found.values())[:2])]
    assert sum(used) == 6
    assert found["pool_segment_blocks"] == used


@pytest.mark.parametrize(("answered", "outcome"), [(False, "cancelled"), (True, "finished")])
def test_a_stream_that_its_client_cuts_is_cancelled_and_one_with_a_stop_string_finished(
    answered: bool, outcome: str
) -> None:
    cluster = Cluster()
    cluster.prefill_done(cluster.submit("a", list(range(150)))[0])
    cluster.tell("gateway-0", m.RequestCancelled("a", answered=answered))
    cluster.says(2, m.DecodeEnded, "a")
    (reply,) = cluster.tell("gateway-0", m.MetricsRequest(1))
    ended = [one for one in reply.metrics if one.name == "class_requests_total"]
    assert [(one.labels["outcome"], one.value) for one in ended] == [(outcome, 1)]


def test_a_preempted_request_is_prefilled_again_with_its_answer_and_reuses_its_blocks() -> None:
    cluster = Cluster()
    (job,) = cluster.submit("a", list(range(150)))
    *_, decode = cluster.prefill_done(job)
    cluster.says(2, m.DecodeLoaded, "a")
    (again,) = cluster.tell("rank-2", left(m.Preempted, decode, [*range(150), *range(50)]))
    assert again.order.load == job.order.store
    assert (len(again.order.store), again.body.answered) == (1, 50)
    sent = cluster.prefill_done(again)
    decode = next(message for message in sent if kind(message) is m.StartDecode)
    assert decode.body.answered == 51
    assert decode.body.keys == prefix_keys([*range(150), *range(50)], BLOCK, b"model")


def test_a_first_token_that_comes_twice_or_after_a_preemption_is_in_no_later_order() -> None:
    cluster = Cluster()
    tokens = list(range(150))
    (job,) = cluster.submit("a", tokens)
    *_, decode = cluster.prefill_done(job)
    cluster.prefill_done(job)
    assert cluster.role.machine.bodies["a"].body.token_ids == [*tokens, 7]
    cluster.says(2, m.DecodeLoaded, "a")
    (busy,) = cluster.submit("b", list(range(200, 350)))
    answered = [*tokens, *range(50)]
    assert cluster.tell("rank-2", left(m.Preempted, decode, answered)) == [], "the prefill rank is busy"
    cluster.prefill_done(job)
    again = [sent for sent in cluster.prefill_done(busy) if isinstance(sent, m.Start)][-1]
    assert (again.order.request_id, again.body.token_ids, again.body.answered) == ("a", answered, 50)


def test_a_swapped_request_is_decoded_on_from_its_kv_with_all_of_its_tokens() -> None:
    cluster = Cluster()
    tokens = list(range(150))
    (job,) = cluster.submit("a", tokens)
    *_, decode = cluster.prefill_done(job)
    cluster.says(2, m.DecodeLoaded, "a")
    answered = [*tokens, *range(50)]
    keys, digests = prefix_keys(answered[:-1], BLOCK, b"model"), block_digests(answered[:-1], BLOCK)
    (granted,) = cluster.says(2, m.SwapWanted, "a", 199, keys, digests)
    assert granted.places[: len(job.order.store)] == [None] * len(job.order.store)
    (decode,) = cluster.tell("rank-2", left(m.Swapped, decode, answered))
    assert (decode.body.token_ids, decode.body.answered, decode.order.attempt) == (answered, 50, 2)
    written = [place for place in granted.places if place is not None]
    assert [*decode.order.blocks, decode.order.tail] == [*job.order.store, *written]
    answered += range(30)
    cluster.says(2, m.DecodeLoaded, "a")
    (again,) = cluster.tell("rank-2", left(m.Preempted, decode, answered))
    assert isinstance(again.order, m.StartPrefill)
    assert again.body.keys == prefix_keys(answered, BLOCK, b"model")


def test_a_rank_that_cannot_be_reached_fails_the_request_and_nothing_leaks() -> None:
    cluster = Cluster()
    cluster.hub.unreachable.add("rank-1")
    sent = cluster.submit("a", list(range(150)))
    for pause_s in (0.6, 1.1):
        recall = sent[-1]
        assert (recall.branches, recall.reason) == ([0], "rank 1 cannot be reached")
        assert cluster.recalled(recall, []) == [], "it pauses"
        sent = cluster.later(pause_s)
    assert sent[-1] == m.Fail("a", "rank 1 cannot be reached")
    assert cluster.role.machine.bodies == {}
    assert cluster.directory.stats()["objects"] == 0


def test_a_message_that_is_too_large_costs_its_request_alone() -> None:
    cluster = Cluster()
    cluster.hub.too_large = m.StartPrefill
    (recall,) = cluster.submit("a", list(range(150)))
    cluster.recalled(recall, [])
    (recall,) = cluster.later(0.6)
    cluster.recalled(recall, [])
    (failed,) = cluster.later(1.1)
    assert isinstance(failed, m.Fail)
    assert "StartPrefill is too large" in failed.reason
    assert cluster.role.machine.bodies == {}
    cluster.hub.too_large = None
    assert cluster.submit("b", list(range(150, 300)))


def test_blocks_whose_load_is_too_large_a_message_are_computed() -> None:
    Cluster().submit("names the keys", list(range(150)))
    cluster = Cluster(tier=tuple(Cluster.digest_of))
    cluster.hub.too_large = m.LoadBlocks
    (job,) = cluster.submit("a", list(range(150)))
    assert (job.order.load, len(job.order.store)) == ([], 2)


@pytest.mark.parametrize(
    "query",
    [m.MetricsRequest(7.0), m.PoolQuery("ls"), m.PoolQuery("stat"), m.Explain("a")],
    ids=["metrics", "ls", "stat", "explain"],
)
def test_an_answer_that_is_too_large_is_an_error_of_its_query_alone(query: m.Message) -> None:
    cluster = Cluster()
    cluster.serve("a", list(range(10 * BLOCK)))
    cluster.hub.max_bytes = 180
    (refused,) = cluster.tell("pool-1", query)
    assert "the limit is 180" in refused.problem
    cluster.hub.max_bytes = DEFAULT_MAX_BYTES
    (answer,) = cluster.tell("pool-1", query)
    assert not isinstance(answer, m.PoolEnded)


@pytest.mark.parametrize("what", ["verify", "get"])
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_pool_command_whose_answers_cannot_be_sent_ends_alone(what: Any, is_killed: bool) -> None:
    """The last blocks that it compares give two answers at once, its progress and its end."""
    cluster = Cluster()
    cluster.serve("a", list(range(150)))
    key = cluster.directory.visible_objects()[0].key
    assert key is not None
    (check,) = cluster.tell("pool-1", m.PoolQuery(what, keys=[key], number=3))
    if is_killed:
        cluster.hub.unreachable.add("pool-1")
    else:
        cluster.hub.too_large = PoolProgress
    good = [True] * len(check.refs)
    told = cluster.tell("rank-3", m.BlocksChecked(3, 0, check.number, good))
    assert [type(one) for one in told] == [PoolProgress if is_killed else m.PoolEnded]
    cluster.hub.too_large = None
    (check,) = cluster.tell("pool-2", m.PoolQuery(what, keys=[key], number=4))
    told = cluster.tell("rank-3", m.BlocksChecked(3, 0, check.number, good))
    assert [type(one) for one in told] == [PoolProgress, m.PoolEnded]
    assert cluster.role.machine._answers._open == {}


def test_a_pool_command_that_is_killed_compares_no_more_blocks() -> None:
    cluster = Cluster(blocks=128)
    cluster.serve("a", list(range(BLOCK * 40)))
    (check,) = cluster.tell("pool-1", m.PoolQuery("verify", number=3))
    cluster.hub.unreachable.add("pool-1")
    told = cluster.tell("rank-3", m.BlocksChecked(3, 0, check.number, [True] * len(check.refs)))
    more = [one for one in told if isinstance(one, m.CheckBlocks)]
    ended = [cluster.tell("rank-3", m.BlocksChecked(3, 0, one.number, [True] * 16)) for one in more]
    assert (len(check.refs), not any(ended)) == (16, True)
    assert cluster.role.control.directory.stats()["owners"] == 0


def test_after_a_failed_transfer_the_ranges_are_given_to_nobody() -> None:
    cluster = Cluster()
    cluster.submit("a", list(range(150)))
    (recall,) = cluster.says(1, m.RequestFailed, "a", "a cable", may_still_write=True)
    assert recall == m.Recall("a", 1, [0], "a cable")
    assert cluster.recalled(recall, []) == [], "it pauses"
    (job,) = cluster.later(0.6)
    assert job.order.attempt == 2
    assert cluster.directory.stats()["quarantined_bytes"] == 3 * LAYOUT.nbytes
    assert (job.body.token_ids, job.body.answered) == (list(range(150)), 0)


def puts_wanted(
    keys: list[int], digests: list[int], before: list[tuple[int | None, int]], request_id: str = "a"
) -> m.Report:
    """Rank 2 has filled blocks, for a request that may have ended."""
    event = m.PutsWanted(2, 0, 1, keys, digests, before, [request_id] * len(keys))
    return m.Report(event, [[0] * BLOCK] * len(keys))


def test_the_eviction_policy_learns_what_each_block_hangs_on_and_what_it_costs() -> None:
    cluster = Cluster(eviction="gdsf")
    cluster.serve("a", list(range(192)))
    tokens = [*range(192), *range(500, 564)]
    keys, digests = prefix_keys(tokens, BLOCK, b"model"), block_digests(tokens, BLOCK)
    wanted = puts_wanted([keys[3]], [digests[3]], [(keys[2], 3)])
    (granted,) = cluster.tell("rank-2", wanted)
    cluster.tell("rank-2", m.PutsEnded(2, 0, 1, [granted.places[0].object_id], [SUMS]))
    hits = cluster.directory.lookup(keys, digests, 0, touch=False)
    facts = [cluster.directory.object(hit.object_id or 0).facts for hit in hits]
    assert [found.parent for found in facts] == [None, *keys[:3]]
    assert [found.position for found in facts] == [0, 1, 2, 3]
    assert all(found.cost_s > 0 and found.nbytes == LAYOUT.nbytes for found in facts)
    assert facts[3].cost_s == cluster.role.control.state.costs.recompute_s(4 * BLOCK, 3 * BLOCK)


def test_a_rank_that_becomes_the_conductor_takes_the_policy_of_its_configuration() -> None:
    config = ServeConfig(block_size=BLOCK, eviction="sieve")
    role = new_role(config, LAYOUT, FakeHub())
    role.step([("rank-3", m.RankHello(3, "store", 0, 9 * LAYOUT.nbytes))])
    policy = role.control.directory._segments[3].policy
    assert (type(policy), policy.capacity) == (SIEVE, 9)


def test_a_prompt_that_is_not_admitted_is_decoded_all_the_same_and_leaves_nothing_behind() -> None:
    cluster = Cluster(eviction="lru+second-hit")
    for turn, cached in (("a", 0), ("b", 0), ("c", 128)):
        job = cluster.serve(turn, list(range(150)))
        assert job.cached["dram"] == cached
        assert len(job.load) + len(job.store) == 2
        assert cluster.idle_bytes == 0
    assert cluster.directory.counters["puts_not_admitted"] == 2


FAILED = m.RankLost(2, 0, "failed: out of paper")


@pytest.mark.parametrize("profile", ["ft", "fast"])
def test_a_rank_that_reports_an_error_is_killed_and_lost_when_it_has_ended(profile: str) -> None:
    cluster = Cluster(mpi_profile=profile)
    assert cluster.tell("rank-2", FAILED) == []
    assert cluster.hub.killed == [(2, "failed: out of paper")]
    assert cluster.role.control.members.lost.keys() == set()
    cluster.ends(2)
    if profile == "ft":
        assert cluster.role.control.members.lost.keys() == {2}
        assert cluster.role.machine.stop is None
    else:
        assert cluster.role.machine.stop == m.Stop("rank 2 (decode) failed: out of paper", 0.0, True)


def test_the_loss_of_a_rank_without_which_nothing_goes_on_ends_the_cluster_and_names_it() -> None:
    cluster = Cluster()
    cluster.submit("a", list(range(150)))
    before = len(cluster.hub.sent)
    cluster.role.step([("steward", m.RankLost(0, 0, "failed: thread monitor died: KeyError: 1"))])
    told = [message for _, message in cluster.hub.sent[before:]]
    assert not [message for message in told if isinstance(message, m.Fail)]  # HTTP 500; the Stop means 503
    assert cluster.role.machine.stop.reason == "rank 0 (steward) failed: thread monitor died: KeyError: 1"


def test_a_rank_that_is_lost_before_all_are_ready_ends_the_cluster() -> None:
    role = new_role(ServeConfig(), LAYOUT, FakeHub())
    role.step([("rank-1", m.RankHello(1, "prefill", 0))])
    role.step([("steward", ev.RankLost(2, 0, "died: its process 5 ended"))])
    assert role.machine.stop == m.Stop("rank 2 (decode) died: its process 5 ended", 0.0, True)


def test_an_event_that_names_another_rank_than_its_sender_changes_nothing_and_is_counted() -> None:
    cluster = Cluster()
    (job,) = cluster.submit("a", list(range(150)))
    report, lost = prefilled(job), m.RankLost(3, 0, "failed: out of paper")
    failed = m.RequestFailed(1, 0, "a", job.order.attempt, "a cable")
    for peer, message in [
        ("rank-2", failed),
        ("rank-2", report),
        ("rank-1", puts_wanted([1], [2], [(None, 0)])),
        ("gateway-0", lost),
        ("rank-2 last word", lost),
        ("rank-2", m.GatewayLost("gateway-0", "a rank says so")),
    ]:
        assert cluster.tell(peer, message) == []
    assert (cluster.role.machine.impostors, cluster.role.machine.stop, cluster.hub.killed) == (6, None, [])
    (reply,) = cluster.tell("gateway-0", m.MetricsRequest(1))
    assert [s.value for s in reply.metrics if s.name == "events_ignored_total"] == [6]
    *_, decode = cluster.tell("rank-1", report)
    assert (decode.order.request_id, decode.body.token_ids) == ("a", [*range(150), 7])
    cluster.says(2, m.DecodeLoaded, "a")
    cluster.says(2, m.DecodeEnded, "a")
    cluster.tell("rank-3 last word", lost)
    assert cluster.hub.killed == [(3, "failed: out of paper")]


def test_a_doubled_submit_changes_nothing_and_the_first_one_goes_on() -> None:
    cluster = Cluster()
    (job,) = cluster.submit("a", list(range(150)))
    body = cluster.role.machine.bodies["a"]
    assert cluster.submit("a", list(range(500, 700))) == []
    assert cluster.role.machine.bodies == {"a": body}
    assert (body.body.token_ids, cluster.role.control.ignored) == (list(range(150)), 1)
    *_, decode = cluster.prefill_done(job)
    assert cluster.submit("a", list(range(150))) == []
    assert cluster.role.control.ignored == 2
    assert decode.body.token_ids == [*range(150), 7]
    cluster.says(2, m.DecodeLoaded, "a")
    cluster.says(2, m.DecodeEnded, "a")
    assert (cluster.role.machine.bodies, cluster.idle_bytes) == ({}, 0)
    assert cluster.submit("a", list(range(150))), "its name is free again"


def test_before_everybody_is_there_requests_are_refused_and_the_missing_are_named() -> None:
    hub = FakeHub()
    role = new_role(ServeConfig(), LAYOUT, hub)
    role.step([("gateway-0", m.GatewayHello("gateway-0", ["ipc://tokens"]))])
    (status,) = [sent for _, sent in hub.sent]
    assert status == m.ClusterStatus(False, "waiting for rank 1 (prefill), 2 (decode), 3 (store)")


def test_the_metrics_tell_of_decisions_and_the_pool() -> None:
    cluster = Cluster()
    cluster.serve("a", list(range(128)))
    cluster.serve("b", list(range(128)))
    (reply,) = cluster.tell("gateway-0", m.MetricsRequest(5))
    found = {(metric.name, metric.labels.get("tier")): metric for metric in reply.metrics}
    assert found["schedule_decision_seconds", None].value == 2
    assert found["schedule_decision_seconds", None].buckets[-1][1] == 2
    assert found["predicted_ttft_ratio", None].value == 1, "the first one was a guess"
    assert found["predicted_tbt_ratio", None].value == 0
    assert found["pool_keys_dram", None].value == 2


def test_the_metrics_count_the_open_requests_by_stage_and_at_each_prefill_rank() -> None:
    cluster = Cluster(max_num_seqs=4)

    def figures() -> dict[str, float]:
        (reply,) = cluster.tell("gateway-0", m.MetricsRequest(1))
        wanted = ("requests_by_stage", "prefill_requests_waiting", "prefill_requests_running")
        found = [one for one in reply.metrics if one.name in wanted]
        return {one.labels.get("stage") or f"{one.name} {one.labels['rank']}": one.value for one in found}

    for number in range(6):
        cluster.submit(str(number), list(range(100 * number, 100 * number + 100)))
    cluster.tell("gateway-0", m.RequestCancelled("3"))
    (first, *_) = [message for _, message in cluster.hub.sent if kind(message) is m.StartPrefill]
    cluster.prefill_done(first)
    assert figures() == {
        "held": 1, "queued": 2, "promoting": 0, "prefilling": 1, "loading": 1, "decoding": 0, "ending": 0,
        "recalling": 0, "cancelled": 0, "prefill_requests_waiting 1": 2, "prefill_requests_running 1": 1,
    }  # fmt: skip
    cluster.says(2, m.DecodeLoaded, "0")
    assert (figures()["loading"], figures()["decoding"]) == (0, 1)
    cluster.tell("rank-2", m.DecodeEnded(2, 0, "0", 1))
    assert (figures()["held"], figures()["decoding"], figures()["ending"]) == (0, 0, 1)
    cluster.tell("gateway-0", m.AnswerReceived("0", 0))
    assert figures()["ending"] == 0


def test_branches_of_a_prompt_are_decoded_together_and_a_preempted_one_goes_on_alone() -> None:
    cluster = Cluster()
    tokens = list(range(70))
    (job,) = cluster.tell("gateway-0", submit("a", tokens, n=3))
    assert isinstance(job.order, m.StartPrefill)
    assert (job.body.n, job.body.branch) == (3, 0)
    cluster.tell("gateway-0", m.AnswerReceived("a", 1))
    *_, decode = cluster.tell("rank-1", prefilled(job, [7, 8, 9], finished=[1]))
    assert isinstance(decode.order, m.StartDecode)
    assert (decode.body.token_ids, decode.body.answers) == (
        tokens,
        [m.BranchAnswer(0, [7]), m.BranchAnswer(2, [9])],
    )
    cluster.says(2, m.DecodeLoaded, "a")
    answered = [*tokens, *range(60)]
    (again,) = cluster.tell("rank-2", left(m.Preempted, decode, answered, branch=2))
    assert isinstance(again.order, m.StartPrefill)
    assert (again.order.request_id, again.body.token_ids, again.body.answered) == ("a#2", answered, 60)
    assert (again.body.n, again.body.branch, again.body.keys) == (
        1,
        2,
        prefix_keys(answered, BLOCK, b"model"),
    )
    cluster.says(2, m.DecodeEnded, "a", branch=0)
    assert cluster.role.machine.bodies.keys() == {"a#2"}
    *_, decode = cluster.tell("rank-1", prefilled(again, [5]))
    assert isinstance(decode.order, m.StartDecode)
    assert (decode.body.branch, decode.body.answers, decode.body.token_ids) == (2, [], [*answered, 5])
    told = cluster.says(2, m.RequestFailed, "a#2", "a cable", for_good=True)
    assert m.Fail("a", "a cable") in told, "under the name that the gateway knows"
    assert not cluster.role.machine.bodies
    (reply,) = cluster.tell("gateway-0", m.MetricsRequest(1))
    assert [one.value for one in reply.metrics if one.name == "class_requests_total"] == [1]
