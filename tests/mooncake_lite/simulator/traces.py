"""A small made-up trace, the same in every run, and files of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

from mooncake_lite.simulator.traces import TraceRequest


def made_trace(requests: int = 300) -> list[TraceRequest]:
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
    return made


def write(path: Path, trace: list[TraceRequest]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps({n: getattr(r, n) for n in names}) + "\n" for r in trace))
    return path
