"""KV events: blocks that the pool stores and removes, in vLLM's wire format, for routers and monitors.

Fed by the conductor with the directory's events, which also feed the scheduler's index; sent by
`transport.messaging.publisher`. Pure: no socket, time is an argument.
Explained in docs/reference/kv-events.md.

The interface is vLLM's (`vllm/distributed/kv_events.py`); what it calls a block hash is our prefix key.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from store.objects import BlockRemoved, BlockStored

MEDIUM = {"dram": "CPU", "ssd": "SSD"}
"""Our tiers in vLLM's words."""

Event = BlockStored | BlockRemoved


class _Wire(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Base of the encoded structs: arrays, without trailing defaults."""


class StoredOnWire(_Wire, frozen=True, tag="BlockStored"):
    """Blocks that can now be read, front to back: each is the parent of the next.

    block_hashes        prefix keys, u64
    parent_block_hash   of the first one; None at the start of a prompt, or when it is not known
    token_ids           of all of them; empty when they are not known (blocks that an SSD tier brought along)
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class RemovedOnWire(_Wire, frozen=True, tag="BlockRemoved"):
    """Blocks that can no longer be read from this medium of this rank."""

    block_hashes: list[int]
    medium: str | None


class Batch(_Wire, frozen=True):
    """One message. `data_parallel_rank` is the store rank that all its events are about."""

    ts: float
    events: list[StoredOnWire | RemovedOnWire]
    data_parallel_rank: int | None = None


class _Note(NamedTuple):
    parent: int | None
    token_ids: array[int]


class EventTranslator:
    """Turns the directory's events into batches; remembers which tokens a block stands for.

        block_tokens   tokens of one block

    Invariant: tokens are kept from `describe`, just before their key is stored, until the key is removed from
    every place. A key that the next `batches` does not store was not admitted, and is forgotten.
    """

    def __init__(self, block_tokens: int):
        self._block_tokens = block_tokens
        self._notes: dict[int, _Note] = {}
        self._places: dict[int, int] = {}
        self._described: set[int] = set()  # since the last batches

    def __len__(self) -> int:
        """Return the number of blocks whose tokens are known."""
        return len(self._notes)

    def describe(self, keys: Sequence[int], token_ids: Sequence[int], parent: int | None) -> None:
        """Note the tokens of a chain of keys after `parent`, before their BlockStored comes."""
        size = self._block_tokens
        for index, key in enumerate(keys):
            if key not in self._notes:
                self._notes[key] = _Note(parent, array("I", token_ids[index * size : (index + 1) * size]))
                self._described.add(key)
            parent = key

    def batches(self, events: Iterable[Event], now_s: float) -> Iterator[Batch]:
        """Yield the events in order, parents first; neighbours of one rank share a batch.

        now_s   seconds since the epoch

        The directory stores a chain from its end to its beginning, so that its first blocks are evicted last.
        A listener's tree must grow from the root.
        """
        for rank, some in groupby(self._parents_first(events), key=lambda event: event.rank):
            yield Batch(now_s, _joined([self._translate(event) for event in some]), rank)
        for key in self._described - self._places.keys():
            self._notes.pop(key, None)
        self._described = set()

    def _parents_first(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events with each stored block after its parent, if no removal lies between them."""
        waiting: dict[int | None, list[BlockStored]] = {}
        for event in events:
            if isinstance(event, BlockStored):
                waiting.setdefault(event.key, []).append(event)
                continue
            yield from self._drained(waiting)
            yield event
        yield from self._drained(waiting)

    def _drained(self, waiting: dict[int | None, list[BlockStored]]) -> Iterator[BlockStored]:
        while waiting:
            key, chain = next(iter(waiting)), []
            while key in waiting:
                chain.append(waiting.pop(key))
                note = self._notes.get(key) if key is not None else None
                key = note.parent if note else None
            for some in reversed(chain):
                yield from some

    def _translate(self, event: Event) -> StoredOnWire | RemovedOnWire:
        key, medium = event.key, MEDIUM[event.tier]
        if isinstance(event, BlockRemoved):
            self._places[key] = self._places.get(key, 1) - 1
            if self._places[key] <= 0:
                del self._places[key]
                self._notes.pop(key, None)
            return RemovedOnWire([key], medium)
        self._places[key] = self._places.get(key, 0) + 1
        note = self._notes.get(key)
        tokens = list(note.token_ids) if note else []
        return StoredOnWire([key], note.parent if note else None, tokens, self._block_tokens, None, medium)

    def check(self) -> None:
        """Assert the invariant (tests)."""
        assert all(count > 0 for count in self._places.values())
        assert self._notes.keys() <= self._places.keys() | self._described


def _joined(words: Sequence[StoredOnWire | RemovedOnWire]) -> list[StoredOnWire | RemovedOnWire]:
    """Join neighbours of one kind and medium; stored blocks only if each is the parent of the next."""
    joined: list[StoredOnWire | RemovedOnWire] = []
    for word in words:
        last = joined[-1] if joined else None
        if isinstance(word, RemovedOnWire) and isinstance(last, RemovedOnWire) and last.medium == word.medium:
            last.block_hashes.extend(word.block_hashes)
        elif (
            isinstance(word, StoredOnWire)
            and isinstance(last, StoredOnWire)
            and last.medium == word.medium
            and word.parent_block_hash == last.block_hashes[-1]
        ):
            last.block_hashes.extend(word.block_hashes)
            last.token_ids.extend(word.token_ids)
        else:
            joined.append(word)
    return joined
