"""Decisions: where a request goes, in which order, and what is refused.

The Conductor of the Mooncake paper as a pure object: it is told events and the time, it answers with
placements. The live conductor (`mooncake_lite.roles.conductor`) and, later, the simulator drive the same
object. It may not know sockets, sleep or a clock. Explained in docs/explain/paper.md, "Scheduling".
"""

from scheduler.conductor import Conductor
from scheduler.events import (
    BlockRemoved,
    BlockStored,
    DecodeEnded,
    Event,
    PrefillEnded,
    RankJoined,
    RequestDeferred,
    RequestDropped,
    RequestResumed,
)
from scheduler.prefix_index import PrefixIndex, PrefixMatch
from scheduler.requests import Placement, Rejection, Request

__all__ = [
    "BlockRemoved",
    "BlockStored",
    "Conductor",
    "DecodeEnded",
    "Event",
    "Placement",
    "PrefillEnded",
    "PrefixIndex",
    "PrefixMatch",
    "RankJoined",
    "Rejection",
    "Request",
    "RequestDeferred",
    "RequestDropped",
    "RequestResumed",
]
