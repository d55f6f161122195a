"""Hot-spot replication: from the second far read to a copy that the next request reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mooncake_lite import messages as m
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.ranks.store.loop import StoreRole
from store.layout import BlockLayout
from store.objects import Wanted
from tests.mooncake_lite.conductor.fake_hub import FakeHub, Playable, new_role
from tests.mooncake_lite.conductor.wording import prefilled
from tests.mooncake_lite.ranks.links import link_to

pytestmark = pytest.mark.quick

LAYOUT = BlockLayout(2, 1, 64, 8, 4)
KEYS, DIGESTS = [5, 6], [50, 60]
BLOCKS = [np.full(LAYOUT.nbytes, value, np.uint8) for value in (1, 2)]


class Pair(Playable):
    """Prefill rank 1 and store rank 4 on node 1; two blocks of a prompt in store rank 3 on node 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self.hub = FakeHub()
        config = ServeConfig(prefill=1, decode=1, store=2, overlap_transfers=False)
        nodes = [0, 1, 0, 0, 1]
        self.role = new_role(config, LAYOUT, self.hub, nodes=nodes, clock=lambda: self.now)
        self.directory = self.role.control.directory
        self.segments = {3: np.zeros(8 * LAYOUT.nbytes, np.uint8)}
        self.segments[4] = np.zeros(4 * LAYOUT.nbytes, np.uint8)
        self.tell("gateway-0", m.GatewayHello("gateway-0", ["ipc://tokens", "tcp://tokens"]))
        self.tell("rank-1", m.RankHello(1, "prefill", 1))
        self.tell("rank-2", m.RankHello(2, "decode", 0))
        for rank, segment in self.segments.items():
            self.tell(f"rank-{rank}", m.RankHello(rank, "store", nodes[rank], segment.nbytes))
        wanted = [Wanted(LAYOUT.nbytes, key, digest) for key, digest in zip(KEYS, DIGESTS)]
        self.originals = self.directory.allocate_many("a", wanted, now=0.0, rank=3)
        for obj, block in zip(self.originals, BLOCKS):
            self.segments[3][obj.offset : obj.offset + obj.nbytes] = block
            self.directory.put_end(obj.object_id, LAYOUT.checksums(block), 0.0)

    def read(self, now: float) -> m.CopyBlocks | None:
        """A request of two blocks that ends with its first token; the copy that is ordered, if any."""
        self.now = now
        name = f"at {now}"
        request = m.RequestArrived(name, 128, 4, KEYS, DIGESTS)
        body = m.Body("gateway-0", list(range(128)), b"s", m.Sampling(0.0), [])
        job, *copies = self.tell("gateway-0", m.Submit(request, body))
        assert len(job.order.load) == 2
        self.tell("rank-1", prefilled(job, finished=[0]))
        for copy in copies:
            assert isinstance(copy, m.CopyBlocks)
            assert ("rank-4", copy) in self.hub.sent
            return copy
        return None

    def ranks_read_from(self, now: float) -> list[int]:
        return [obj.rank for obj in self.directory.lookup(KEYS, DIGESTS, now, node=1)]

    def indexed(self) -> set[tuple[int, int, str]]:
        return set(self.role.control.state.index.places())


def store_role(pair: Pair, rank: int) -> tuple[StoreRole, list[m.Message]]:
    """A store rank whose transfers are copies between the arrays of `pair`."""
    told: list[m.Message] = []

    def submit(transfers: list[Any]) -> Any:
        for move in transfers:
            (_, start), end = move.local, move.offset + move.nbytes
            pair.segments[rank][start : start + move.nbytes] = pair.segments[move.rank][move.offset : end]
        return SimpleNamespace(poll=lambda: True, failures={}, may_still_land=set())

    engine: Any = SimpleNamespace(local=pair.segments[rank], submit=submit, counters={})
    spoke: Any = SimpleNamespace(send=told.append)
    role = StoreRole(engine, link_to(spoke, m.RankHello(rank, "store", 0), engine), None, LAYOUT)
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
    pair.now = 3.0
    pair.tell("rank-4", copied)
    assert pair.ranks_read_from(3.5) == [4, 4]
    assert pair.indexed() == pair.directory.places()
    assert {(5, 3, "dram"), (5, 4, "dram"), (6, 3, "dram"), (6, 4, "dram")} == pair.indexed()
    for ref, block in zip(copy.targets, BLOCKS):
        assert pair.segments[4][ref.offset : ref.offset + ref.nbytes].tobytes() == block.tobytes()
    assert pair.directory.stats()["owners"] == 0
    assert pair.read(4.0) is None
