"""What `mooncake-lite store` hears from a conductor, and what store ranks are asked for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mooncake_lite import messages as m
from mooncake_lite.messages import pool as p
from mooncake_lite.roles.pool_queries import CHECKED_AT_ONCE, PoolQueries
from mooncake_lite.roles.store import StoreRole
from store.directory import Directory
from store.layout import BlockLayout
from store.objects import Wanted

pytestmark = pytest.mark.quick

LAYOUT = BlockLayout(2, 1, 64, 8, 4)
BLOCKS = 40


class Conversation:
    """One command, one store rank (3) with 40 blocks of bytes that tell their number."""

    def __init__(self) -> None:
        self.directory = Directory(LAYOUT)
        self.segment = np.zeros(BLOCKS * LAYOUT.nbytes, np.uint8)
        self.directory.add_segment(3, self.segment.nbytes, 0)
        self.answers: list[Any] = []
        self.orders: list[Any] = []
        self.gone: set[str] = set()
        self.queries = PoolQueries(self.directory, lambda: [3], self.send)
        told: list[Any] = []
        engine: Any = SimpleNamespace(local=self.segment, counters={})
        spoke: Any = SimpleNamespace(send=told.append)
        self.store = StoreRole(3, engine, spoke, None, lambda: False, LAYOUT)
        self.told = told
        wanted = [Wanted(LAYOUT.nbytes, key, key) for key in range(BLOCKS)]
        self.objects = self.directory.allocate_many("a", wanted, now=0.0)
        for number, obj in enumerate(self.objects):
            block = self.bytes_of(obj)
            block[:] = number
            self.directory.put_end(obj.object_id, LAYOUT.checksums(block), 0.0)

    def bytes_of(self, obj: Any) -> np.ndarray:
        return self.segment[obj.offset : obj.offset + obj.nbytes]

    def send(self, peer: str, message: m.Message) -> bool:
        (self.orders if peer == "rank-3" else self.answers).append(message)
        return peer not in self.gone

    def ask(self, query: p.PoolQuery) -> list[Any]:
        """Everything that is answered until the command has ended."""
        self.queries.on_query("pool-1", query, 1.0)
        while self.orders and isinstance(self.orders[0], p.CheckBlocks):
            self.store._check(self.orders.pop(0))
            self.queries.on_checked(self.told.pop(0), 2.0)
            self.directory.check()
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
    talk.queries.on_query("pool-1", p.PoolQuery("verify"), 1.0)
    for obj in talk.objects[CHECKED_AT_ONCE:]:
        talk.directory.remove(obj.key, obj.digest, 1.0)  # type: ignore[arg-type]
    (order,) = talk.orders
    talk.store._check(order)
    talk.queries.on_checked(talk.told.pop(), 2.0)
    assert talk.answers[-1] == p.PoolEnded()


def test_one_block_is_written_to_a_file_or_not_at_all(tmp_path: Any) -> None:
    talk = Conversation()
    assert talk.ask(p.PoolQuery("get", key=5, folder=str(tmp_path)))[-1] == p.PoolEnded()
    file = tmp_path / f"{5:016x}.block"
    assert file.read_bytes() == bytes([5]) * LAYOUT.nbytes
    assert file.stat().st_mode & 0o077 == 0
    problem = talk.ask(p.PoolQuery("get", key=5, folder=str(tmp_path)))[-1].problem
    assert "cannot write" in problem  # it is there already: nothing is written over
    assert "no block" in talk.ask(p.PoolQuery("get", key=999))[-1].problem
    talk.bytes_of(talk.objects[6])[0] ^= 1
    assert talk.ask(p.PoolQuery("get", key=6, folder=str(tmp_path)))[-2].bad[0].key == 6
    assert not (tmp_path / f"{6:016x}.block").exists()


def test_a_list_comes_in_pieces_and_a_command_that_has_gone_is_not_served_on() -> None:
    talk = Conversation()
    (rows,) = talk.ask(p.PoolQuery("ls", after=talk.objects[9].object_id))
    assert [row.key for row in rows.rows] == list(range(10, BLOCKS))
    assert not rows.more
    talk.gone.add("pool-1")
    talk.ask(p.PoolQuery("verify"))
    assert talk.directory.stats()["owners"] == 0


def test_compact_goes_to_every_store_rank() -> None:
    talk = Conversation()
    assert talk.ask(p.PoolQuery("compact")) == [p.PoolEnded()]
    assert talk.orders == [p.CompactTier()]
