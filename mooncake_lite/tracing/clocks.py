"""How far another host's clock is ahead of rank 0's, for the picture alone: no decision compares two clocks.

Used once at the start of a traced run that has several hosts. See docs/how-to/trace.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

ROUNDS = 32


class Exchange(Protocol):
    """The part of transport.world.World that is needed here."""

    rank: int

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """Return what each rank gave, by rank; collective."""


class Offset(NamedTuple):
    """ahead_ns: what is added to the own clock to get rank 0's; error_ns: how wrong that can be at most."""

    ahead_ns: int
    error_ns: int


class Round(NamedTuple):
    """One exchange as two ranks saw it: each on its own clock, in ns, before and after."""

    own_before: int
    own_after: int
    zero_before: int
    zero_after: int


def offset_to_rank_0(world: Exchange, clock: Callable[[], int] = time.monotonic_ns) -> Offset:
    """Compare clocks in a number of exchanges; collective."""
    mine: list[tuple[int, int]] = []
    for _ in range(ROUNDS):
        before = clock()
        world.allgather_bytes(b"")
        mine.append((before, clock()))
    seen = world.allgather_bytes(msgspec.json.encode(mine))
    zero = msgspec.json.decode(seen[0], type=list[tuple[int, int]])
    return tightest([Round(*own, *other) for own, other in zip(mine, zero)])


def tightest(rounds: Sequence[Round]) -> Offset:
    """Estimate the offset from exchanges: no rank leaves one before the other has entered it.

    So rank 0's entry is not after the own leaving, and the own entry not after rank 0's leaving. Each round
    bounds the offset from both sides. The estimate is the middle of the tightest bounds.
    """
    least = max(round.zero_before - round.own_after for round in rounds)
    most = min(round.zero_after - round.own_before for round in rounds)
    return Offset((least + most) // 2, (most - least + 1) // 2)
