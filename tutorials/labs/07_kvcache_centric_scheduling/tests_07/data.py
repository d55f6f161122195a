"""The made-up traces of a class, in the public schema: conversations about documents, and long prompts."""

from __future__ import annotations

import random

import msgspec

from mooncake_lite.workloads.traces import BLOCK_TOKENS, TraceRequest

QUESTION_BLOCKS = 4
"""New blocks of each question about a document."""
DOCUMENTS = 12
"""So few that the nodes that have the popular ones send them again and again."""
CONVERSATIONS = 320
"""Requests of the first trace."""
LONG_PROMPTS = 440
"""Requests of the second trace."""
LONG_RATE = 4.0
"""Requests per second of the second trace: nearly twice what one node decodes within 50 ms per token."""


def request(at_s: float, ids: list[int], output_length: int, draw: random.Random) -> TraceRequest:
    """One request; its last block is not full."""
    length = BLOCK_TOKENS * (len(ids) - 1) + draw.randint(1, BLOCK_TOKENS - 1)
    return TraceRequest(float(round(1000 * at_s)), length, output_length, ids)


def conversations(draw: random.Random, sizes: dict[str, int]) -> list[TraceRequest]:
    """Questions about a few documents; some documents are asked about much more often than others."""
    longest = sizes["document_blocks"]
    documents = [range(1000 * n, 1000 * n + draw.randint(longest // 4, longest)) for n in range(DOCUMENTS)]
    made, at_s = [], 0.0
    for number in range(CONVERSATIONS):
        at_s += draw.expovariate(sizes["requests_per_100s"] / 100)
        document = documents[int(DOCUMENTS ** draw.random()) - 1]
        own = 10**6 + 10 * number
        ids = [*document, *range(own, own + QUESTION_BLOCKS)]
        made.append(request(at_s, ids, draw.randint(60, 180), draw))
    return made


def long_prompts(draw: random.Random, sizes: dict[str, int]) -> list[TraceRequest]:
    """Long prompts that share nothing, and answers of similar lengths. They come too fast for one node."""
    made, at_s = [], 0.0
    for number in range(LONG_PROMPTS):
        at_s += draw.expovariate(LONG_RATE)
        ids = [*range(1000 * number, 1000 * number + draw.randint(40, 120))]
        answer = max(2, round(sizes["answer_tokens"] * draw.lognormvariate(0, 0.3)))
        made.append(request(at_s, ids, answer, draw))
    return made


def data(seed: int, sizes: dict[str, int]) -> dict[str, bytes]:
    """Return {file: bytes} of the data that students get."""
    traces = {
        "conversations.jsonl": conversations(random.Random(f"{seed} conversations"), sizes),
        "long_prompts.jsonl": long_prompts(random.Random(f"{seed} long prompts"), sizes),
    }
    return {name: b"".join(msgspec.json.encode(one) + b"\n" for one in made) for name, made in traces.items()}
