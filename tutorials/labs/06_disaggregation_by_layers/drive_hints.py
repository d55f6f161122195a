"""The child's side of 6a: a control plane whose prefill rank stores blocks as the tests say.

It runs beside a student's code, so it knows no expected value.
"""

from __future__ import annotations

from typing import Any

from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from store.layout import BlockLayout

LAYOUT = BlockLayout(2, 1, 64, 8, 4)
SUMS = [31, 32]
PREFILL, STORE, DECODE = 1, 2, 3
"""Ranks; a second one that decodes comes after DECODE."""

POOL_BLOCKS = 640


class Plane:
    """A control plane with a prefill rank, a store rank, and two decode ranks."""

    def __init__(self, prefetches: bool) -> None:
        ranks = ["prefill", "store", "decode", "decode"]
        config = ControlConfig(
            layout=(2, 1, 64, 8, 4, "none"), roles=["steward", *ranks], nodes=[0] * 5, prefetches=prefetches
        )
        self.control, self.now = Control(config), 0.0
        self.control.directory._unsure_until = (
            3600.0  # as after a succession: the time decides what is compared
        )
        self.hints: list[fx.Prefetch] = []
        for rank, role in enumerate(ranks, 1):
            more: dict[str, Any] = {"segment_bytes": POOL_BLOCKS * LAYOUT.nbytes} if role == "store" else {}
            slots = {"prefill": 4, "store": 0}.get(role, 8)
            self.on(ev.RankJoined(rank, 0, rank, (role,), 0, slots=slots, **more))
        self.on(ev.GatewayReady("gateway-0"))

    def on(self, event: ev.Event) -> None:
        """Apply an event, and keep the hints that it leads to."""
        self.now += 0.001
        effects = self.control.on(event, self.now)
        self.hints += [effect for effect in effects if isinstance(effect, fx.Prefetch)]

    def arrive(self, name: str, keys: list[int], blocks: int, tail: int) -> None:
        """Let a request come whose prompt fills so many blocks. Its prefill is ordered at once."""
        self.on(ev.RequestArrived(name, blocks * LAYOUT.block_tokens + tail, 64, keys, keys))

    def stored(self, name: str, first: int, count: int) -> None:
        """Note that blocks `first` and later of `present.store` are in the pool: a chunk has left."""
        attempt = self.control.requests[name].attempt
        self.on(ev.ChunkStored(PREFILL, 0, name, attempt, first, [SUMS] * count))

    def ended(self, name: str) -> None:
        """Note that a prompt is computed and stored."""
        record = self.control.requests[name]
        sums = [SUMS] * len(record.present.store)
        self.on(
            ev.PrefillEnded(
                PREFILL, 0, name, record.attempt, sums, finished=[], load_s=0.0, compute_s=0.1, store_s=0.0
            )
        )

    def dies(self, name: str) -> None:
        """Let the decode rank of a request die. Another one is chosen, while its prompt is computed."""
        self.on(ev.RankLost(self.control.requests[name].present.decode, 0, "died"))

    def told(self, effect: fx.Prefetch) -> dict[str, Any]:
        """A hint as the tests read it: the blocks are numbers in load + store, or -1."""
        present = self.control.requests[effect.request_id].present
        number_of = {ref.object_id: number for number, ref in enumerate((*present.load, *present.store))}
        return {
            "rank": effect.rank,
            "name": effect.request_id,
            "attempt": effect.attempt,
            "blocks": [number_of.get(ref.object_id, -1) for ref in effect.blocks],
            "checked": all(ref.check for ref in effect.blocks),
            "tokens": effect.num_tokens,
        }


def hints(inputs: dict[str, Any]) -> dict[str, Any]:
    """Play the steps. Tells the hints that each of them leads to, and what `hinted` says at the end.

    ["arrive", name, keys, blocks, tail]   a prompt of so many blocks, and a tail of so many tokens
    ["stored", name, first, count]         a chunk of it is in the pool
    ["ended", name]                        all of it is
    ["dies", name]                         its decode rank dies
    ["moves", name]                        another decode rank is chosen for it
    ["again", name]                        the region is called, and nothing has changed
    ["unplaced", name]                     it loses its place
    """
    plane = Plane(inputs["prefetches"])
    requests, seen, names = plane.control.requests, [], set()
    for verb, name, *words in inputs["steps"]:
        plane.hints.clear()
        names.add(name)
        if verb == "moves":
            present = requests[name].present
            present.decode = 2 * DECODE + 1 - present.decode
        elif verb == "unplaced":
            plane.control.state.forget(name, plane.now)
        elif verb == "again":
            plane.control._out.clear()
            plane.control.dispatcher.prefetch(requests[name], plane.now)
            plane.hints += [effect for effect in plane.control._out if isinstance(effect, fx.Prefetch)]
            plane.control._out.clear()
        else:
            getattr(plane, verb)(name, *words)
        seen.append([plane.told(effect) for effect in plane.hints])
    return {
        "seen": seen,
        "hinted": {
            name: sorted(requests[name].present.hinted.values()) for name in names if name in requests
        },
    }


CALLS = {"hints": hints}
