"""The conductor's side of the pool: what becomes visible, what is written behind, and who hears of it.

Used by the conductor role alone, which hands on the messages that are about blocks and not about requests.
It drives the store's directory; where a request's blocks go is decided in `room.py`. See docs/lifecycle.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

import scheduler
from mooncake_lite import messages as m
from mooncake_lite.kv_events import KVEventsConfig
from mooncake_lite.roles.room import block_ref
from store.directory import Directory
from store.kv_events import EventTranslator
from store.objects import BlockStored
from transport.publisher import Publisher

Send = Callable[[str, m.Message], bool]


class KVEvents:
    """The directory's events for listeners outside: translated, numbered, published."""

    def __init__(self, config: KVEventsConfig, block_tokens: int) -> None:
        """Raises ChannelError when an endpoint cannot be bound."""
        self.translator = EventTranslator(block_tokens)
        self.publisher = Publisher(
            config.endpoint,
            config.replay_endpoint or "",
            config.topic,
            kept=config.buffer_steps,
            hwm=config.hwm,
        )
        self._encoder = msgspec.msgpack.Encoder()

    def publish(self, events: Sequence[object]) -> None:
        """Send these events of the directory, in their order."""
        for batch in self.translator.batches(events, time.time()):  # type: ignore[arg-type]
            self.publisher.publish(self._encoder.encode(batch))


class Pool:
    """Publishes objects, passes the tier's news on, and feeds the scheduler's index.

    directory   the pool's truth
    policy      whose index lives on the directory's events alone
    events      the same events for others; None when nobody asked for them
    """

    def __init__(
        self, directory: Directory, policy: scheduler.Conductor, send: Send, events: KVEvents | None
    ) -> None:
        self.directory = directory
        self._policy = policy
        self._send = send
        self._events = events

    def publish(self, object_ids: list[int], checksums: list[list[int]], now: float) -> None:
        """Written objects become visible, and those that their store rank may keep are written behind."""
        self.directory.put_end_many(object_ids, checksums, now)
        for rank, places in self.directory.take_saves().items():
            save = m.SaveBlocks(
                [block_ref(place) for place in places],
                [place.key or 0 for place in places],
                [place.digest for place in places],
                [list(place.checksums) for place in places],
            )
            self._send(f"rank-{rank}", save)
        self.tell(now)

    def describe(self, keys: Sequence[int], token_ids: Sequence[int], parent: int | None) -> None:
        """What these blocks stand for, a chain behind `parent`; only listeners outside want to know."""
        if self._events is not None:
            self._events.translator.describe(keys, token_ids, parent)

    def on_tier_index(self, index: m.TierIndex) -> None:
        """A store rank says what its tier holds."""
        self.directory.add_tier_blocks(index.rank, index.keys, index.digests)
        self.tell(time.monotonic())

    def on_blocks_saved(self, saved: m.BlocksSaved) -> None:
        """What became of blocks that were to be written behind."""
        if saved.state == "written":
            self.directory.saved(saved.rank, saved.keys)
        elif saved.state == "durable":
            self.directory.durable(saved.rank, saved.keys)
        elif saved.state == "bad":
            self.directory.bad_in_dram(saved.rank, saved.keys)
        else:
            self.directory.dropped(saved.rank, saved.keys)
        self.tell(time.monotonic())

    def on_tier_evicted(self, evicted: m.TierEvicted) -> None:
        """These blocks had to leave a tier."""
        self.directory.tier_evicted(evicted.rank, evicted.keys)
        self.tell(time.monotonic())

    def on_blocks_removed(self, removed: m.BlocksRemoved) -> None:
        """A tier has deleted these, in their time also those that became durable meanwhile."""
        self.directory.tier_removed(removed.rank, removed.keys)
        self.tell(time.monotonic())

    def tell(self, now: float) -> None:
        """Everybody hears what was stored and removed since the last time."""
        events = self.directory.drain_events()
        for event in events:
            kind = scheduler.BlockStored if isinstance(event, BlockStored) else scheduler.BlockRemoved
            tier: Literal["dram", "ssd"] = "dram" if event.tier == "dram" else "ssd"
            self._policy.on(kind(event.key, event.rank, tier), now)
        if self._events is not None:
            self._events.publish(events)  # none too: what was described and not admitted is then forgotten

    def serve(self) -> None:
        """Answer listeners that missed something; called in every turn of the conductor's loop."""
        if self._events is not None:
            self._events.publisher.serve()

    def close(self) -> None:
        """Stop publishing."""
        if self._events is not None:
            self._events.publisher.close()

    def stats(self) -> dict[str, int]:
        """The directory's figures by metric name, counters marked as such."""
        counted = self.directory.counters
        return {f"{n}_total" if n in counted else n: v for n, v in self.directory.stats().items()}
