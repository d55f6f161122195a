"""The conductor role as a conversation: messages in, messages out, books that balance. No sockets."""

from __future__ import annotations

import msgspec
import pytest

from mooncake_lite import messages as m
from mooncake_lite.config import ServeConfig
from mooncake_lite.roles.compute_rank import ComputeRank
from store.keys import block_digests, prefix_keys
from store.layout import BlockLayout
from store.policies.sieve import SIEVE
from tests.mooncake_lite.roles.fake_hub import FakeHub, new_role
from transport.errors import WireError

pytestmark = pytest.mark.quick

BLOCK = 64
LAYOUT = BlockLayout(2, 1, BLOCK, 8, 4)
SUMS = [11, 12]
SEGMENT_GAUGES = ("pool_segment_bytes", "pool_segment_free_bytes", "pool_segment_blocks")


class Cluster:
    """Rank 1 prefills and lends `lent` blocks, rank 2 decodes, rank 3 stores `blocks` blocks."""

    def __init__(
        self, blocks: int = 32, tier: tuple[int, ...] = (), lent: int = 0, **options: object
    ) -> None:
        config = ServeConfig(block_size=BLOCK, **options)  # type: ignore[arg-type]
        self.hub = FakeHub()
        self.role = new_role(config, LAYOUT, self.hub)
        self.directory = self.role.control.directory
        nbytes = blocks * LAYOUT.nbytes
        digests = [self.digest_of[key] for key in tier]
        self.tell("gateway-0", m.GatewayHello("gateway-0", ["ipc://tokens"]))
        self.tell("rank-3", m.RankHello(3, "store", 0, nbytes, True))
        self.tell("rank-3", m.TierIndex(list(tier), digests, True))
        self.tell("rank-1", m.RankHello(1, "prefill", 0, lent * LAYOUT.nbytes))
        self.tell("rank-2", m.RankHello(2, "decode", 0))
        self.hub.sent.clear()

    digest_of: dict[int, int] = {}  # noqa: RUF012

    def tell(self, peer: str, message: m.Message) -> list[m.Message]:
        """Deliver one message; what was sent because of it. The books are checked every time.

        Ranks answer for the attempt that they were given last.
        """
        held = self.role.held.get(getattr(message, "request_id", ""))
        if held is not None and hasattr(message, "attempt"):
            message = msgspec.structs.replace(message, attempt=held.attempt)
        before = len(self.hub.sent)
        self.role.step([(peer, message)])
        self.role.control.check()
        return [sent for _, sent in self.hub.sent[before:]]

    def submit(self, name: str, tokens: list[int], salt: bytes = b"model") -> list[m.Message]:
        keys = prefix_keys(tokens, BLOCK, salt)
        digests = block_digests(tokens, BLOCK)
        if not salt:
            keys = digests = []
        self.digest_of.update(zip(keys, digests))
        sampling = m.Sampling(0.0)
        message = m.Submit(name, "gateway-0", tokens, keys, digests, salt, sampling, 16, [0])
        return self.tell("gateway-0", message)

    def prefill_done(self, job: m.Prefill, finish: str | None = None) -> list[m.Message]:
        computed = len(job.token_ids) - sum(job.cached_tokens.values())
        done = m.PrefillDone(
            job.request_id, [7], [finish], [SUMS] * len(job.store), [], 0.1, computed_tokens=computed
        )
        return self.tell("rank-1", done)

    def serve(self, name: str, tokens: list[int], salt: bytes = b"model") -> m.Prefill:
        """A request from its arrival to its end; returns what the prefill rank was told."""
        (job,) = self.submit(name, tokens, salt)
        assert isinstance(job, m.Prefill)
        self.prefill_done(job)
        self.tell("rank-2", m.DecodeLoaded(name))
        self.tell("rank-2", m.DecodeDone(name))
        return job

    @property
    def idle_bytes(self) -> int:
        """Bytes of objects that are neither visible nor free: 0 when nothing is under way."""
        stats = self.directory.stats()
        return stats["writing_bytes"] + stats["private_bytes"] + stats["quarantined_bytes"]


