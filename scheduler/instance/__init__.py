"""The next step of one rank: requests, chunks, preemption, loads and stores, as a machine without I/O.

A loop drives it: `step = next_step(state, now)`, `begin(state, step)`, a runner carries the step out, and
`on(state, result, now)` returns what others have to hear. Start reading at planner.py. It knows neither torch
nor messages, and reads no clock.
"""

from scheduler.instance.events import Arrived, Cancelled, Event, Forgotten, Granted, Moved, SwapAnswered
from scheduler.instance.job import DECODE, PREFETCH, PREFILL, Job, JobId
from scheduler.instance.limits import Limits
from scheduler.instance.pages import Pages, pages_for
from scheduler.instance.planner import begin, next_step, on
from scheduler.instance.sharing import SHARING, new_prefix_cache
from scheduler.instance.staging import Staging
from scheduler.instance.state import Preemption, State
from scheduler.instance.step import Fault, Late, Result, Step, TransferEnded
