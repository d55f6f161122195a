"""What `mooncake-lite store` hears from a conductor, and what store ranks are asked for it."""

from __future__ import annotations

import time
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mooncake_lite import messages as m
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.control.commands import CHECKED_AT_ONCE
from mooncake_lite.messages import pool as p
from mooncake_lite.ranks.store.loop import StoreRole
from store.layout import BlockLayout
from store.objects import Wanted
from store.tier import HDF5Tier
from tests.mooncake_lite.conductor.fake_hub import FakeHub, new_role
from tests.mooncake_lite.ranks.links import link_to

pytestmark = pytest.mark.quick

LAYOUT = BlockLayout(2, 1, 64, 8, 4)
BLOCKS = 40
HELLO = m.RankHello(3, "store", 0)


class Conversation:
    """One command, one store rank (3) with 40 blocks of bytes that tell their number."""

    def __init__(self) -> None:
        self.segment = np.zeros(BLOCKS * LAYOUT.nbytes, np.uint8)
        self.hub = FakeHub()
        self.role = new_role(ServeConfig(), LAYOUT, self.hub, clock=lambda: 1.0)
        self.directory = self.role.control.directory
        self.tell("rank-3", m.RankHello(3, "store", 0, self.segment.nbytes))
        told: list[Any] = []
        engine: Any = SimpleNamespace(local=self.segment, counters={})
        spoke: Any = SimpleNamespace(send=told.append)
        self.store = StoreRole(engine, link_to(spoke, HELLO, engine), None, LAYOUT)
        self.told = told
        wanted = [Wanted(LAYOUT.nbytes, key, key) for key in range(BLOCKS)]
        self.objects = self.directory.allocate_many("a", wanted, now=0.0)
        for number, obj in enumerate(self.objects):
            block = self.bytes_of(obj)
            block[:] = number
            self.directory.put_end(obj.object_id, LAYOUT.checksums(block), 0.0)

    def bytes_of(self, obj: Any) -> np.ndarray:
        return self.segment[obj.offset : obj.offset + obj.nbytes]

    def tell(self, peer: str, message: m.Message) -> None:
        self.role.step([(peer, message)])
        self.directory.check()

    @property
    def answers(self) -> list[Any]:
        return [message for peer, message in self.hub.sent if peer == "pool-1"]

    @property
    def orders(self) -> list[Any]:
        return [message for peer, message in self.hub.sent if peer == "rank-3"]

    def ask(self, query: p.PoolQuery) -> list[Any]:
        """Everything that is answered until the command has ended."""
        done = len(self.orders)
        self.tell("pool-1", query)
        while len(self.orders) > done and isinstance(self.orders[done], m.CheckBlocks):
            self.store._check(self.orders[done])
            self.tell("rank-3", self.told.pop(0))
            done += 1
        return self.answers


def test_verify_names_the_block_whose_bytes_have_changed_and_leases_nothing_at_the_end() -> None:
    talk = Conversation()
    talk.bytes_of(talk.objects[17])[100] ^= 1
    *progress, end = talk.ask(p.PoolQuery("verify"))
    assert end == p.PoolEnded()
    assert [step.done for step in progress] == [CHECKED_AT_ONCE, 2 * CHECKED_AT_ONCE, BLOCKS]
    assert [row.key for step in progress for row in step.bad] == [17]
    assert talk.directory.stats()["owners"] == 0


def test_blocks_that_went_away_meanwhile_are_not_asked_for() -> None:
    talk = Conversation()
    talk.tell("pool-1", p.PoolQuery("verify"))
    for obj in talk.objects[CHECKED_AT_ONCE:]:
        talk.directory.remove(obj.key, obj.digest, 1.0)  # type: ignore[arg-type]
    (order,) = talk.orders
    talk.store._check(order)
    talk.tell("rank-3", talk.told.pop())
    assert talk.answers[-1] == p.PoolEnded()


def test_one_block_is_written_to_a_file_or_not_at_all(tmp_path: Any) -> None:
    talk = Conversation()
    assert talk.ask(p.PoolQuery("get", keys=[5], folder=str(tmp_path)))[-1] == p.PoolEnded()
    file = tmp_path / f"{5:016x}.block"
    assert file.read_bytes() == bytes([5]) * LAYOUT.nbytes
    assert file.stat().st_mode & 0o077 == 0
    problem = talk.ask(p.PoolQuery("get", keys=[5], folder=str(tmp_path)))[-1].problem
    assert "cannot write" in problem  # it is there already: nothing is written over
    assert "no block" in talk.ask(p.PoolQuery("get", keys=[999]))[-1].problem
    talk.bytes_of(talk.objects[6])[0] ^= 1
    assert talk.ask(p.PoolQuery("get", keys=[6], folder=str(tmp_path)))[-2].bad[0].key == 6
    assert not (tmp_path / f"{6:016x}.block").exists()


def test_a_list_comes_in_pieces_and_a_command_that_has_gone_is_not_served_on() -> None:
    talk = Conversation()
    *_, rows = talk.ask(p.PoolQuery("ls", after=talk.objects[9].object_id))
    assert [row.key for row in rows.rows] == list(range(10, BLOCKS))
    assert not rows.more
    talk.hub.unreachable.add("pool-1")
    talk.ask(p.PoolQuery("verify"))
    assert talk.directory.stats()["owners"] == 0


def test_compact_goes_to_every_store_rank() -> None:
    talk = Conversation()
    assert talk.ask(p.PoolQuery("compact")) == [p.PoolEnded()]
    assert talk.orders == [m.CompactTier(3)]