def test_a_cold_request_stores_its_full_blocks_and_a_tail() -> None:
    cluster = Cluster()
    (job,) = cluster.submit("a", list(range(150)))
    assert isinstance(job, m.Prefill)
    assert (len(job.load), len(job.store), job.tail is not None) == (0, 2, True)
    assert job.cached_tokens == {"dram": 0, "ssd": 0}


def test_after_prefill_the_blocks_are_saved_and_the_decode_rank_gets_all_of_them() -> None:
    cluster = Cluster()
    (job,) = cluster.submit("a", list(range(150)))
    save, decode = cluster.prefill_done(job)  # type: ignore[arg-type]
    assert isinstance(save, m.SaveBlocks)
    assert sorted(ref.offset for ref in save.refs) == sorted(ref.offset for ref in job.store)
    assert save.checksums == [SUMS, SUMS]
    assert isinstance(decode, m.Decode)
    assert decode.token_ids == [*range(150), 7]
    assert decode.blocks == job.store
    assert decode.tail == job.tail


def test_when_decode_has_loaded_the_tail_is_freed_and_nothing_is_leased() -> None:
    cluster = Cluster()
    (job,) = cluster.submit("a", list(range(150)))
    cluster.prefill_done(job)  # type: ignore[arg-type]
    assert cluster.idle_bytes == LAYOUT.nbytes
    cluster.tell("rank-2", m.DecodeLoaded("a"))
    assert cluster.idle_bytes == 0
    assert cluster.directory.stats()["owners"] == 0


def test_the_second_request_reuses_the_first_ones_blocks() -> None:
    cluster = Cluster()
    first = cluster.serve("a", list(range(150)))
    (job,) = cluster.submit("b", [*range(150), 1, 2, 3])
    assert isinstance(job, m.Prefill)
    assert job.load == first.store
    assert job.cached_tokens == {"dram": 128, "ssd": 0}


def test_of_a_full_hit_the_last_token_does_not_count_as_cached() -> None:
    cluster = Cluster()
    cluster.serve("a", list(range(128)))
    (job,) = cluster.submit("b", list(range(128)))
    assert isinstance(job, m.Prefill)
    assert (len(job.load), job.store, job.tail) == (2, [], None)
    assert job.cached_tokens == {"dram": 127, "ssd": 0}


def test_another_salt_shares_nothing() -> None:
    cluster = Cluster()
    cluster.serve("a", list(range(150)))
    (job,) = cluster.submit("b", list(range(150)), salt=b"model+tenant")
    assert isinstance(job, m.Prefill)
    assert job.load == []


def test_with_reuse_off_blocks_are_private_and_gone_at_the_end() -> None:
    cluster = Cluster(enable_prefix_caching=False)
    (job,) = cluster.submit("a", list(range(150)), salt=b"")
    assert isinstance(job, m.Prefill)
    sent = cluster.prefill_done(job)
    assert [type(message) for message in sent] == [m.Decode]
    assert sent[0].salt == b""  # type: ignore[attr-defined]
    cluster.tell("rank-2", m.DecodeLoaded("a"))
    assert cluster.directory.stats()["objects"] == 0


def test_two_requests_with_the_same_new_prefix_leave_one_copy() -> None:
    cluster = Cluster(prefill=1, max_num_seqs=4)
    (first,) = cluster.submit("a", list(range(128)))
    cluster.submit("b", list(range(128)))
    sent = cluster.prefill_done(first)  # type: ignore[arg-type]
    second = next(message for message in sent if isinstance(message, m.Prefill))
    assert second.load == first.store  # type: ignore[attr-defined]
    assert cluster.directory.stats()["keys_dram"] == 2


def test_a_request_that_ends_with_its_first_token_never_reaches_decode() -> None:
    cluster = Cluster()
    (job,) = cluster.submit("a", list(range(150)))
    sent = cluster.prefill_done(job, finish="length")  # type: ignore[arg-type]
    assert not any(isinstance(message, m.Decode) for message in sent)
    assert cluster.idle_bytes == 0
    assert cluster.role.held == {}


