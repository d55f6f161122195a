"""KV events for external listeners: blocks that the pool stores and removes, with their tokens.

Used by the conductor role, which knows the tokens; the control plane knows only keys.
See docs/reference/kv-events.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from mooncake_lite import messages as m
from mooncake_lite.config.kv_events import KVEventsConfig
from mooncake_lite.control import effects as fx
from store.kv_events import EventTranslator
from store.objects import BlockRemoved, BlockStored
from transport.publisher import Publisher


class KVEventStream:
    """Describes blocks before the control plane stores them, then publishes the changes of the pool.

    _asked     report of the latest PutsWanted: its answer is given before the next one
    _granted   (rank, number of its question) -> object id -> (key, tokens, key of the block before) of the
               places that a decode rank was given
    """

    def __init__(self, config: KVEventsConfig, block_tokens: int) -> None:
        """Bind the endpoints. Raises ChannelError when that is impossible."""
        self.translator = EventTranslator(block_tokens)
        self.publisher = Publisher(
            config.endpoint,
            config.replay_endpoint or "",
            config.topic,
            kept=config.buffer_steps,
            hwm=config.hwm,
        )
        self._encoder = msgspec.msgpack.Encoder()
        self._granted: dict[tuple[int, int], dict[int, tuple[int, list[int], int | None]]] = {}

    def describe(self, keys: Sequence[int], token_ids: Sequence[int], parent: int | None) -> None:
        """Note the tokens of these keys, which continue the chain after `parent`."""
        self.translator.describe(keys, token_ids, parent)

    def on_puts_wanted(self, report: m.Report) -> None:
        """Note a rank's question for places."""
        self._asked = report

    def on_granted(self, order: fx.GrantPuts) -> None:
        """Note the places that a rank was told of. Without any, it does not report."""
        report = self._asked
        assert isinstance(report.event, m.PutsWanted)
        assert (report.event.rank, report.event.number) == (order.rank, order.number)
        blocks = zip(order.places, report.event.keys, report.token_ids, report.event.before)
        granted = {
            place.object_id: (key, tokens, parent) for place, key, tokens, (parent, _) in blocks if place
        }
        if granted:
            self._granted[order.rank, order.number] = granted

    def on_puts_ended(self, ended: m.PutsEnded) -> None:
        """Describe the blocks that a rank has written."""
        granted = self._granted.pop((ended.rank, ended.number), {})
        for object_id in ended.object_ids:
            key, tokens, parent = granted[object_id]
            self.describe([key], tokens, parent)

    def lose(self, rank: int) -> None:
        """Forget the places that a lost rank was given."""
        self._granted = {name: blocks for name, blocks in self._granted.items() if name[0] != rank}

    def publish(self, effects: Sequence[fx.Effect]) -> None:
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
