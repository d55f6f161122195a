"""The made-up trace of a class, in the public schema: conversations that fork, beside documents read once."""

from __future__ import annotations

import random

import msgspec

from mooncake_lite.workloads.traces import BLOCK_TOKENS, TraceRequest

APPS = 4
"""Applications, each with a system prompt of its own."""

SYSTEM_BLOCKS = 3


def made_trace(draw: random.Random, requests: int) -> list[TraceRequest]:
    """Half of the requests continue a recent conversation, and a fifth of those ask a question again.

    The others begin a conversation, or ask once about a long document that never comes back.
    """
    fresh = APPS * SYSTEM_BLOCKS
    systems = [list(range(SYSTEM_BLOCKS * app, SYSTEM_BLOCKS * (app + 1))) for app in range(APPS)]
    talks: list[list[int]] = []
    made = []

    def blocks(count: int) -> range:
        nonlocal fresh
        fresh += count
        return range(fresh - count, fresh)

    for number in range(requests):
        kind = draw.random()
        if talks and kind < 0.5:
            place = -1 - min(int(draw.expovariate(0.2)), len(talks) - 1)
            forks = draw.random() < 0.2
            begin = talks[place][: -draw.randint(1, 2)] if forks else talks.pop(place)
            ids = [*begin, *blocks(draw.randint(1, 4))]
            talks.append(ids)
        elif kind < 0.8:
            ids = [*systems[min(int(draw.expovariate(1)), APPS - 1)], *blocks(draw.randint(1, 5))]
            talks.append(ids)
        else:
            ids = [*systems[0], *blocks(draw.randint(8, 24))]
        length = BLOCK_TOKENS * (len(ids) - 1) + draw.randint(1, BLOCK_TOKENS)
        made.append(TraceRequest(3000.0 * (number // 4), length, draw.randint(20, 400), ids))
    return made


def data(seed: int, sizes: dict[str, int]) -> dict[str, bytes]:
    """Return {file: bytes} of the data that students get: the trace on which 3c and 3d are tested."""
    trace = made_trace(random.Random(f"{seed} trace"), sizes["requests"])
    return {"trace.jsonl": b"".join(msgspec.json.encode(request) + b"\n" for request in trace)}
