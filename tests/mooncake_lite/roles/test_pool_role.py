"""The conductor's side of the pool: what listeners outside are told of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import scheduler
from mooncake_lite.roles.pool import Pool
from store.directory import Directory
from store.kv_events import EventTranslator
from store.policies import policy_factory
from tests.store.samples import SMALL

pytestmark = pytest.mark.quick


def test_the_tokens_of_blocks_that_the_pool_does_not_admit_are_not_kept_for_listeners() -> None:
    translator = EventTranslator(SMALL.block_tokens)
    events = SimpleNamespace(translator=translator, publish=lambda some: list(translator.batches(some, 0.0)))
    directory = Directory(SMALL, policy=policy_factory("lru+second-hit"))
    directory.add_segment(1, 8 * SMALL.nbytes, 0)
    pool = Pool(directory, scheduler.Conductor(8), lambda peer, message: True, events)  # type: ignore[arg-type]
    kept = []
    for owner in ("first", "second"):
        obj = directory.allocate(owner, SMALL.nbytes, now=0.0, key=7, digest=1)
        pool.describe([7], list(range(SMALL.block_tokens)), None)
        pool.publish([obj.object_id], [[1] * SMALL.layers], 0.0)
        directory.release(owner, 0.0)
        kept.append(len(translator))
    assert kept == [0, 1]
