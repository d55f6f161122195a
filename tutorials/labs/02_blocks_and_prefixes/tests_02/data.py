"""The made-up trace of a class, in the public schema: conversations that come back, beside single prompts."""

from __future__ import annotations

import random

import msgspec

from mooncake_lite.workloads.traces import BLOCK_TOKENS, TraceRequest

SYSTEM_BLOCKS = 2
"""Blocks of the system prompt with which every request begins."""


def made_trace(draw: random.Random, requests: int) -> list[TraceRequest]:
    """Half of the requests continue one of a few conversations, and the newest ones more often."""
    system = list(range(SYSTEM_BLOCKS))
    fresh = SYSTEM_BLOCKS
    talks: list[list[int]] = []
    made = []
    for number in range(requests):
        if talks and draw.random() < 0.55:
            place = min(int(draw.expovariate(0.25)), len(talks) - 1)
            ids = [*talks.pop(-1 - place)]
        else:
            ids = list(system)
        more = draw.randint(1, 6)
        ids += range(fresh, fresh + more)
        fresh += more
        talks.append(ids)
        length = BLOCK_TOKENS * (len(ids) - 1) + draw.randint(1, BLOCK_TOKENS)
        made.append(TraceRequest(3000.0 * (number // 4), length, draw.randint(20, 400), ids))
    return made


def data(seed: int, sizes: dict[str, int]) -> dict[str, bytes]:
    """Return {file: bytes} of the data that students get: the trace on which 2e is tested."""
    trace = made_trace(random.Random(f"{seed} trace"), sizes["requests"])
    return {"trace.jsonl": b"".join(msgspec.json.encode(request) + b"\n" for request in trace)}
