"""Decisions: where a request is served, in which order, and which requests are refused.

The Conductor of the Mooncake paper without I/O: `state` keeps the books, `placement` and `admission` choose,
`hot_spots` says what to copy. `mooncake_lite.control` drives them for the live cluster and for the simulator.
No module here knows sockets, sleep or a clock. Explained in docs/explain/conductor.md.
"""

from scheduler.admission import ADMISSIONS, Admission, predicted_wait_s
from scheduler.costs import CostConfig, Costs
from scheduler.hot_spots import HotSpots
from scheduler.placement import Policy, choose, explain
from scheduler.prefix_index import Leading, PrefixIndex
from scheduler.requests import Placement, Rejection, Request, Terms, Wait
from scheduler.state import State