def test_blocks_on_ssd_are_read_into_dram_before_prefill_starts() -> None:
    tokens = list(range(150))
    keys = prefix_keys(tokens, BLOCK, b"model")
    Cluster.digest_of.update(zip(keys, block_digests(tokens, BLOCK)))
    cluster = Cluster(tier=tuple(keys))
    (ask,) = cluster.submit("a", tokens)
    assert isinstance(ask, m.LoadBlocks)
    assert ask.keys == keys
    (job,) = cluster.tell("rank-3", m.BlocksLoaded(ask.number, [True, True], [SUMS, SUMS], 0.01))
    assert isinstance(job, m.Prefill)
    assert job.load == ask.refs
    assert job.cached_tokens == {"dram": 0, "ssd": 128}
    assert "promote" in [span.stage for span in job.spans]


def test_a_bad_block_on_ssd_is_a_miss_and_what_stands_before_it_is_still_used() -> None:
    tokens = list(range(200))
    keys = prefix_keys(tokens, BLOCK, b"model")
    Cluster.digest_of.update(zip(keys, block_digests(tokens, BLOCK)))
    cluster = Cluster(tier=tuple(keys))
    (ask,) = cluster.submit("a", tokens)
    assert isinstance(ask, m.LoadBlocks)
    answer = m.BlocksLoaded(ask.number, [True, False, True], [SUMS, [], SUMS], 0.01)
    (again,) = cluster.tell("rank-3", answer)
    assert isinstance(again, m.LoadBlocks)
    assert again.keys == keys[:1]
    (job,) = cluster.tell("rank-3", m.BlocksLoaded(again.number, [True], [SUMS], 0.01))
    assert isinstance(job, m.Prefill)
    assert len(job.load) == 1
    assert len(job.store) == 2
    assert cluster.directory.counters["tier_bad_blocks"] == 1


def test_what_was_saved_can_be_evicted_from_dram_and_comes_back_from_ssd() -> None:
    cluster = Cluster(blocks=4)
    tokens = list(range(128))
    cluster.serve("a", tokens)
    keys = prefix_keys(tokens, BLOCK, b"model")
    cluster.tell("rank-3", m.BlocksSaved(keys, "written"))
    cluster.tell("rank-3", m.BlocksSaved(keys, "durable"))
    other = cluster.serve("b", list(range(1000, 1000 + 250)))
    assert len(other.store) == 3
    (ask,) = cluster.submit("c", tokens)
    assert isinstance(ask, m.LoadBlocks)


def test_a_block_from_ssd_stays_in_dram_from_its_second_hit_on() -> None:
    tokens = list(range(150))
    keys = prefix_keys(tokens, BLOCK, b"model")
    Cluster.digest_of.update(zip(keys, block_digests(tokens, BLOCK)))
    cluster = Cluster(tier=tuple(keys))
    cached = []
    for name in ("a", "b", "c"):
        sent = cluster.submit(name, tokens)
        if isinstance(sent[0], m.LoadBlocks):
            sent = cluster.tell("rank-3", m.BlocksLoaded(sent[0].number, [True] * 2, [SUMS] * 2, 0.01))
        (job,) = sent
        assert isinstance(job, m.Prefill)
        cached.append(job.cached_tokens)
        cluster.prefill_done(job)
        cluster.tell("rank-2", m.DecodeLoaded(name))
        cluster.tell("rank-2", m.DecodeDone(name))
        assert cluster.idle_bytes == 0
        assert cluster.directory.stats()["keys_dram"] == (0 if name == "a" else 2)
    assert cached == [{"dram": 0, "ssd": 128}, {"dram": 0, "ssd": 128}, {"dram": 128, "ssd": 0}]


def test_a_block_whose_bytes_went_bad_in_dram_is_computed_again() -> None:
    cluster = Cluster()
    tokens = list(range(150))
    cluster.serve("a", tokens)
    keys = prefix_keys(tokens, BLOCK, b"model")
    cluster.tell("rank-3", m.BlocksSaved(keys[1:], "bad"))
    (job,) = cluster.submit("b", tokens)
    assert isinstance(job, m.Prefill)
    assert (len(job.load), len(job.store)) == (1, 1)


