"""Hot-spot replication: from the second far read to a copy that the next request reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import scheduler
from mooncake_lite import messages as m
from mooncake_lite.config import ServeConfig
from mooncake_lite.roles.members import Members
from mooncake_lite.roles.pool import Pool
from mooncake_lite.roles.replication import Replicator
from mooncake_lite.roles.requests import RequestRecord
from mooncake_lite.roles.room import block_ref
from mooncake_lite.roles.store import StoreRole
from store.directory import Directory
from store.layout import BlockLayout
from store.objects import Wanted

pytestmark = pytest.mark.quick

LAYOUT = BlockLayout(2, 1, 64, 8, 4)
KEYS, DIGESTS = [5, 6], [50, 60]
BLOCKS = [np.full(LAYOUT.nbytes, value, np.uint8) for value in (1, 2)]


class Pair:
    """Prefill rank 1 and store rank 4 on node 1; two blocks of a prompt in store rank 3 on node 0."""

    def __init__(self, near_blocks: int = 4) -> None:
        config = ServeConfig(prefill=1, decode=1, store=2)
        members = Members(config, [0, 1, 0, 0, 1], "")
        for rank in (3, 4):
            members.add_rank(m.RankHello(rank, "store", members.node_of(rank)))
        self.directory = Directory(LAYOUT)
        self.segments = {3: np.zeros(4 * LAYOUT.nbytes, np.uint8)}
        self.segments[4] = np.zeros(near_blocks * LAYOUT.nbytes, np.uint8)
        for rank, segment in self.segments.items():
            self.directory.add_segment(rank, segment.nbytes, members.node_of(rank))
        self.sent: list[tuple[str, m.Message]] = []
        self.policy = scheduler.Conductor(8)
        pool = Pool(self.directory, self.policy, self.send, None)
        self.replicator = Replicator(pool, members, self.send)
        wanted = [Wanted(LAYOUT.nbytes, key, digest) for key, digest in zip(KEYS, DIGESTS)]
        self.originals = self.directory.allocate_many("a", wanted, now=0.0, rank=3)
        for obj, block in zip(self.originals, BLOCKS):
            self.segments[3][obj.offset : obj.offset + obj.nbytes] = block
            self.directory.put_end(obj.object_id, LAYOUT.checksums(block), 0.0)
        pool.tell(0.0)

    def send(self, peer: str, message: m.Message) -> bool:
        self.sent.append((peer, message))
        return True

    def read(self, now: float) -> m.CopyBlocks | None:
        """A prefill on node 1 begins; the copy that is asked for, if one is."""
        submit = m.Submit("r", "g", list(range(130)), KEYS, DIGESTS, b"", m.Sampling(0.0), 4, [])
        record = RequestRecord(submit, now)
        record.prefill = 1
        found = self.directory.lookup(KEYS, DIGESTS, now, node=1)
        record.load = [block_ref(obj) for obj in found]  # type: ignore[arg-type]
        before = len(self.sent)
        self.replicator.on_prefill(record, now)
        self.directory.check()
        for peer, message in self.sent[before:]:
            assert peer == "rank-4"
            assert isinstance(message, m.CopyBlocks)
            return message
        return None

    def ranks_read_from(self, now: float) -> list[int]:
        return [obj.rank for obj in self.directory.lookup(KEYS, DIGESTS, now, node=1)]

    def indexed(self) -> set[tuple[int, int, str]]:
        return {(key, rank, tier) for key, rank, tier in self.policy.index.places()}


def store_role(pair: Pair, rank: int) -> tuple[StoreRole, list[m.Message]]:
    """A store rank whose transfers are copies between the arrays of `pair`."""
    told: list[m.Message] = []

    def submit(transfers: list[Any]) -> Any:
        for move in transfers:
            (_, start), end = move.local, move.offset + move.nbytes
            pair.segments[rank][start : start + move.nbytes] = pair.segments[move.rank][move.offset : end]
        return SimpleNamespace(poll=lambda: True, failures={})

    engine: Any = SimpleNamespace(local=pair.segments[rank], submit=submit, counters={})
    spoke: Any = SimpleNamespace(send=told.append)
    role = StoreRole(rank, engine, spoke, None, lambda: False, LAYOUT)
    return role, told


def test_the_second_far_read_makes_a_copy_that_the_third_one_reads() -> None:
    pair = Pair()
    assert pair.read(1.0) is None
    copy = pair.read(2.0)
    assert copy is not None
    role, told = store_role(pair, 4)
    role._copy(copy)
    role._finish_copies()
    (copied,) = told
    assert isinstance(copied, m.BlocksCopied)
    assert pair.ranks_read_from(2.5) == [3, 3]
    pair.replicator.on_copied(copied, 3.0)
    pair.directory.check()
    assert pair.ranks_read_from(3.5) == [4, 4]
    assert pair.indexed() == pair.directory.places()
    assert {(5, 3, "dram"), (5, 4, "dram"), (6, 3, "dram"), (6, 4, "dram")} == pair.indexed()
    for ref, block in zip(copy.targets, BLOCKS):
        assert pair.segments[4][ref.offset : ref.offset + ref.nbytes].tobytes() == block.tobytes()
    assert pair.directory.stats()["owners"] == 0
    assert pair.read(4.0) is None


def test_a_copy_that_arrives_damaged_or_not_at_all_is_given_up() -> None:
    pair = Pair()
    pair.read(1.0)
    copy = pair.read(2.0)
    assert copy is not None
    good = LAYOUT.checksums(BLOCKS[0])
    pair.replicator.on_copied(m.BlocksCopied(copy.number, [[1, 2], []], writing=True), 3.0)
    pair.directory.check()
    assert pair.ranks_read_from(3.5) == [3, 3]
    assert pair.directory.counters["copies_bad"] == 1
    assert pair.directory.stats()["quarantined_bytes"] == LAYOUT.nbytes
    pair.replicator.on_copied(m.BlocksCopied(99, [good], writing=False), 4.0)  # of nobody's


def test_a_near_store_without_room_gets_what_fits() -> None:
    pair = Pair(near_blocks=1)
    pair.read(1.0)
    copy = pair.read(2.0)
    assert copy is not None
    assert len(copy.sources) == len(copy.targets) == 1
