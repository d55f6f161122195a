"""When the requests of a made trace arrive, and in which order those of sessions come.

    sessions, each with its turns in order -> interleaved -> one order -> retimed -> the times of a process

Used by `kinds.py`, by `forms.py` for conversations without times, and by `workload make`. Pure: equal
arguments give equal results in every process. Explained in docs/how-to/make-a-workload.md.

A process gives as many times as there are requests. So the rate is the one that was asked for in a trace of
any length, and a session's pauses are only about as long as drawn: they set the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, islice
from operator import itemgetter
from random import Random
from typing import TypeVar

import numpy as np
from msgspec import structs

from mooncake_lite.errors import ConfigError
from mooncake_lite.workloads.rescale import at_times
from mooncake_lite.workloads.traces import MOST_MS, Trace, TraceRequest

Turn = TypeVar("Turn")
Process = Callable[[int, Random], Sequence[float]]
"""(requests, dice) -> ascending moments of arrival, as shares of the trace's length."""

DAY_SWING = 0.6
"""How far the rate of a day goes above and below its mean: by night a quarter of the rate by day."""

BURSTS_CV = 3.0
"""Standard deviation of the gaps over their mean, where Poisson arrivals have 1. Gamma-distributed gaps are
how BurstGPT (arXiv 2401.17644) describes bursts in Azure's services; 3 is our choice."""


def _renewal(gap: Callable[[], float], requests: int) -> list[float]:
    """Return where gaps end, as shares of the length of requests + 1 gaps."""
    *moments, length = accumulate(gap() for _ in range(requests + 1))
    return [moment / length for moment in moments]


def poisson(requests: int, dice: Random) -> Sequence[float]:
    """Poisson arrivals, given that there are so many."""
    return _renewal(lambda: dice.expovariate(1), requests)


def bursts(requests: int, dice: Random) -> Sequence[float]:
    """Arrivals in bursts: gaps with a Gamma distribution, most of them short and a few long."""
    shape = BURSTS_CV**-2
    return _renewal(lambda: dice.gammavariate(shape, 1 / shape), requests)


def day(requests: int, dice: Random) -> Sequence[float]:
    """Poisson arrivals over one day, from night to night, that is as long as the trace."""
    moments = np.linspace(0, 1, 4097)
    arrived = moments - DAY_SWING * np.sin(2 * np.pi * moments) / (2 * np.pi)
    found: list[float] = np.interp(poisson(requests, dice), arrived, moments).tolist()
    return found


def together(requests: int, dice: Random) -> Sequence[float]:
    """All requests at the begin of the trace."""
    return [0.0] * requests


ARRIVALS: dict[str, Process] = {"poisson": poisson, "day": day, "bursts": bursts, "together": together}
"""Processes by their names on the command line."""


def times_ms(process: str, requests: int, rate: float, seed: int) -> list[float]:
    """Return the times of so many requests, in whole milliseconds.

    rate   requests per second, in the mean over the trace

    Raises ConfigError for a trace of more than MOST_MS.
    """
    if 1e3 * requests / rate > MOST_MS:
        raise ConfigError(
            f"{requests:,} requests at {rate:g} per second take more than 30 years; raise the rate"
        )
    moments = ARRIVALS[process](requests, Random(f"arrivals {seed}"))
    return [float(round(1e3 * moment * requests / rate)) for moment in moments]


def retimed(trace: Trace, process: str, rate: float, seed: int) -> Trace:
    """Give the requests of a trace, in their order, the times of a process. Raises as `times_ms` does."""
    times = times_ms(process, len(trace.requests), rate, seed)
    return replace(trace, requests=at_times(trace.requests, times))


def interleaved(sessions: Iterable[Iterator[tuple[float, Turn]]], at_once: int) -> Iterator[Turn]:
    """Yield the turns of sessions in one order. A session begins when one of the sessions before it ends.

    sessions   of each, (seconds since its turn before or since its begin, turn); none is empty
    at_once    how many there are at a time
    """
    waiting = ((number, *next(one), one) for number, one in enumerate(sessions))
    open_ones = [(after_s, number, turn, one) for number, after_s, turn, one in islice(waiting, at_once)]
    heapify(open_ones)
    while open_ones:
        now_s, number, turn, session = open_ones[0]
        yield turn
        if (following := next(session, None)) is not None:
            heapreplace(open_ones, (now_s + following[0], number, following[1], session))
        elif (begun := next(waiting, None)) is not None:
            number, after_s, turn, session = begun
            heapreplace(open_ones, (now_s + after_s, number, turn, session))
        else:
            heappop(open_ones)


def merged(traces: Sequence[Trace]) -> Trace:
    """Return the requests of all traces by their times. What one trace shares, no other one does.

    Blocks are as large as those of the first trace; all traces must have the same.
    """
    found = [(one.timestamp, number, one) for number, trace in enumerate(traces) for one in trace.requests]
    numbers, requests = dict[tuple[int, int], int](), list[TraceRequest]()
    for _, number, one in sorted(found, key=itemgetter(0)):
        ids = [numbers.setdefault((number, each), len(numbers)) for each in one.hash_ids]
        requests.append(structs.replace(one, hash_ids=ids))
    return Trace(requests, traces[0].block_tokens)
