"""What a store by layers does next, without threads, clocks or bytes: copy layers, send them, or wait.

Used by `by_layers.Outgoing`, which carries it out. Explained in docs/explain/layer-wise-prefill.md.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Take(NamedTuple):
    """Copy these layers of all blocks from their pages into a part of the half, 0 or 1."""

    layers: slice
    part: int


class Send(NamedTuple):
    """Begin to write to the pool what was taken last."""


class Wait(NamedTuple):
    """Wait until the pass has computed more layers, or until the oldest transfer has ended."""

    until: Literal["computed", "sent"]


@dataclass(slots=True)
class Leaving:
    """How far a store by layers is.

        groups   of layers, in their order; each leaves at once
        reached  layers that the pass has computed: all before this number
        aborted  the pass has failed: it computes no more layers
        taken    groups that have been copied into a part of the half
        begun    of those, groups whose transfer has begun
        flying   of those, groups whose transfer has not ended. Transfers end in their order, and the store
                 hears of an end when it waits for one

    Invariant: flying <= begun <= taken <= len(groups).
    """

    groups: Seq[slice]
    reached: int = 0
    aborted: bool = False
    taken: int = 0
    begun: int = 0
    flying: int = 0


def next_act(at: Leaving) -> Take | Send | Wait | None:
    """Choose what a store by layers does next, so that as much of it as possible is done during the pass.

        at   how far it is. Nothing is changed: the caller carries the act out and notes it

    - What was taken is sent before anything else happens.
    - Group n of layers is taken through part n % 2 of the half, once two things are true: the pass has
      computed all layers of the group, and the bytes that were in the part have left, those of group n - 2.
    - As long as one of them is not true, the store waits for it; if neither is, for either of them. A pass
      that has failed computes no more layers: a store that would wait for them has ended, even if transfers
      still fly.
    - When all groups are taken and begun, the store waits for the transfers that still fly.

    Returns the act, or None: the store has ended, because all has left, or because the pass has failed.
    """
    # labs:begin 6d
    if at.begun < at.taken:
        return Send()
    if at.taken == len(at.groups):
        return Wait("sent") if at.flying else None
    layers = at.groups[at.taken]
    if layers.stop > at.reached:
        return None if at.aborted else Wait("computed")
    if at.flying > 1:
        return Wait("sent")
    return Take(layers, at.taken % 2)
    # labs:end 6d
