"""Decisions: where a request is served, in which order, and which requests are refused.

The Conductor of the Mooncake paper without I/O: `state` keeps the books, `placement` and `admission` choose,
`hot_spots` says what to copy. `mooncake_lite.control` drives them for the live cluster and for the simulator.
No module here knows sockets, sleep or a clock. Explained in docs/explain/paper.md, "Scheduling".
"""

from scheduler.admission import admit, predicted_wait_s
from scheduler.hot_spots import HotSpots
from scheduler.placement import LeastTokens, Policy
from scheduler.prefix_index import Leading, PrefixIndex
from scheduler.requests import Placement, Rejection, Request, Terms, Wait
from scheduler.state import State

__all__ = [
    "HotSpots",
    "Leading",
    "LeastTokens",
    "Placement",
    "Policy",
    "PrefixIndex",
    "Rejection",
    "Request",
    "State",
    "Terms",
    "Wait",
    "admit",
    "predicted_wait_s",
]
