"""Lab 5 at work: the requests of the class on one rank in virtual time, with whole prompts and with chunks.

Run by `mooncake-lite labs run 5`, once with the student's tree and once with the reference:

    python play.py MODEL DATA SIZES

Prints a list of `Played` (mooncake_lite/labs/playing.py) as JSON. For the figures of the report:

    python play.py DATA/requests.jsonl whole 16 32 64 64:56 > tokens.csv

It prints every token under each of these budgets; 64:56 is a budget of 64 tokens on a rank with 56 pages. A
forward pass takes the time that a formula gives.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler.instance import (
    DECODE,
    PREFILL,
    Arrived,
    Job,
    Limits,
    Pages,
    Staging,
    State,
    Step,
    begin,
    new_prefix_cache,
    next_step,
    on,
)
from scheduler.instance.outcomes import Loaded, Outcome, Preempted, Token
from scheduler.instance.step import Result

PASS_S, TOKEN_S = 0.02, 0.0015
"""Of a forward pass: reading the weights, and each of its tokens."""
PAGES, FEW_PAGES, PAGE_TOKENS, BLOCK_TOKENS = 200, 56, 16, 64
PREFILLS = 2
SYSTEM_TOKENS = 32
WHOLE = "whole"
DUTIES = frozenset({PREFILL, DECODE})


@dataclass
class Played:
    """What happened to the requests.

    rows       (request, index, seconds, tokens of its pass) of each token; index 0 is the arrival
    answers    request -> its tokens
    passes     tokens of each pass that has some of a prompt
    reused     prompt tokens that were in the prefix cache
    preempted  times that a job lost its pages
    """

    rows: list[tuple[int, int, float, int]] = field(default_factory=list)
    answers: dict[int, list[int]] = field(default_factory=dict)
    passes: list[int] = field(default_factory=list)
    reused: int = 0
    preempted: int = 0

    @property
    def gaps(self) -> list[float]:
        """Return the seconds between two tokens of an answer, of all answers."""
        return [
            after[2] - before[2]
            for before, after in itertools.pairwise(self.rows_in_order)
            if before[0] == after[0] and before[1]
        ]

    @property
    def first_tokens(self) -> list[float]:
        """Return the seconds from each arrival to the first token."""
        rows = self.rows_in_order
        return [after[2] - before[2] for before, after in itertools.pairwise(rows) if after[1] == 1]

    @property
    def rows_in_order(self) -> list[tuple[int, int, float, int]]:
        """Return the rows, request by request."""
        return sorted(self.rows)


def prompt_of(number: int, tokens: int) -> list[int]:
    """Make a prompt. All begin with the same tokens."""
    return [*range(SYSTEM_TOKENS), *range(1000 * (number + 1), 1000 * (number + 1) + tokens - SYSTEM_TOKENS)]


def drawn(step: Step) -> list[int]:
    """Draw the next tokens. They depend on the sequence alone, as those of a model do."""
    return [
        (31 * len(draw.token_ids) + draw.token_ids[SYSTEM_TOKENS]) % 997
        for chunk in step.chunks
        for draw in chunk.draws
    ]


def play(requests: list[dict[str, Any]], setting: str) -> Played:
    """Serve the requests on one rank."""
    limits, num_pages = rank_of(setting)
    pages = Pages(num_pages, PAGE_TOKENS)
    prefix = new_prefix_cache("radix", pages, BLOCK_TOKENS)
    state = State(DUTIES, pages, Staging(0, 0), BLOCK_TOKENS, limits, prefix=prefix)
    state.next_key = lambda salt, parent, tokens: hash((salt, parent, *tokens))
    played, now, waiting = Played(), 0.0, list(enumerate(requests))
    while waiting or state.busy:
        if not state.busy:
            now = max(now, waiting[0][1]["at_s"])
        while waiting and waiting[0][1]["at_s"] <= now:
            number, request = waiting.pop(0)
            prompt = prompt_of(number, request["prompt_tokens"])
            job = Job(str(number), 0, DUTIES, prompt, 0, request["answer_tokens"], 1 << 20, salt=b"class")
            played.rows.append((number, 0, request["at_s"], 0))
            on(state, Arrived(job), now)
        step = next_step(state, now)
        begin(state, step)
        size = sum(len(chunk.token_ids) for chunk in step.chunks)
        seconds = PASS_S + TOKEN_S * size if size else 0.0
        now += seconds
        if any(chunk.prompt for chunk in step.chunks):
            played.passes.append(size)
        for outcome in on(state, Result(step, drawn(step), compute_s=seconds), now):
            note(state, played, requests, outcome, now, size)
    return played


def note(
    state: State, played: Played, requests: list[dict[str, Any]], outcome: Outcome, now: float, size: int
) -> None:
    """Write down what became of a request. A preempted one comes again at once, with its answer so far."""
    if isinstance(outcome, Token):
        number = int(outcome.job.request_id)
        played.answers.setdefault(number, []).append(outcome.token)
        played.rows.append((number, outcome.index + 1, now, size))
    elif isinstance(outcome, Loaded):
        played.reused += outcome.shared
    elif isinstance(outcome, Preempted):
        played.preempted += 1
        name, attempt = outcome.job.request_id, outcome.job.attempt + 1
        most = requests[int(name)]["answer_tokens"]
        tokens = list(outcome.token_ids)
        job = Job(name, attempt, DUTIES, tokens, outcome.answered, most, 1 << 20, salt=b"class")
        on(state, Arrived(job), now)


def rank_of(setting: str) -> tuple[Limits, int]:
    """Return the limits and the pages of a rank: of "whole", "64" or "64:56"."""
    budget, _, pages = setting.partition(":")
    num_pages = int(pages or PAGES)
    if budget == WHOLE:
        return Limits(1 << 20, prefills=PREFILLS, chunked=False), num_pages
    return Limits(int(budget), prefills=PREFILLS), num_pages


def read(path: Path) -> list[dict[str, Any]]:
    """Read the requests of the class."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(path: Path, settings: list[str]) -> None:
    """Print every token under each of these settings."""
    print("setting,request,index,seconds,pass_tokens")
    for setting in dict.fromkeys(settings):
        for number, index, seconds, size in play(read(path), setting).rows_in_order:
            print(f"{setting},{number},{index},{seconds:.4f},{size}")


