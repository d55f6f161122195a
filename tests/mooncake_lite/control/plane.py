"""A control plane of four ranks, spoken to in events: rank 1 prefills, 2 decodes, 3 stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from store.layout import BlockLayout
from tests.mooncake_lite.control.commands import heard_before

LAYOUT = BlockLayout(2, 1, 64, 8, 4)
BLOCK = 64
SUMS = [11, 12]

E = TypeVar("E")


def only(kind: type[E], effects: Sequence[object]) -> E:
    """The one effect of this kind."""
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


class Plane:
    """Checks every invariant after every event.

    blocks   in the segment of each store rank
    lend     blocks in the segment of the prefill rank
    tier     keys on SSD at the start; their digests are equal to them
    """

    def __init__(self, blocks: int = 32, tier: Sequence[int] = (), *, lend: int = 0, **options: Any) -> None:
        roles, layout = ["steward", "prefill", "decode", "store"], (2, 1, BLOCK, 8, 4, "none")
        config = ControlConfig(layout=layout, roles=roles, nodes=[0] * 4, saves=True, **options)
        self.control = Control(config)
        self.now = 0.0
        nbytes = blocks * LAYOUT.nbytes
        self.on(ev.RankJoined(1, 0, 1, ("prefill",), 0, slots=1, segment_bytes=lend * LAYOUT.nbytes))
        self.on(ev.RankJoined(2, 0, 2, ("decode",), 0, slots=16))
        self.on(ev.RankJoined(3, 0, 3, ("store",), 0, segment_bytes=nbytes, tier=True))
        self.on(ev.TierIndexed(3, 0, list(tier), list(tier), True))
        ready = self.on(ev.GatewayReady("gateway-0"))
        assert only(fx.Readiness, ready).ready

    def on(self, event: ev.Event) -> list[fx.Effect]:
        """Apply one event a millisecond after the last one. A gateway has the last token before."""
        self.now += 0.001
        for heard in heard_before(event):
            self.control.on(heard, self.now)
        effects = self.control.on(event, self.now)
        if not self.control.stopped:
            self.control.check()
        return effects

    def arrive(
        self, name: str, num_tokens: int, keys: Sequence[int] | None = None, **more: Any
    ) -> list[fx.Effect]:
        """Send a request. Its keys equal its digests; by default no other request has them."""
        if keys is None:
            keys = [hash_free(name, index) for index in range(num_tokens // BLOCK)]
        return self.on(ev.RequestArrived(name, num_tokens, 16, list(keys), list(keys), **more))

    def prefilled(self, job: fx.StartPrefill, **more: Any) -> list[fx.Effect]:
        """The prefill rank has done what it was told."""
        sums = [SUMS] * len(job.store)
        times = {"finished": [], "load_s": 0.0, "compute_s": 0.1, "store_s": 0.0} | more
        return self.on(ev.PrefillEnded(job.rank, 0, job.request_id, job.attempt, sums, **times))

    def serve(self, name: str, num_tokens: int, keys: Sequence[int] | None = None) -> fx.StartPrefill:
        """A request from its arrival to its end."""
        job = only(fx.StartPrefill, self.arrive(name, num_tokens, keys))
        order = only(fx.StartDecode, self.prefilled(job))
        self.on(ev.DecodeLoaded(order.rank, 0, name, order.attempt))
        self.on(ev.DecodeEnded(order.rank, 0, name, order.attempt))
        return job

    def bytes_in(self, *states: str) -> int:
        """Bytes of the pool in these states."""
        stats = self.control.directory.stats()
        return sum(stats[f"{state}_bytes"] for state in states)


def hash_free(name: str, index: int) -> int:
    """A key that is the same in every process."""
    return int.from_bytes(name.encode()[:6], "little") * 1000 + index + 1
