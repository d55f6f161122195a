"""Ideas inside one rank, without a cluster: prefix sharing, and several answers to a prompt.

Run by `ideas`. The planner's books and the real engine answer in this process. Unlike `generate`, a rank
keeps its pages between requests.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine.engine import Engine
from mooncake_lite.engine.local import BLOCK_TOKENS
from mooncake_lite.engine.runner import Runner
from mooncake_lite.messages import Sampling
from mooncake_lite.model.forward import Model
from mooncake_lite.tools.bench.engine_sides import Ours, Prompts
from mooncake_lite.tools.bench.result import Other, Row, in_turns, medians
from scheduler import instance
from scheduler.instance.outcomes import Outcome, Token
from store.keys import next_key

LIMITS = instance.Limits(tokens=256, sequences=16)
"""The defaults of `serve`."""

DUTIES = frozenset({instance.PREFILL, instance.DECODE})


@dataclass(frozen=True, slots=True)
class Answered:
    """What some jobs came to.

    tokens   of each answer, in the order of the jobs and their branches
    times    when each of these tokens came, in seconds since the start
    pages    most pages that were in use at once
    """

    tokens: list[list[int]]
    times: list[list[float]]
    pages: int

    @property
    def ttft_s(self) -> float:
        """Return when each answer had its first token."""
        return max(each[0] for each in self.times)

    @property
    def total_s(self) -> float:
        """Return when all answers were complete."""
        return max(each[-1] for each in self.times)


class Rank:
    """A rank with both duties.

    tokens    for which it has pages
    sharing   one of scheduler.instance.SHARING
    """

    def __init__(self, model: Model, tokens: int, sharing: str) -> None:
        num_pages = instance.pages_for(tokens, PAGE_TOKENS)
        pages = instance.Pages(num_pages, PAGE_TOKENS)
        prefix = instance.new_prefix_cache(sharing, pages, BLOCK_TOKENS)
        self._state = instance.State(
            DUTIES, pages, instance.Staging(0, 0), BLOCK_TOKENS, LIMITS, next_key=next_key, prefix=prefix
        )
        self._runner = Runner(Engine(model, num_pages, BLOCK_TOKENS))
        self._context = model.config.max_position

    def ask(self, prompts: Prompts, new: int, *, n: int = 1) -> Answered:
        """Answer each prompt n times with `new` tokens, drawn at temperature 1. All arrive at once."""
        return self.run([self.job(str(number), prompt, new, n=n) for number, prompt in enumerate(prompts)])

    def job(self, name: str, prompt: Sequence[int], new: int, *, n: int = 1, branch: int = 0) -> instance.Job:
        """Make a job. branch: number of its first answer, which decides what is drawn."""
        return instance.Job(
            name, 0, DUTIES, list(prompt), 0, new, self._context, sampling=Sampling(1.0), n=n, branch=branch,
            salt=b"bench",
        )  # fmt: skip

    def run(self, jobs: Sequence[instance.Job]) -> Answered:
        """Answer jobs that arrive at once."""
        began, most = time.perf_counter(), 0
        found: dict[instance.JobId, list[tuple[int, float]]] = defaultdict(list)
        state = self._state
        for job in jobs:
            _note(instance.on(state, instance.Arrived(job), time.monotonic()), found, began)
        while state.busy:
            step = instance.next_step(state, time.monotonic())
            instance.begin(state, step)
            most = max(most, len(state.pages.held))
            _note(instance.on(state, self._runner.run(step), time.monotonic()), found, began)
        answers = [found[name] for name in sorted(found)]
        tokens = [[token for token, _ in answer] for answer in answers]
        return Answered(tokens, [[moment for _, moment in answer] for answer in answers], most)


def _note(said: list[Outcome], found: dict[instance.JobId, list[tuple[int, float]]], began: float) -> None:
    now = time.perf_counter() - began
    for outcome in said:
        if isinstance(outcome, Token):
            found[outcome.job].append((outcome.token, now))


def prefix_sharing(ours: Ours, tokens: int, known: int, runs: int) -> list[Row]:
    """TTFT of a prompt of `tokens` tokens, the first of which another prompt had before it: so many.

    By hash and by radix tree, each beside no sharing. A known prefix that ends within a block shows the
    difference: the hash shares whole blocks of 64 tokens, the tree whole pages of 16.
    """
    first, other = ours.prompts(2, tokens)
    second = first[:known] + other[known:]

    def ttft_ms(sharing: str) -> float:
        rank = Rank(ours.model, 2 * tokens, sharing)
        rank.ask([first], 1)
        return 1e3 * rank.ask([second], 1).ttft_s

    forms = ("off", "hash", "radix")
    off, *found = medians(runs, *(partial(ttft_ms, form) for form in forms))
    where = f"TTFT of {tokens} tokens, {known} of them in pages"
    return [
        Row(f"prefix sharing, {form}: {where}", "ms", figure, Other("off", off), None, runs)
        for form, figure in zip(forms[1:], found)
    ]


def several_answers(ours: Ours, tokens: int, n: int, new: int, runs: int) -> list[Row]:
    """n answers of `new` tokens to one prompt: one prefill and shared pages, beside n requests that share
    nothing. Both sides draw the same tokens: a request is given the number of its answer."""
    (prompt,) = ours.prompts(1, tokens)
    rank = Rank(ours.model, n * (tokens + new + 16), "off")
    together, apart = in_turns(
        runs, lambda: rank.ask([prompt], new, n=n), lambda: separately(rank, prompt, n, new)
    )
    rows = []
    for what, unit, field, factor in (
        ("most pages in use at once", "pages", "pages", 1.0),
        ("first tokens of all", "ms", "ttft_s", 1e3),
        ("all answers", "ms", "total_s", 1e3),
    ):
        mine, theirs = (
            factor * statistics.median(getattr(each, field) for each in side) for side in (together, apart)
        )
        name = f"n = {n}: {what}, {tokens} + {new} tokens"
        rows.append(Row(name, unit, mine, Other(f"{n} requests", theirs), None, runs))
    return rows


def separately(rank: Rank, prompt: list[int], n: int, new: int) -> Answered:
    """Ask for the same answers, each in a request of its own."""
    return rank.run([rank.job(str(branch), prompt, new, branch=branch) for branch in range(n)])
