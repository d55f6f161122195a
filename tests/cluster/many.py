"""Many streams at once, of several prompts and answers, some given up; and a cluster at rest again."""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from mooncake_lite.messages import Sampling
from tests.cluster import machine, tiny
from tests.mooncake_lite.engine.exact import Case
from tests.patience import patient, wait_until

NO_SPECIAL = {1: -100.0, 2: -100.0}
"""Biases: the text of an answer does not show these tokens."""

AT_REST = (
    r'requests_by_stage{stage="\w+"}',
    "gateway_open_requests",
    "num_requests_waiting",
    "num_requests_running",
    r'prefill_requests_waiting{rank="\d+",role="\w+"}',
    r'prefill_requests_running{rank="\d+",role="\w+"}',
    r'decode_requests_running{rank="\d+",role="\w+"}',
    r'decode_requests_waiting{rank="\d+",role="\w+"}',
    r'kv_cache_pages_used{rank="\d+",role="\w+"}',
    "degraded",
)
POOL_AT_REST = (
    "pool_owners",
    "pool_writing_bytes",
    "pool_private_bytes",
    "pool_quarantined_bytes",
    "pool_leases_expired_total",
)
"""Metrics that are 0 when no request is there, each the sum over ranks or stages."""


@dataclass(frozen=True, slots=True)
class Question:
    """One HTTP request. lines: of the stream, after which the client hangs up; 0: it reads all of it."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    max_tokens: int
    n: int = 1
    lines: int = 0


def questions(chosen: random.Random, requests: int, share_given_up: float = 0.2) -> list[Question]:
    """So many requests or a few more, counted by prompts; prompts share prefixes of up to 256 tokens."""
    bodies = [[chosen.randrange(3, tiny.VOCABULARY) for _ in range(256)] for _ in range(10)]
    found: list[Question] = []
    while requests > 0:
        prompts = []
        for _ in range(chosen.choice([1, 1, 1, 2, 3])):
            own = [chosen.randrange(3, tiny.VOCABULARY) for _ in range(chosen.choice([1, 16, 40]))]
            prompts.append((*chosen.choice(bodies)[: chosen.choice([0, 16, 64, 65, 128, 200])], *own))
        given_up = chosen.random() < share_given_up
        greedy = chosen.random() < 0.5
        how = {} if greedy else {"top_k": 20, "seed": chosen.randrange(1000)}
        sampling = Sampling(0.0 if greedy else 0.9, **how, logit_bias=NO_SPECIAL)  # type: ignore[arg-type]
        lines = chosen.randint(1, 20) if given_up else 0
        n = chosen.choice([1, 1, 2, 3])
        found.append(Question(tuple(prompts), sampling, chosen.randint(2, 32), n, lines))
        requests -= len(prompts)
    return found


def ask_all(
    url: str, questions: Sequence[Question], at_once: int = 12, reused: Counter[str] | None = None
) -> list[Case]:
    """Ask all of them. Returns the answers to those that were not given up.

    reused   takes the prompt tokens that were reused, by where they came from
    """
    reused = Counter() if reused is None else reused
    with httpx.Client(timeout=patient(60)) as client, ThreadPoolExecutor(at_once) as pool:
        found = pool.map(lambda question: _ask(client, url, question, reused), questions)
        return [case for cases in found for case in cases]


def _ask(client: httpx.Client, url: str, question: Question, reused: Counter[str]) -> list[Case]:
    how = question.sampling
    body = {
        "prompt": question.prompts, "max_tokens": question.max_tokens, "n": question.n, "stream": True,
        "temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p, "seed": how.seed,
        "ignore_eos": True,
        "logit_bias": {str(token): bias for token, bias in how.logit_bias.items()},
    }  # fmt: skip
    texts: dict[int, str] = defaultdict(str)
    told = {"x-mooncake-lite-trace": "1"}
    with client.stream("POST", f"{url}/v1/completions", json=body, headers=told) as response:
        if response.status_code != 200:
            raise AssertionError(response.read().decode())
        for number, line in enumerate(response.iter_lines()):
            if question.lines and number == question.lines:
                return []
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["text"]
                reused.update(chunk.get("mooncake_lite", {}).get("cached_tokens", {}))
    if question.lines:
        return []
    assert sorted(texts) == list(range(len(question.prompts) * question.n))
    cases = []
    for index, text in texts.items():
        ids = tuple(map(int, re.findall(r"<(\d+)>", text)))
        assert len(ids) == question.max_tokens
        cases.append(Case(question.prompts[index // question.n], how, ids, index % question.n))
    return cases


def assert_at_rest(url: str, pool: bool) -> None:
    """Assert that nothing is left of any request, within the seconds that ranks take to report."""

    def left() -> dict[str, float]:
        metrics = machine.scraped(url)
        values = {name: machine.summed(metrics, name) for name in AT_REST + POOL_AT_REST * pool}
        return {name: value for name, value in values.items() if value}

    wait_until(lambda: not left(), patient(10.0))
    assert left() == {}
