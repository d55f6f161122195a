"""What listeners outside are told of the pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_lite import messages as m
from mooncake_lite.conductor.kv_event_stream import KVEventStream
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from store.directory import Directory
from store.kv_events import EventTranslator
from store.objects import BlockRef
from store.policies import policy_factory
from tests.mooncake_lite.conductor.test_lost_ranks import Cluster
from tests.mooncake_lite.conductor.wording import BLOCK, SUMS, prefilled
from tests.store.samples import SMALL

pytestmark = pytest.mark.quick


def new_stream() -> KVEventStream:
    """A stream without sockets."""
    stream = KVEventStream.__new__(KVEventStream)
    stream.translator = EventTranslator(SMALL.block_tokens)
    sink: Any = SimpleNamespace(publish=lambda batch: None, serve=lambda: None)
    stream.publisher, stream._encoder = sink, SimpleNamespace(encode=lambda batch: b"")  # type: ignore[assignment]
    stream._granted = {}
    return stream


def test_the_tokens_of_blocks_that_the_pool_does_not_admit_are_not_kept_for_listeners() -> None:
    stream = new_stream()
    directory = Directory(SMALL, policy=policy_factory("lru+second-hit"))
    directory.add_segment(1, 8 * SMALL.nbytes, 0)
    kept = []
    for owner in ("first", "second"):
        obj = directory.allocate(owner, SMALL.nbytes, now=0.0, key=7, digest=1)
        stream.translator.describe([7], list(range(SMALL.block_tokens)), None)
        directory.put_end(obj.object_id, [1] * SMALL.layers, 0.0)
        stream.on(ev.Tick(), directory.drain_events(), 0.0)
        directory.release(owner, 0.0)
        kept.append(len(stream.translator))
    assert kept == [0, 1]


def test_the_tokens_of_a_block_that_a_decode_rank_gives_back_are_described_when_it_is_written() -> None:
    stream = new_stream()
    tokens = [[1] * SMALL.block_tokens, [2] * SMALL.block_tokens]
    wanted = m.PutsWanted(2, 0, 3, [7, 8], [70, 80], [(None, 0), (7, 1)], ["a", "a"])
    stream.took(m.Report(wanted, tokens), None)
    stream.on(wanted, [fx.GrantPuts(2, 3, [None, BlockRef(11, 1, 0, SMALL.nbytes)])], 0.0)
    assert len(stream.translator) == 0
    stream.took(m.PutsEnded(2, 0, 3, [11], [[1] * SMALL.layers]), None)
    assert len(stream.translator) == 1
    assert stream._granted == {}


class Listened(Cluster):
    """A cluster with listeners: rank 2 decodes, and asks for places for the blocks that it fills."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = new_stream()
        self.role.machine.observers = [self.stream]

    def wants(self, number: int, epoch: int = 0) -> list[Any]:
        """Let rank 2 ask for a place; the places that it got."""
        event = m.PutsWanted(2, epoch, number, [number], [number], [(None, 0)], ["a"])
        granted = self.tell("rank-2", m.Report(event, [[number] * SMALL.block_tokens]))
        return [place for order in granted for place in order.places]


def test_the_tokens_of_places_that_a_lost_rank_was_given_are_forgotten() -> None:
    cluster = Listened()
    assert [len(cluster.wants(number)) for number in (1, 2, 1)] == [1, 1, 0]
    assert cluster.wants(3, epoch=1) == []
    assert set(cluster.stream._granted) == {(2, 1), (2, 2)}
    cluster.loses(2)
    assert cluster.stream._granted == {}


def test_the_tokens_of_places_that_a_rank_does_not_hear_of_are_forgotten() -> None:
    cluster = Listened()
    cluster.hub.unreachable.add("rank-2")
    cluster.wants(1)
    assert cluster.stream._granted == {}
    assert cluster.role.control.directory.stats()["writing_bytes"] == 0


def test_a_block_that_a_rank_has_written_is_described_unless_the_control_plane_ignores_that() -> None:
    cluster = Listened()
    (first,), (second,) = cluster.wants(1), cluster.wants(2)
    cluster.tell("rank-2", m.PutsEnded(2, 1, 1, [first.object_id], [SUMS]))
    assert len(cluster.stream.translator) == 0
    for number, place in ((1, first), (2, second)):
        cluster.tell("rank-2", m.PutsEnded(2, 0, number, [place.object_id], [SUMS]))
        assert len(cluster.stream.translator) == number


def test_the_tokens_of_the_blocks_of_a_prompt_are_described_when_they_are_stored() -> None:
    cluster = Listened()
    cluster.stream.translator, cluster.stream._block_tokens = EventTranslator(BLOCK), BLOCK
    (job,) = cluster.submit("a")
    cluster.tell("rank-1", prefilled(job))
    assert len(cluster.stream.translator) == 150 // BLOCK