def test_a_full_pool_makes_a_request_wait_and_a_freed_one_lets_it_go() -> None:
    cluster = Cluster(blocks=4)
    (first,) = cluster.submit("a", list(range(150)))
    assert cluster.submit("b", list(range(1000, 1150))) == []
    sent = cluster.prefill_done(first)  # type: ignore[arg-type]
    assert not any(isinstance(message, m.Prefill) for message in sent)
    (save,) = [message for message in sent if isinstance(message, m.SaveBlocks)]
    cluster.tell("rank-3", m.BlocksSaved(save.keys, "written"))
    sent = cluster.tell("rank-2", m.DecodeLoaded("a"))
    assert [type(message) for message in sent] == [m.Prefill]


def test_after_prefill_a_gateway_is_told_that_tokens_may_be_shown_or_that_the_request_is_refused() -> None:
    cluster = Cluster(admission="after-prefill", slo_tpot_ms=1e6)
    (job,) = cluster.submit("a", list(range(150)))
    _, released, decode = cluster.prefill_done(job)  # type: ignore[arg-type]
    assert released == m.Released("a")
    assert isinstance(decode, m.Decode)
    cluster.tell("rank-2", m.DecodeLoaded("a"))
    cluster.tell("rank-2", m.DecodeDone("a", answer_tokens=3, steps=20, sequences=20, steps_s=1e6))
    (job,) = cluster.submit("b", list(range(1000, 1150)))
    _, refused = cluster.prefill_done(job)  # type: ignore[arg-type]
    assert isinstance(refused, m.Rejected)
    assert refused.request_id == "b"
    assert cluster.role.held == {}
    assert cluster.idle_bytes == 0
    assert len(cluster.directory.visible_objects()) == 4, "blocks of both prefills stay for others"


def test_a_pool_that_pins_have_filled_refuses_a_request_and_takes_it_when_they_are_gone() -> None:
    cluster = Cluster(blocks=3)
    tokens = list(range(2 * BLOCK + 1))
    cluster.serve("a", tokens)
    keys = prefix_keys(tokens, BLOCK, b"model")
    cluster.tell("rank-3", m.BlocksSaved(keys, "written"))
    cluster.tell("pool-1", m.PoolQuery("pin", keys=keys, hard=True))
    (refused,) = cluster.submit("b", list(range(1000, 1150)))
    assert isinstance(refused, m.Rejected)
    assert refused.reason.startswith("pool full: ")
    assert f"leased or pinned {2 * LAYOUT.nbytes}" in refused.reason
    assert cluster.role.held == {}
    cluster.tell("pool-1", m.PoolQuery("pin", keys=keys))
    (job,) = cluster.submit("c", list(range(1000, 1150)))
    assert isinstance(job, m.Prefill)


def test_a_prefix_on_ssd_that_its_own_segment_cannot_hold_goes_to_another_one_too() -> None:
    """Written by one store rank, read by two: the tier of rank 3 holds more than its DRAM."""
    tokens = list(range(6 * BLOCK + 5))
    keys = prefix_keys(tokens, BLOCK, b"model")
    Cluster.digest_of.update(zip(keys, block_digests(tokens, BLOCK)))
    cluster = Cluster(blocks=4, tier=tuple(keys))
    cluster.directory.add_segment(4, 4 * LAYOUT.nbytes, 0)
    cluster.role.control.config.nodes.append(0)
    asked = cluster.submit("a", tokens)
    assert [(ask.keys, {ref.rank for ref in ask.refs}) for ask in asked] == [  # type: ignore[attr-defined]
        (keys[:4], {3}), (keys[4:], {4})
    ]  # fmt: skip
    for ask in asked:
        count = len(ask.keys)  # type: ignore[attr-defined]
        sent = cluster.tell("rank-3", m.BlocksLoaded(ask.number, [True] * count, [SUMS] * count, 0.01))  # type: ignore[attr-defined]
    (job,) = sent
    assert isinstance(job, m.Prefill)
    assert (len(job.load), job.cached_tokens) == (6, {"dram": 0, "ssd": 6 * BLOCK})


