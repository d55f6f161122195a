"""The conductor in clusters without a pool, and with ranks of both duties: messages in, messages out."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_lite import messages as m
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.messages.pool import PoolQuery
from store.keys import prefix_keys
from store.layout import BlockLayout
from tests.mooncake_lite.conductor.fake_hub import FakeHub, Playable, new_role
from tests.mooncake_lite.conductor.wording import BLOCK, left, prefilled, submit

pytestmark = pytest.mark.quick

LAYOUT = BlockLayout(2, 1, BLOCK, 8, 4)
TOKENS = list(range(150))


class Conductor(Playable):
    """A conductor whose ranks have all joined; ranks that lend have room for 8 blocks, store ranks too."""

    def __init__(self, **options: Any) -> None:
        self.config = ServeConfig(block_size=BLOCK, max_num_seqs=3, **{"overlap_transfers": False} | options)
        self.hub = FakeHub()
        self.role = new_role(self.config, LAYOUT, self.hub)
        self.tell("gateway-0", m.GatewayHello("gateway-0", ["ipc://tokens"]))
        for rank, role in enumerate(self.config.roles):
            lends = role == "store" or (role == "decode" and self.config.mode == "split")
            if rank:
                self.tell(f"rank-{rank}", m.RankHello(rank, role, 0, 8 * LAYOUT.nbytes * lends))

    def submit(self, name: str, salt: bytes = b"model") -> list[Any]:
        return self.tell("gateway-0", submit(name, TOKENS, salt))


@pytest.mark.parametrize(("options", "offers"), [({}, False), ({"store": 1}, True)])
def test_a_compute_rank_is_asked_to_serve_and_offers_blocks_where_there_is_a_pool(
    options: dict[str, Any], offers: bool
) -> None:
    conductor = Conductor(mode="colocated", compute=1, **options)
    (job,) = conductor.submit("a")
    order, body = job.order, job.body
    assert isinstance(order, m.StartServe)
    assert (body.token_ids, order.load, body.offers, body.salt) == (TOKENS, [], offers, b"model")
    assert body.keys == prefix_keys(TOKENS, BLOCK, b"model")
    conductor.tell("rank-1", m.PromptComputed(1, 0, "a", order.attempt, 150, 0.1))
    assert conductor.role.control.state.costs.is_measured
    answered = [*TOKENS, *range(50)]
    (again,) = conductor.tell("rank-1", left(m.Preempted, job, answered))
    assert isinstance(again.order, m.StartServe)
    assert (again.body.token_ids, again.body.answered) == (answered, 50)
    assert again.body.keys == prefix_keys(answered, BLOCK, b"model")
    conductor.tell("rank-1", m.DecodeEnded(1, 0, "a", again.order.attempt))
    assert conductor.role.machine.bodies.keys() == {"a"}, "its gateway may not have the last token yet"
    conductor.tell("gateway-0", m.AnswerReceived("a", 0))
    assert conductor.role.machine.bodies == {}


def test_a_request_that_may_reuse_nothing_offers_nothing() -> None:
    conductor = Conductor(mode="colocated", compute=1, store=1)
    (job,) = conductor.submit("a", salt=b"")
    assert (job.body.keys, job.body.salt, job.body.offers) == ([], b"", False)
    (job,) = Conductor(mode="colocated", compute=1, store=1, enable_prefix_caching=False).submit("a")
    assert (job.body.salt, job.body.offers) == (b"", False)


def test_split_hands_blocks_over_in_the_memory_of_the_decode_rank_and_offers_none() -> None:
    conductor = Conductor(mode="split", decode=2)
    (job,) = conductor.submit("a")
    order = job.order
    assert {ref.rank for ref in (*order.store, order.tail)} == {2}
    (decode,) = conductor.tell("rank-1", prefilled(job))
    assert (decode.order.blocks, decode.order.tail, decode.body.offers) == (order.store, order.tail, False)
    conductor.tell("rank-2", m.DecodeLoaded(2, 0, "a", decode.order.attempt))
    assert conductor.role.control.directory.stats()["free_bytes"] == 16 * LAYOUT.nbytes


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("split", "mode=split has no pool; use --mode pooled"),
        ("colocated", "mode=colocated without store ranks has no pool; add --store N"),
    ],
)
def test_commands_about_the_pool_are_answered_with_one_line_where_there_is_none(
    mode: str, words: str
) -> None:
    conductor = Conductor(mode=mode)
    for what in ("ls", "stat", "get", "verify", "compact", "rm", "rm-all", "pin"):
        query = PoolQuery(what, keys=[7], number=5)  # type: ignore[arg-type]
        assert conductor.tell("pool-1", query) == [m.PoolEnded(words, number=5)]


@pytest.mark.parametrize("mode", ["split", "colocated"])
def test_a_reset_empties_the_pages_of_all_ranks_where_there_is_no_pool(mode: str) -> None:
    reset = PoolQuery("rm-all", force=True, number=5)
    told = Conductor(mode=mode).tell("gateway-0", reset)
    assert told == [m.ForgetPages(1), m.ForgetPages(2), m.PoolEnded(number=5)]


def test_metrics_name_the_role_of_a_rank_of_both_duties() -> None:
    conductor = Conductor(mode="colocated")
    conductor.submit("a")
    (reply,) = conductor.tell("gateway-0", m.MetricsRequest(1))
    running = [one for one in reply.metrics if one.name == "prefill_requests_running"]
    assert [(one.labels["role"], one.value) for one in running] == [("compute", 1.0), ("compute", 0.0)]
