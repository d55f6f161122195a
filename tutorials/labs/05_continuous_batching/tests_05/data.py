"""The made-up requests of a class: chats that are read while they are written, and some long prompts."""

from __future__ import annotations

import json
import random

SYSTEM_TOKENS = 32
"""Of the prompt with which every request begins."""
EVERY = 5
"""One request in so many brings a long document."""


def made_requests(draw: random.Random, requests: int, prompt_tokens: int) -> list[dict[str, float]]:
    """Requests in the order of their arrival. Long prompts have about `prompt_tokens` tokens."""
    at, made = 0.0, []
    for number in range(requests):
        long = number % EVERY == EVERY - 1
        tokens = prompt_tokens + draw.randint(0, 200) if long else draw.randint(10, 60)
        answer = draw.randint(4, 12) if long else draw.randint(20, 60)
        made.append({"at_s": round(at, 3), "prompt_tokens": SYSTEM_TOKENS + tokens, "answer_tokens": answer})
        at += draw.expovariate(3.0)
    return made


def data(seed: int, sizes: dict[str, int]) -> dict[str, bytes]:
    """Return {file: bytes} of the data that students get: the requests of play.py."""
    made = made_requests(random.Random(f"{seed} requests"), sizes["requests"], sizes["prompt_tokens"])
    return {"requests.jsonl": b"".join(json.dumps(request).encode() + b"\n" for request in made)}