def test_a_prefill_rank_lends_and_the_store_rank_saves_loads_and_checks_its_blocks() -> None:
    cluster = Cluster(blocks=1, lent=8, ssd_dir="tier")
    tokens = list(range(5 * BLOCK + 1))
    (job,) = cluster.submit("a", tokens)
    assert isinstance(job, m.Prefill)
    assert [ref.rank for ref in job.store] == [1] * 5
    cluster.prefill_done(job)
    saves = [(peer, sent) for peer, sent in cluster.hub.sent if isinstance(sent, m.SaveBlocks)]
    assert [peer for peer, _ in saves] == ["rank-3"]
    save = saves[0][1]
    assert isinstance(save, m.SaveBlocks)
    assert [ref.rank for ref in save.refs] == [1] * 4  # half a segment may wait, and one is skipped
    cluster.tell("rank-3", m.BlocksSaved(save.keys, "written"))
    cluster.tell("rank-3", m.BlocksSaved(save.keys, "durable"))
    assert cluster.directory.stats()["keys_ssd"] == 4
    cluster.tell("pool-1", m.PoolQuery("verify"))
    (peer, check) = cluster.hub.sent[-1]
    assert isinstance(check, m.CheckBlocks)
    assert (peer, {ref.rank for ref in check.refs}) == ("rank-3", {1})


def test_blocks_on_ssd_come_back_into_lent_dram_and_a_transfer_that_fails_ends_its_request_alone() -> None:
    tokens = list(range(3 * BLOCK + 1))
    keys = prefix_keys(tokens, BLOCK, b"model")
    Cluster.digest_of.update(zip(keys, block_digests(tokens, BLOCK)))
    cluster = Cluster(blocks=1, lent=8, tier=tuple(keys), ssd_dir="tier")
    own, lent = cluster.submit("a", tokens)
    assert isinstance(own, m.LoadBlocks)
    assert isinstance(lent, m.LoadBlocks)
    assert ([ref.rank for ref in own.refs], [ref.rank for ref in lent.refs]) == ([3], [1, 1])
    assert cluster.tell("rank-3", m.BlocksLoaded(own.number, [True], [SUMS], 0.01)) == []
    loaded = m.BlocksLoaded(lent.number, [True, False], [SUMS, []], 0.01, "rank 1 has gone", True)
    (failed,) = cluster.tell("rank-3", loaded)
    assert failed == m.Failed("a", "KV could not be moved: rank 1 has gone")
    assert cluster.role.held == {}
    assert cluster.idle_bytes == LAYOUT.nbytes  # into which late bytes may come
    assert cluster.directory.stats()["keys_ssd"] == 3
    assert cluster.directory.counters["tier_bad_blocks"] == 0


def test_the_metrics_and_the_figures_of_the_pool_name_each_rank_that_lends() -> None:
    cluster = Cluster(blocks=4, lent=8)
    (reply,) = cluster.tell("gateway-0", m.MetricsRequest(1))
    assert isinstance(reply, m.MetricsReply)
    sizes = {s.labels["role"]: s.value for s in reply.metrics if s.name == "pool_segment_bytes"}
    assert sizes == {"prefill": 8 * LAYOUT.nbytes, "store": 4 * LAYOUT.nbytes}
    blocks = [s.value for s in reply.metrics if s.name == "pool_segment_blocks"]
    assert blocks == [0, 0]
    (figures,) = cluster.tell("pool-1", m.PoolQuery("stat"))
    assert [(one.rank, one.role) for one in figures.segments] == [(1, "prefill"), (3, "store")]  # type: ignore[attr-defined]


def test_the_blocks_of_each_segment_are_counted() -> None:
    cluster = Cluster(blocks=4, lent=8)
    cluster.serve("a", list(range(6 * BLOCK)))
    (reply,) = cluster.tell("gateway-0", m.MetricsRequest(1))
    assert isinstance(reply, m.MetricsReply)
    found = {name: [s.value for s in reply.metrics if s.name == name] for name in SEGMENT_GAUGES}
    used = [(size - free) / LAYOUT.nbytes for size, free in zip(*list(found.values())[:2])]
    assert sum(used) == 6
    assert found["pool_segment_blocks"] == used


def test_the_queue_is_bounded() -> None:
    cluster = Cluster(max_queue=1)
    cluster.submit("a", list(range(100)))
    cluster.submit("b", list(range(100)))
    (refused,) = cluster.submit("c", list(range(100)))
    assert isinstance(refused, m.Rejected)
    assert refused.retry_after_s >= 1


