"""KV events for external listeners: blocks that the pool stores and removes, with their tokens.

An observer of the conductor (machine.py), which knows the tokens; the control plane knows only keys.
See docs/reference/kv-events.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from mooncake_lite import messages as m
from mooncake_lite.conductor.machine import Observer
from mooncake_lite.conductor.open_bodies import OpenBody
from mooncake_lite.config.kv_events import KVEventsConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from store.kv_events import EventTranslator
from store.objects import BlockRemoved, BlockStored
from transport.messaging.publisher import Publisher


class KVEventStream(Observer):
    """Describes blocks before the control plane stores them, then publishes the changes of the pool.

    _asked     report of the latest PutsWanted: its answer is given before the next one
    _granted   (rank, number of its question) -> object id -> (key, tokens, key of the block before) of the
               places that a decode rank was given
    """

    def __init__(self, config: KVEventsConfig, block_tokens: int) -> None:
        """Bind the endpoints. Raises ChannelError when that is impossible."""
        self.translator = EventTranslator(block_tokens)
        self._block_tokens = block_tokens
        self.publisher = Publisher(
            config.endpoint,
            config.replay_endpoint or "",
            config.topic,
            kept=config.buffer_steps,
            hwm=config.hwm,
        )
        self._encoder = msgspec.msgpack.Encoder()
        self._granted: dict[tuple[int, int], dict[int, tuple[int, list[int], int | None]]] = {}

    def took(self, message: m.Message, body: OpenBody | None) -> None:
        """Note the tokens of blocks that were written, or for which a rank wants places."""
        event = message.event if isinstance(message, m.Report) else message
        if isinstance(event, m.ChunkStored | m.PrefillEnded) and body is not None:
            chunk = (event.first, len(event.checksums)) if isinstance(event, m.ChunkStored) else ()
            self.translator.describe(*body.stored_blocks(self._block_tokens, *chunk))
        elif isinstance(event, m.PutsEnded):
            self._put(event)
        elif isinstance(message, m.Report) and isinstance(event, m.PutsWanted):
            self._asked = message

    def on(self, event: ev.Event, effects: Sequence[fx.Effect], now: float) -> None:
        """Publish stored and removed blocks, and note which places ranks were given."""
        if isinstance(event, ev.Undelivered) and isinstance(event.order, fx.GrantPuts):
            self._granted.pop((event.order.rank, event.order.number), None)
        self._publish(effects)
        for effect in effects:
            if isinstance(effect, fx.GrantPuts):
                self._grant(effect)
            elif isinstance(effect, fx.MarkLost):
                lost = effect.rank
                self._granted = {name: blocks for name, blocks in self._granted.items() if name[0] != lost}

    def _grant(self, order: fx.GrantPuts) -> None:
        """Note the places that a rank is given. A rank that is given none sends no PutsEnded."""
        report = self._asked
        assert isinstance(report.event, m.PutsWanted)
        assert (report.event.rank, report.event.number) == (order.rank, order.number)
        blocks = zip(order.places, report.event.keys, report.token_ids, report.event.before)
        granted = {
            place.object_id: (key, tokens, parent) for place, key, tokens, (parent, _) in blocks if place
        }
        if granted:
            self._granted[order.rank, order.number] = granted

    def _put(self, ended: m.PutsEnded) -> None:
        """Describe the blocks that a rank has written into places that it was given."""
        granted = self._granted.pop((ended.rank, ended.number), {})
        for object_id in ended.object_ids:
            key, tokens, parent = granted[object_id]
            self.translator.describe([key], tokens, parent)

    def _publish(self, effects: Sequence[fx.Effect]) -> None:
        """Publish stored and removed blocks. Forget blocks that were described but not stored."""
        changes = [effect for effect in effects if isinstance(effect, BlockStored | BlockRemoved)]
        for batch in self.translator.batches(changes, time.time()):
            self.publisher.publish(self._encoder.encode(batch))

    def serve(self) -> None:
        """Answer listeners that have missed events."""
        self.publisher.serve()

    def close(self) -> None:
        """Stop publishing."""
        self.publisher.close()
