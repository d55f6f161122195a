"""Decisions: where a request is served, in which order, and which requests are refused.

The Conductor of the Mooncake paper without I/O: `state` keeps the books, `placement` and `admission` choose,
`hot_spots` says what to copy. `mooncake_lite.control` drives them for the live cluster and for the simulator.
No module here knows sockets, sleep or a clock. Importing the package loads no NumPy: launchers and gateways
need names alone. Explained in docs/explain/conductor.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scheduler.admission import ADMISSIONS, Admission, predicted_wait_s
    from scheduler.costs import CostConfig, Costs
    from scheduler.hot_spots import HotSpots
    from scheduler.placement.choose import choose, explain
    from scheduler.placement.contract import Policy
    from scheduler.prefix_index import Leading, PrefixIndex
    from scheduler.requests import Placement, Rejection, Request, Terms, Wait
    from scheduler.state import State

_HOMES = {
    **dict.fromkeys(("ADMISSIONS", "Admission", "predicted_wait_s"), "admission"),
    **dict.fromkeys(("CostConfig", "Costs"), "costs"),
    "HotSpots": "hot_spots",
    **dict.fromkeys(("choose", "explain"), "placement.choose"),
    "Policy": "placement.contract",
    **dict.fromkeys(("Leading", "PrefixIndex"), "prefix_index"),
    **dict.fromkeys(("Placement", "Rejection", "Request", "Terms", "Wait"), "requests"),
    "State": "state",
}


def __getattr__(name: str) -> Any:
    """Import what the package offers when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'scheduler' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"scheduler.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
