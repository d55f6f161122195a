"""What listeners outside are told of the pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_lite import messages as m
from mooncake_lite.conductor.kv_event_stream import KVEventStream
from mooncake_lite.control import effects as fx
from store.directory import Directory
from store.kv_events import EventTranslator
from store.objects import BlockRef
from store.policies import policy_factory
from tests.store.samples import SMALL

pytestmark = pytest.mark.quick


def new_stream() -> KVEventStream:
    """A stream without sockets."""
    stream = KVEventStream.__new__(KVEventStream)
    stream.translator = EventTranslator(SMALL.block_tokens)
    sink: Any = SimpleNamespace(publish=lambda batch: None)
    stream.publisher, stream._encoder = sink, SimpleNamespace(encode=lambda batch: b"")  # type: ignore[assignment]
    stream._wanted, stream._granted = {}, {}
    return stream


def test_the_tokens_of_blocks_that_the_pool_does_not_admit_are_not_kept_for_listeners() -> None:
    stream = new_stream()
    directory = Directory(SMALL, policy=policy_factory("lru+second-hit"))
    directory.add_segment(1, 8 * SMALL.nbytes, 0)
    kept = []
    for owner in ("first", "second"):
        obj = directory.allocate(owner, SMALL.nbytes, now=0.0, key=7, digest=1)
        stream.describe([7], list(range(SMALL.block_tokens)), None)
        directory.put_end(obj.object_id, [1] * SMALL.layers, 0.0)
        stream.publish(directory.drain_events())
        directory.release(owner, 0.0)
        kept.append(len(stream.translator))
    assert kept == [0, 1]


def test_the_tokens_of_a_block_that_a_decode_rank_gives_back_are_described_when_it_is_written() -> None:
    stream = new_stream()
    tokens = [[1] * SMALL.block_tokens, [2] * SMALL.block_tokens]
    wanted = m.PutsWanted(2, 0, 3, [7, 8], [70, 80], [(None, 0), (7, 1)], ["a", "a"])
    stream.on_puts_wanted(m.Report(wanted, tokens))
    stream.on_granted(fx.GrantPuts(2, 3, [None, BlockRef(11, 1, 0, SMALL.nbytes)]))
    assert len(stream.translator) == 0
    stream.on_puts_ended(m.PutsEnded(2, 0, 3, [11], [[1] * SMALL.layers]))
    assert len(stream.translator) == 1
    assert (stream._wanted, stream._granted) == ({}, {})