def summary(data: Path, sizes: dict[str, int]) -> None:
    """Print what `labs run` shows."""
    requests, budget = read(data / "requests.jsonl"), sizes["budget"]
    settings = {
        "whole prompts": WHOLE,
        f"chunks, budget {budget}": f"{budget}",
        f"the same, {FEW_PAGES} pages": f"{budget}:{FEW_PAGES}",
    }
    rows: list[dict[str, Any]] = []
    said = []
    for name, setting in settings.items():
        played = play(requests, setting)
        tokens = [token for number in sorted(played.answers) for token in played.answers[number]]
        mean, most = statistics.mean(played.passes), max(played.passes)
        said.append(
            f"{name}: a pass with tokens of prompts has {mean:.0f} tokens on average, {most} at most; "
            f"{played.preempted} jobs were preempted."
        )
        for what, seconds in (
            ("longest gap between tokens", max(played.gaps)),
            ("median gap", statistics.median(played.gaps)),
            ("mean time to the first token", statistics.mean(played.first_tokens)),
        ):
            row = {"what": f"{name}: {what}", "tokens": tokens, "reused": played.reused, "seconds": seconds}
            rows.append({**row, "said": "", "how": "simulated"})
    rows[0]["said"] = " ".join(said)
    gaps, firsts = ([rows[index + side]["seconds"] for side in (0, 3)] for index in (0, 2))
    rows[0]["gain"] = (
        f"chunks: longest gap {gaps[0] / gaps[1]:.1f} times shorter, first tokens "
        f"{100 * abs(firsts[1] / firsts[0] - 1):.0f} % {'later' if firsts[1] > firsts[0] else 'earlier'}"
    )
    print(json.dumps(rows))


def main() -> None:
    """Play for `labs run`, or print tokens for figures."""
    if sys.argv[1:] and sys.argv[1].endswith(".jsonl"):
        table(Path(sys.argv[1]), sys.argv[2:] or [WHOLE, "32"])
    else:
        _, data, sizes = sys.argv[1:]
        summary(Path(data), json.loads(sizes))


if __name__ == "__main__":
    main()
