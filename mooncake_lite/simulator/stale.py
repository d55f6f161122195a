"""Answers that must change nothing: of an earlier attempt, and of another start of a rank.

Used by `world.py`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from random import Random

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev

OF_ATTEMPT = (
    *(ev.PrefillEnded, ev.RequestFailed, ev.DecodeLoaded, ev.PromptComputed, ev.DecodeEnded, ev.Preempted),
    *(ev.SwapWanted, ev.Swapped),
)
"""Answers about one attempt of a request."""

OF_ORDER = (ev.OpenListed, ev.PutsEnded, ev.BlocksLoaded, ev.BlocksCopied, ev.BlocksChecked)
"""Answers to an order with a number, or about objects with ids: nothing has these a second time."""


def forged(order: fx.Order, layers: int, dice: Random) -> ev.RankEvent | None:
    """Return what another start of its rank might answer to an order; None for an order without answers."""
    rank, epoch = order.rank, dice.choice((-1, 1))
    sums = [7] * layers
    match order:
        case fx.StartPrefill(_, request_id, attempt):
            checksums = [sums] * len(order.store)
            return dice.choice(
                (
                    ev.PrefillEnded(rank, epoch, request_id, attempt, checksums, [], 0.0, 1.0, 0.0),
                    ev.RequestFailed(rank, epoch, request_id, attempt, "of another start"),
                )
            )
        case fx.StartDecode(_, request_id, attempt):
            return dice.choice(
                (
                    ev.DecodeLoaded(rank, epoch, request_id, attempt),
                    ev.DecodeEnded(rank, epoch, request_id, attempt),
                    ev.Preempted(rank, epoch, request_id, attempt, 1, [], []),
                    ev.RequestFailed(rank, epoch, request_id, attempt, "of another start"),
                )
            )
        case fx.StartServe(_, request_id, attempt):
            return dice.choice(
                (
                    ev.PromptComputed(rank, epoch, request_id, attempt, 64, 1.0),
                    ev.DecodeEnded(rank, epoch, request_id, attempt),
                    ev.Preempted(rank, epoch, request_id, attempt, 1, [], []),
                    ev.RequestFailed(rank, epoch, request_id, attempt, "of another start"),
                )
            )
        case fx.GrantSwap(_, request_id, attempt):
            return dice.choice(
                (
                    ev.Swapped(rank, epoch, request_id, attempt, 1, [], []),
                    ev.Preempted(rank, epoch, request_id, attempt, 1, [], []),
                )
            )
        case fx.GrantPuts():
            ids = [place.object_id for place in order.places if place is not None]
            return ev.PutsEnded(rank, epoch, order.number, ids, [sums] * len(ids))
        case fx.LoadBlocks(_, number, keys):
            return ev.BlocksLoaded(rank, epoch, number, [True] * len(keys), [sums] * len(keys), 0.0)
        case fx.CopyBlocks(_, number, sources):
            return ev.BlocksCopied(rank, epoch, number, [sums] * len(sources))
        case fx.CheckBlocks(_, number):
            return ev.BlocksChecked(rank, epoch, number, [False] * len(order.refs))
        case fx.SaveBlocks():
            return ev.BlocksSaved(rank, epoch, order.keys, dice.choice(("written", "durable", "bad")))
    return None
