"""KV events in vLLM's wire format: what a listener written for vLLM decodes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.kv_events import EventTranslator
from store.objects import BlockRemoved, BlockStored

pytestmark = pytest.mark.quick


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    """As vLLM's documentation gives it to listeners."""

    ts: float
    events: list[Stored | Removed]
    data_parallel_rank: int | None = None


class Stored(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class Removed(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


Batch.__annotations__["events"] = list[Stored | Removed]


def heard(translator: EventTranslator, events: list[BlockStored | BlockRemoved]) -> list[Batch]:
    """What a listener hears."""
    sent = [msgspec.msgpack.encode(batch) for batch in translator.batches(events, 12.5)]
    return [msgspec.msgpack.decode(data, type=Batch) for data in sent]


def test_a_chain_is_one_event_with_its_tokens_and_its_parent() -> None:
    translator = EventTranslator(2)
    translator.describe([7, 8], [1, 2, 3, 4], None)
    translator.describe([9], [5, 6], 8)
    events = [BlockStored(7, 3, "dram"), BlockStored(8, 3, "dram"), BlockStored(9, 3, "dram")]
    stored = Stored([7, 8, 9], None, [1, 2, 3, 4, 5, 6], 2, None, "CPU")
    assert heard(translator, events) == [Batch(12.5, [stored], 3)]


def test_a_chain_that_is_stored_from_its_end_is_told_from_its_beginning() -> None:
    translator = EventTranslator(1)
    translator.describe([7, 8, 9], [1, 2, 3], None)
    events = [BlockRemoved(5, 3, "dram"), *(BlockStored(key, 3, "dram") for key in (9, 8, 7))]
    told = [Removed([5], "CPU"), Stored([7, 8, 9], None, [1, 2, 3], 1, None, "CPU")]
    assert heard(translator, events) == [Batch(12.5, told, 3)]


def test_ranks_have_batches_of_their_own_and_media_events_of_their_own() -> None:
    translator = EventTranslator(1)
    translator.describe([7], [1], None)
    stored = [BlockStored(7, 3, "dram"), BlockStored(7, 3, "ssd"), BlockStored(7, 4, "dram")]
    events = [*stored, BlockRemoved(7, 3, "dram")]
    assert heard(translator, events) == [
        Batch(12.5, [Stored([7], None, [1], 1, None, "CPU"), Stored([7], None, [1], 1, None, "SSD")], 3),
        Batch(12.5, [Stored([7], None, [1], 1, None, "CPU")], 4),
        Batch(12.5, [Removed([7], "CPU")], 3),
    ]


def test_blocks_that_a_tier_brought_along_have_no_tokens() -> None:
    translator = EventTranslator(2)
    events = [BlockStored(7, 3, "ssd"), BlockStored(8, 3, "ssd")]
    expected = [Stored([key], None, [], 2, None, "SSD") for key in (7, 8)]
    assert heard(translator, events) == [Batch(12.5, expected, 3)]


def test_tokens_are_forgotten_with_the_last_place_of_a_block() -> None:
    translator = EventTranslator(1)
    translator.describe([7], [1], None)
    heard(translator, [BlockStored(7, 3, "dram"), BlockStored(7, 3, "ssd"), BlockRemoved(7, 3, "dram")])
    assert len(translator) == 1
    heard(translator, [BlockRemoved(7, 3, "ssd")])
    assert len(translator) == 0


def test_the_tokens_of_blocks_that_are_not_admitted_are_not_kept() -> None:
    translator = EventTranslator(1)
    for key in range(10):
        translator.describe([key, 100 + key], [1, 2], None)
        heard(translator, [BlockStored(key, 3, "dram")] if key == 4 else [])
        translator.check()
    assert len(translator) == 1


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 2), st.sampled_from(["dram", "ssd"]), st.booleans()))
)
def test_a_listener_that_applies_the_events_holds_what_the_pool_holds(
    steps: list[tuple[int, int, str, bool]],
) -> None:
    truth: set[tuple[int, int, str]] = set()
    events: list[BlockStored | BlockRemoved] = []
    for key, rank, tier, store in steps:
        place = (key, rank, tier)
        if store and place not in truth:
            truth.add(place)
            events.append(BlockStored(*place))
        elif not store and place in truth:
            truth.remove(place)
            events.append(BlockRemoved(*place))
    translator = EventTranslator(1)
    translator.describe(range(6), list(range(6)), None)
    index: set[tuple[int, int | None, str | None]] = set()
    for batch in heard(translator, events):
        for event in batch.events:
            places = {(key, batch.data_parallel_rank, event.medium) for key in event.block_hashes}
            index = index | places if isinstance(event, Stored) else index - places
    assert index == {(key, rank, "CPU" if tier == "dram" else "SSD") for key, rank, tier in truth}
    translator.check()
