"""A small made-up trace, the same in every run, and files of it."""

from __future__ import annotations

import random
from pathlib import Path

from mooncake_lite.workloads.traces import Trace, TraceRequest, write_trace


def made_trace(requests: int = 300) -> Trace:
    """Conversations that grow and come back, beside prompts that never do. All begin with block 0."""
    draw = random.Random(7)
    talks = [[0] for _ in range(12)]
    fresh = 1
    made = []
    for number in range(requests):
        if draw.random() < 0.4:
            ids = [0, *range(fresh, fresh + draw.randrange(1, 9))]
        else:
            place = draw.randrange(len(talks))
            ids = [*talks[place], *range(fresh, fresh + draw.randrange(1, 4))]
            talks[place] = ids[:-1] if len(ids) < 15 else [0]
        fresh += len(ids)
        length = 512 * (len(ids) - 1) + draw.choice([512, 300, 1])
        made.append(TraceRequest(3000.0 * (number // 4), length, 10, ids))
    return Trace(made)


def write(path: Path, trace: Trace) -> Path:
    path.write_bytes(write_trace(trace))
    return path
