"""How long a test waits: for a promise in seconds, on a machine that others use as well.

Used by tests that watch processes. A promise such as "ends within five seconds" is about a machine that has
the cores it needs; a test that fails because somebody else computes says nothing about it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

MOST = 4.0
"""Beyond this much patience a promise would no longer be tested."""


def patient(limit_s: float) -> float:
    """limit_s on an idle machine; longer with each process that wants a core, at most MOST times as long."""
    cores = len(os.sched_getaffinity(0))
    return limit_s * min(1.0 + os.getloadavg()[0] / cores, MOST)


def wait_until(condition: Callable[[], object], limit_s: float | None = None) -> bool:
    """Look again and again whether condition() holds. False if not within limit_s; None: 20 s or more."""
    until = time.monotonic() + (patient(20.0) if limit_s is None else limit_s)
    while not (holds := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return bool(holds)