def test_a_cancelled_request_leaves_nothing_whatever_its_stage() -> None:
    for stage in ("waiting", "prefill", "decode"):
        cluster = Cluster()
        if stage == "waiting":
            cluster.submit("first", list(range(500, 600)))
        sent = cluster.submit("a", list(range(150)))
        if stage == "decode":
            cluster.prefill_done(sent[0])  # type: ignore[arg-type]
        told = cluster.tell("gateway-0", m.Cancel("a"))
        if stage == "prefill":
            assert told == [m.Cancel("a", 1)]
            cluster.tell("rank-1", m.RequestFailed("a", "cancelled"))
        elif stage == "decode":
            assert told == [m.Cancel("a", 1)]
            cluster.tell("rank-2", m.DecodeDone("a"))
        assert "a" not in cluster.role.held
        assert cluster.idle_bytes == (2 * LAYOUT.nbytes if stage == "waiting" else 0)


def test_a_request_cancelled_while_its_blocks_come_from_ssd_ends_when_they_are_there() -> None:
    tokens = list(range(150))
    keys = prefix_keys(tokens, BLOCK, b"model")
    Cluster.digest_of.update(zip(keys, block_digests(tokens, BLOCK)))
    cluster = Cluster(tier=tuple(keys))
    (ask,) = cluster.submit("a", tokens)
    cluster.tell("gateway-0", m.Cancel("a"))
    cluster.tell("rank-3", m.BlocksLoaded(ask.number, [True, True], [SUMS, SUMS], 0.01))  # type: ignore[attr-defined]
    assert cluster.role.held == {}
    assert cluster.idle_bytes == 0
    assert cluster.directory.stats()["keys_dram"] == 0


def test_a_prefill_that_was_cancelled_too_late_does_not_go_to_decode() -> None:
    cluster = Cluster()
    (job,) = cluster.submit("a", list(range(150)))
    cluster.tell("gateway-0", m.Cancel("a"))
    sent = cluster.prefill_done(job)  # type: ignore[arg-type]
    assert not any(isinstance(message, m.Decode) for message in sent)
    assert cluster.role.held == {}


def test_a_preempted_request_is_prefilled_again_with_its_answer_and_reuses_its_blocks() -> None:
    cluster = Cluster()
    (job,) = cluster.submit("a", list(range(150)))
    cluster.prefill_done(job)  # type: ignore[arg-type]
    cluster.tell("rank-2", m.DecodeLoaded("a"))
    (again,) = cluster.tell("rank-2", m.Preempted("a", [*range(150), *range(50)], 50))
    assert isinstance(again, m.Prefill)
    assert again.load == job.store  # type: ignore[attr-defined]
    assert (len(again.store), again.answered) == (1, 50)
    sent = cluster.prefill_done(again)
    decode = next(message for message in sent if isinstance(message, m.Decode))
    assert decode.answered == 51
    assert decode.keys == prefix_keys([*range(150), *range(50)], BLOCK, b"model")


def test_a_swapped_request_is_decoded_on_from_its_kv_with_all_of_its_tokens() -> None:
    cluster = Cluster()
    tokens = list(range(150))
    (job,) = cluster.submit("a", tokens)
    cluster.prefill_done(job)  # type: ignore[arg-type]
    cluster.tell("rank-2", m.DecodeLoaded("a"))
    answered = [*tokens, *range(50)]
    keys, digests = prefix_keys(answered[:-1], BLOCK, b"model"), block_digests(answered[:-1], BLOCK)
    (granted,) = cluster.tell("rank-2", m.SwapWanted("a", 199, keys, digests))
    assert isinstance(granted, m.SwapGranted)
    assert granted.places is not None
    assert granted.places[: len(job.store)] == [None] * len(job.store)  # type: ignore[attr-defined]
    (decode,) = cluster.tell("rank-2", m.Swapped("a", answered, 50))
    assert isinstance(decode, m.Decode)
    assert (decode.token_ids, decode.answered, decode.attempt) == (answered, 50, 2)
    written = [place for place in granted.places if place is not None]
    assert [*decode.blocks, decode.tail] == [*job.store, *written]  # type: ignore[attr-defined]
    answered += range(30)
    cluster.tell("rank-2", m.DecodeLoaded("a", attempt=2))
    (again,) = cluster.tell("rank-2", m.Preempted("a", answered, 80, attempt=2))
    assert isinstance(again, m.Prefill)
    assert again.keys == prefix_keys(answered, BLOCK, b"model")


