"""Everything that the Conductor is told. Its whole state follows from these and from `decide`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tier = Literal["dram", "ssd"]


@dataclass(frozen=True, slots=True)
class RankJoined:
    """A rank is ready. `slots`: sequences a decode rank runs at once (0 for the other roles)."""

    rank: int
    role: str
    node: int
    slots: int = 0


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block can be read in this rank's part of the pool, in DRAM or on SSD."""

    key: int
    rank: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block can no longer be read there."""

    key: int
    rank: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """A dispatched prefill has finished: `computed_tokens` took `seconds` of the rank's time."""

    request_id: str
    computed_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeEnded:
    """The request has left its decode rank (finished, cancelled or preempted)."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestDeferred:
    """A dispatched request could not start (the pool is full): it returns to the head of its queue."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestDropped:
    """The request is over, at whatever stage it was."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestResumed:
    """A preempted request wants to be prefilled again, ahead of those that wait.

    It was accepted once, so the bound of the queue does not apply to it.
    """

    request_id: str
    num_tokens: int
    keys: tuple[int, ...]
    block_tokens: int
    max_tokens: int


Event = (
    RankJoined
    | BlockStored
    | BlockRemoved
    | PrefillEnded
    | DecodeEnded
    | RequestDeferred
    | RequestDropped
    | RequestResumed
)
