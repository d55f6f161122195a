"""Fits traces to smaller machines: shorter lengths, faster arrivals, arrivals between the ticks.

Used by all that plays a trace. Pure: the same trace comes out of the same arguments in every process.
Explained in docs/how-to/replay-a-trace.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from math import isfinite
from random import Random

from msgspec import structs

from mooncake_lite.errors import ConfigError
from mooncake_lite.workloads.text import ID_TOKENS, PLACE_BITS
from mooncake_lite.workloads.traces import Trace, TraceRequest

TICK_MS = 3000.0
"""The published traces have timestamps that are multiples of it."""


def divided(trace: Trace, by: int) -> Trace:
    """Divide all lengths, and the size of a block with them, so that requests share the prefixes they shared.

    A full block stays one. A partial last block of `rest` tokens keeps its id and gets ceil(rest / by)
    tokens. An answer gets at least one token. Blocks that are too short for the words of an id get other ids.

    Raises ConfigError when a block would not be a whole number of tokens.
    """
    if by < 1 or trace.block_tokens % by:
        size = trace.block_tokens
        raise ConfigError(
            f"lengths cannot be divided by {by}: take a divisor of {size}, the tokens of a block"
        )
    block_tokens = trace.block_tokens // by

    def shorter(request: TraceRequest) -> TraceRequest:
        full, rest = divmod(request.input_length, trace.block_tokens)
        return structs.replace(
            request,
            input_length=full * block_tokens - (-rest // by),
            output_length=max(1, round(request.output_length / by)),
        )

    small = Trace([shorter(request) for request in trace.requests], block_tokens, trace.answers)
    return small if block_tokens >= ID_TOKENS else _numbered(small)


def _numbered(trace: Trace) -> Trace:
    """Number blocks anew, so that few words tell those apart that follow the same block.

    An id names a whole prefix. So prompts differ where their prefixes do, although blocks that follow
    different blocks may have the same text.
    """
    numbers, followers = dict[tuple[int, int], int](), Counter[int]()

    def numbered(ids: Sequence[int]) -> list[int]:
        found, last = list[int](), -1
        for each in ids:
            if (last, each) not in numbers:
                numbers[last, each] = (len(numbers) << PLACE_BITS) + followers[last]
                followers[last] += 1
            last = numbers[last, each]
            found.append(last)
        return found

    requests = [structs.replace(one, hash_ids=numbered(one.hash_ids)) for one in trace.requests]
    answers = [
        numbered([*one.hash_ids[:full], *answer])[full:]
        for one, answer in zip(trace.requests, trace.answers)
        for full in [one.input_length // trace.block_tokens]
    ]
    return Trace(requests, trace.block_tokens, answers)


def spread(trace: Trace, seed: int) -> Trace:
    """Draw the arrivals of each tick of 3 s anew, evenly over the tick. The order of requests stays."""
    dice, requests = Random(f"spread {seed}"), list[TraceRequest]()
    for tick, group in groupby(trace.requests, lambda request: request.timestamp // TICK_MS):
        together = list(group)
        times = sorted(TICK_MS * (tick + dice.random()) for _ in together)
        requests += at_times(together, times)
    return replace(trace, requests=requests)


def sped(trace: Trace, speed: float) -> Trace:
    """Divide all timestamps by `speed`. Raises ConfigError for what is no positive number."""
    if not (isfinite(speed) and speed > 0):
        raise ConfigError(f"a trace cannot be played at speed {speed}: take a number above 0")
    times = [request.timestamp / speed for request in trace.requests]
    return replace(trace, requests=at_times(trace.requests, times))


def at_times(requests: Sequence[TraceRequest], times_ms: Sequence[float]) -> list[TraceRequest]:
    """Return the requests with other timestamps."""
    return [structs.replace(one, timestamp=time_ms) for one, time_ms in zip(requests, times_ms)]