def test_a_rank_that_cannot_be_reached_fails_the_request_and_nothing_leaks() -> None:
    cluster = Cluster()
    cluster.hub.unreachable.add("rank-1")
    sent = cluster.submit("a", list(range(150)))
    assert isinstance(sent[-1], m.Failed)
    assert cluster.role.held == {}
    assert cluster.directory.stats()["objects"] == 0


@pytest.mark.parametrize("kind", [m.Prefill, m.LoadBlocks])
def test_a_message_that_is_too_large_costs_its_request_alone(kind: type[m.Message]) -> None:
    Cluster().submit("names the keys", list(range(150)))
    cluster = Cluster(tier=tuple(Cluster.digest_of) if kind is m.LoadBlocks else ())
    cluster.hub.too_large = kind
    sent = cluster.submit("a", list(range(150)))
    failed = next(message for message in sent if isinstance(message, m.Failed))
    assert f"{kind.__name__} is too large" in failed.reason
    assert cluster.role.held == {}
    cluster.hub.too_large = None
    assert cluster.submit("b", list(range(150, 300)))


def test_a_prefill_whose_answer_is_too_large_has_failed() -> None:
    class Conductor:
        sent: list[m.Message] = []  # noqa: RUF012

        def send(self, message: m.Message) -> bool:
            if isinstance(message, m.PrefillDone):
                raise WireError("PrefillDone has 9 bytes, the limit is 8")
            self.sent.append(message)
            return True

    rank = ComputeRank.__new__(ComputeRank)
    rank._conductor = Conductor()  # type: ignore[assignment]
    rank.tell(m.PrefillDone("a", [1], [None], [], [], 0.1))
    assert Conductor.sent == [m.RequestFailed("a", "PrefillDone has 9 bytes, the limit is 8")]


def test_after_a_failed_transfer_the_ranges_are_given_to_nobody() -> None:
    cluster = Cluster()
    cluster.submit("a", list(range(150)))
    (failed,) = cluster.tell("rank-1", m.RequestFailed("a", "a cable", writing=True))
    assert failed == m.Failed("a", "a cable")
    assert cluster.directory.stats()["quarantined_bytes"] == 3 * LAYOUT.nbytes
    assert cluster.role.held == {}


def test_blocks_filled_while_decoding_are_found_by_the_next_turn() -> None:
    cluster = Cluster()
    cluster.serve("a", list(range(128)))
    turn = [*range(128), *range(500, 564), 1, 2]
    keys, digests = prefix_keys(turn, BLOCK, b"model"), block_digests(turn, BLOCK)
    wanted = m.PutWanted(1, 2, [keys[2]], [digests[2]], [[0] * BLOCK], [(keys[1], 2)])
    (granted,) = cluster.tell("rank-2", wanted)
    assert isinstance(granted, m.PutGranted)
    assert granted.places[0] is not None
    cluster.tell("rank-2", m.PutEnded([granted.places[0].object_id], [SUMS]))
    (job,) = cluster.submit("b", turn)
    assert isinstance(job, m.Prefill)
    assert job.cached_tokens["dram"] == 192


def test_the_eviction_policy_learns_what_each_block_hangs_on_and_what_it_costs() -> None:
    cluster = Cluster(eviction="gdsf")
    cluster.serve("a", list(range(192)))
    tokens = [*range(192), *range(500, 564)]
    keys, digests = prefix_keys(tokens, BLOCK, b"model"), block_digests(tokens, BLOCK)
    wanted = m.PutWanted(1, 2, [keys[3]], [digests[3]], [[0] * BLOCK], [(keys[2], 3)])
    (granted,) = cluster.tell("rank-2", wanted)
    assert isinstance(granted, m.PutGranted)
    assert granted.places[0] is not None
    cluster.tell("rank-2", m.PutEnded([granted.places[0].object_id], [SUMS]))
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
        assert job.cached_tokens["dram"] == cached
        assert len(job.load) + len(job.store) == 2
        assert cluster.idle_bytes == 0
    assert cluster.directory.counters["puts_not_admitted"] == 2