def test_blocks_are_removed_once_every_tier_has_said_so() -> None:
    talk = Conversation()
    assert talk.ask(p.PoolQuery("rm", keys=[5, 7])) == []
    assert talk.orders == [m.RemoveBlocks(3, [5, 7])]
    assert {5, 7}.isdisjoint(obj.key for obj in talk.directory.visible_objects())
    talk.tell("rank-3", m.BlocksRemoved(3, 0, [5], for_good=True))
    assert talk.answers == []
    talk.tell("rank-3", m.BlocksRemoved(3, 0, [7, 9], for_good=True))
    assert talk.answers == [p.PoolEnded(blocks=2)]


def test_a_tier_that_cannot_write_its_removal_down_is_told_of() -> None:
    talk = Conversation()
    talk.ask(p.PoolQuery("rm", keys=[5, 7]))
    talk.tell("rank-3", m.BlocksRemoved(3, 0, [5, 7], for_good=False))
    assert "2 of 2 blocks may come back at the next start" in talk.answers[-1].problem


@pytest.mark.parametrize(
    ("keys", "why"),
    [([5, 99], "no block 0000000000000063"), ([5, 8], "is leased; with --force"), ([50], "is being written")],
)
def test_what_cannot_be_removed_is_one_line_and_nothing_goes(keys: list[int], why: str) -> None:
    talk = Conversation()
    talk.directory.add_segment(4, 2 * LAYOUT.nbytes, 0)
    talk.directory.lease("reader", [talk.objects[8].object_id], 0.0, 9.0)
    talk.directory.allocate("w", LAYOUT.nbytes, now=0.0, key=50)
    (answer,) = talk.ask(p.PoolQuery("rm", keys=keys))
    assert why in answer.problem
    assert (talk.orders, len(talk.directory.visible_objects())) == ([], BLOCKS)


def test_all_that_is_not_in_use_is_removed_and_the_rest_with_force() -> None:
    talk = Conversation()
    talk.directory.lease("reader", [talk.objects[8].object_id], 0.0, 9.0)
    talk.ask(p.PoolQuery("rm-all"))
    talk.tell("rank-3", m.BlocksRemoved(3, 0, list(range(BLOCKS)), for_good=True))
    assert talk.answers == [p.PoolEnded(blocks=BLOCKS - 1, kept=1)]
    talk.ask(p.PoolQuery("rm-all", force=True))
    talk.tell("rank-3", m.BlocksRemoved(3, 0, [8], for_good=True))
    assert talk.answers[-1] == p.PoolEnded(blocks=1)
    assert talk.ask(p.PoolQuery("rm-all"))[-1] == p.PoolEnded()  # nothing is there


def test_the_answer_to_a_gateway_names_its_query() -> None:
    talk = Conversation()
    talk.tell("gateway-0", p.PoolQuery("rm-all", force=True, number=7))
    talk.tell("rank-3", m.BlocksRemoved(3, 0, list(range(BLOCKS)), for_good=True))
    answers = [message for peer, message in talk.hub.sent if peer == "gateway-0"]
    assert answers == [p.PoolEnded(blocks=BLOCKS, number=7)]


def test_a_store_rank_removes_from_its_tier_for_good_and_answers(tmp_path: Any) -> None:
    told: list[Any] = []
    engine: Any = SimpleNamespace(local=np.zeros(LAYOUT.nbytes, np.uint8), counters={})
    spoke: Any = SimpleNamespace(send=told.append, wake=lambda: None)
    tier = HDF5Tier(tmp_path, 1 << 30, LAYOUT, "aa")
    sums = LAYOUT.checksums(engine.local)
    for key in (1, 2):
        tier.append(key, key, sums, engine.local, now=0.0)
    tier.seal()
    store = StoreRole(engine, link_to(spoke, HELLO, engine), tier, LAYOUT)
    store._remove(m.RemoveBlocks(3, [2, 9]))
    until = time.monotonic() + 20.0
    while not told and time.monotonic() < until:
        store._send_outbox()
    assert told == [m.BlocksRemoved(3, 0, [2, 9], for_good=True)]
    store.close(5.0)
    store._remove(m.RemoveBlocks(3, [1]))  # its writer has ended
    store._send_outbox()
    assert told[-1] == m.BlocksRemoved(3, 0, [1], for_good=False)
    with closing(HDF5Tier(tmp_path, 1 << 30, LAYOUT, "aa")) as again:
        assert again.blocks()[0] == [1]


def test_pins_are_set_and_taken_away_for_all_or_none_and_listed() -> None:
    talk = Conversation()
    assert "no block" in talk.ask(p.PoolQuery("pin", keys=[5, 99], hard=True))[-1].problem
    assert talk.ask(p.PoolQuery("pin", keys=[5, 6], hard=True))[-1] == p.PoolEnded(blocks=2)
    assert talk.ask(p.PoolQuery("pin", keys=[7], soft_s=10.0))[-1] == p.PoolEnded(blocks=1)
    states = {row.key: row.state for row in talk.ask(p.PoolQuery("ls"))[-1].rows if row.state}
    assert states == {5: "pinned", 6: "pinned", 7: "soft-pinned"}
    wanted = [Wanted(LAYOUT.nbytes, key, key) for key in range(100, 100 + BLOCKS - 3)]
    talk.directory.allocate_many("b", wanted, now=2.0)
    left = {obj.key for obj in talk.directory.visible_objects()}
    assert left == {5, 6, 7}
    assert talk.ask(p.PoolQuery("pin", keys=[5, 6, 7]))[-1] == p.PoolEnded(blocks=3)
    talk.directory.allocate_many("b", wanted[:3], now=2.0)
    assert talk.directory.visible_objects() == []
    talk.directory.check()