def test_a_block_that_the_pool_has_already_gets_no_place() -> None:
    cluster = Cluster()
    cluster.serve("a", list(range(128)))
    keys, digests = prefix_keys(range(128), BLOCK, b"model"), block_digests(range(128), BLOCK)
    wanted = m.PutWanted(1, 2, keys, digests, [[0] * BLOCK] * 2, [(None, 0), (keys[0], 1)])
    (granted,) = cluster.tell("rank-2", wanted)
    assert granted == m.PutGranted(1, [None, None])


def test_a_rank_that_reports_an_error_ends_the_cluster_and_is_named() -> None:
    cluster = Cluster()
    cluster.tell("rank-2", m.RankError("out of paper"))
    assert cluster.role.stop is not None
    assert cluster.role.stop.reason == "rank 2 (decode) failed: out of paper"


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
    assert isinstance(reply, m.MetricsReply)
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
        assert isinstance(reply, m.MetricsReply)
        wanted = ("requests_by_stage", "prefill_requests_waiting", "prefill_requests_running")
        found = [one for one in reply.metrics if one.name in wanted]
        return {one.labels.get("stage") or f"{one.name} {one.labels['rank']}": one.value for one in found}

    for number in range(6):
        cluster.submit(str(number), list(range(100 * number, 100 * number + 100)))
    cluster.tell("gateway-0", m.Cancel("3"))
    (first, *_) = [message for _, message in cluster.hub.sent if isinstance(message, m.Prefill)]
    cluster.prefill_done(first)
    assert figures() == {
        "held": 1, "queued": 2, "promoting": 0, "prefilling": 1, "loading": 1, "decoding": 0, "cancelled": 0,
        "prefill_requests_waiting 1": 2, "prefill_requests_running 1": 1,
    }  # fmt: skip
    cluster.tell("rank-2", m.DecodeLoaded("0"))
    assert (figures()["loading"], figures()["decoding"]) == (0, 1)
    cluster.tell("rank-2", m.DecodeDone("0"))
    assert (figures()["held"], figures()["decoding"]) == (0, 0)


def test_branches_of_a_prompt_are_decoded_together_and_a_preempted_one_goes_on_alone() -> None:
    cluster = Cluster()
    tokens = list(range(70))
    keys, digests = prefix_keys(tokens, BLOCK, b"model"), block_digests(tokens, BLOCK)
    sampling = m.Sampling(0.0)
    submit = m.Submit("a", "gateway-0", tokens, keys, digests, b"model", sampling, 16, [0], n=3)
    (job,) = cluster.tell("gateway-0", submit)
    assert isinstance(job, m.Prefill)
    assert (job.n, job.branch) == (3, 0)
    done = m.PrefillDone("a", [7, 8, 9], [None, "stop", None], [SUMS] * len(job.store), [], 0.1)
    *_, decode = cluster.tell("rank-1", done)
    assert isinstance(decode, m.Decode)
    assert (decode.token_ids, decode.answers) == (tokens, [m.Answer(0, [7]), m.Answer(2, [9])])
    cluster.tell("rank-2", m.DecodeLoaded("a"))
    answered = [*tokens, *range(60)]
    (again,) = cluster.tell("rank-2", m.Preempted("a", answered, 60, branch=2))
    assert isinstance(again, m.Prefill)
    assert (again.request_id, again.token_ids, again.answered) == ("a#2", answered, 60)
    assert (again.n, again.branch, again.keys) == (1, 2, prefix_keys(answered, BLOCK, b"model"))
    cluster.tell("rank-2", m.DecodeDone("a", branch=0))
    assert cluster.role.held.keys() == {"a#2"}
    done = m.PrefillDone("a#2", [5], [None], [SUMS] * len(again.store), [], 0.1)
    *_, decode = cluster.tell("rank-1", done)
    assert isinstance(decode, m.Decode)
    assert (decode.branch, decode.answers, decode.token_ids) == (2, [], [*answered, 5])
    told = cluster.tell("rank-2", m.RequestFailed("a#2", "a cable"))
    assert m.Failed("a", "a cable") in told, "under the name that the gateway knows"
    assert not cluster.role.held
