"""The child's side of lab 5: calls the regions with what the tests send, and tells what was seen.

It runs beside a student's code, so it knows no expected value. Each call reaches the region of one task: the
books of a rank are made by hand, and 5b gets a plain function in place of that of 5c.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from mooncake_lite.labs.counting import CountedNumber, counting
from scheduler.instance import continuous
from scheduler.instance.chunked import chunk_sizes
from scheduler.instance.continuous import next_admissions, next_batch
from scheduler.instance.job import DECODE, PREFETCH, PREFILL, Job
from scheduler.instance.limits import Limits
from scheduler.instance.pages import PageDraft, Pages
from scheduler.instance.preemption import to_preempt
from scheduler.instance.prefix import Chain
from scheduler.instance.prefix_radix import RadixPrefix
from scheduler.instance.staging import Staging
from scheduler.instance.state import State
from scheduler.instance.step import Chunk
from scheduler.instance.task import Task

SALT = b"lab 5"
DUTIES = {"both": {PREFILL, DECODE}, "prefill": {PREFILL}, "decode": {DECODE}, "prefetch": {PREFETCH}}

# ------------------------------------------------------------------------------------------- books


class CountedLine(deque[Task]):
    """The waiting jobs; it counts how often one is looked at."""

    looked = 0

    def __iter__(self) -> Iterator[Task]:
        for task in super().__iter__():
            CountedLine.looked += 1
            yield task

    def __reversed__(self) -> Iterator[Task]:
        for task in super().__reversed__():
            CountedLine.looked += 1
            yield task

    def __getitem__(self, place: Any) -> Any:
        CountedLine.looked += 1
        return super().__getitem__(place)

    def copy(self) -> Any:
        """Return all jobs; each is looked at."""
        return deque(self)

    def __add__(self, other: Any) -> Any:
        return deque([*self, *other])


class CountedBatch(list[Task]):
    """The running batch; it counts how often a job is looked at, slices included."""

    looked = 0

    def __iter__(self) -> Iterator[Task]:
        for task in super().__iter__():
            CountedBatch.looked += 1
            yield task

    def __reversed__(self) -> Iterator[Task]:
        for task in super().__reversed__():
            CountedBatch.looked += 1
            yield task

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        CountedBatch.looked += len(found) if isinstance(place, slice) else 1
        return found

    def copy(self) -> Any:
        """Return all jobs; each is looked at."""
        return [*self]

    def __add__(self, other: Any) -> Any:
        return [*self, *other]


class Books(State):
    """The books of a rank; they count matches, and questions for the next pages of a job."""

    matched = 0
    asked = 0

    def match(self, task: Task) -> tuple[int, ...]:
        """Count a match."""
        Books.matched += 1
        return super().match(task)

    def next_pages(self, task: Task, left: Counter[int]) -> tuple[int, Sequence[int]]:
        """Count a question."""
        Books.asked += 1
        return super().next_pages(task, left)


def task_of(given: dict[str, Any], first: Sequence[int]) -> Task:
    """Make a task. Its prompt begins with tokens of `first`; no other task has the rest."""
    base = 1000 * (1 + sum(map(ord, given["name"])))
    tokens = [*first[: given["begins"]], *range(base, base + given["tokens"] - given["begins"])]
    load = [f"block {number}" for number in range(given["load"])]
    answered = int(given["answers"])
    job = Job(
        given["name"], 0, frozenset(DUTIES[given["duty"]]), tokens, answered, 10_000, 100_000,
        n=given["branches"], load=load, reads=given["reads"], salt=SALT if first else None,
    )  # fmt: skip
    task = Task.of(job)
    task.sequence.pages = list(given["pages"])
    task.sequence.num_computed = given["computed"]
    task.problem, task.by_layers = given["problem"], given["by_layers"]
    return task


def books_of(inputs: dict[str, Any]) -> Books:
    """Make the books of a rank as a test describes them: tasks in their stages, with their pages."""
    pages = Pages(inputs["num_pages"], inputs["page_tokens"])
    cached = inputs["cached"]
    prefix = RadixPrefix(pages, inputs["block_tokens"])
    duties, limits = frozenset(DUTIES[inputs["duty"]]), Limits(**inputs["limits"])
    state = Books(duties, pages, Staging(4, 4), inputs["block_tokens"], limits, prefix=prefix)
    stages: dict[str, list[Task]] = {}
    for stage in ("running", "prefilling", "loading", "swapping", "storing", "waiting"):
        stages[stage] = [task_of(given, cached["tokens"]) for given in inputs[stage]]
        state.tasks |= {task.id: task for task in stages[stage]}
    state.running, state.waiting = CountedBatch(stages["running"]), CountedLine(stages["waiting"])
    state.prefilling, state.swapping, state.storing = (
        stages["prefilling"], stages["swapping"], stages["storing"],
    )  # fmt: skip
    state.loading = stages["loading"][0] if stages["loading"] else None
    users = Counter(page for task in state.tasks.values() for page in task.sequence.pages)
    pages.used = dict(users) | dict.fromkeys(cached["pages"], 1)
    pages.free = deque(page for page in reversed(range(pages.num_pages)) if page not in pages.used)
    if cached["pages"]:
        prefix.insert(Chain(SALT), cached["tokens"], list(cached["pages"]), len(cached["tokens"]))
        pages.give_back(cached["pages"])
    return state


def picture(state: State) -> str:
    """All that a region must leave as it is."""
    pages = state.pages
    stages = [state.running, state.waiting, state.prefilling, state.swapping, state.loading]
    names = [[task.id for task in stage] for stage in stages if isinstance(stage, list | deque)]
    held = [
        (task.id, task.sequence.pages, task.sequence.num_computed, len(task.sequence.token_ids))
        for task in state.tasks.values()
    ]
    return repr((pages.free, pages.used, pages.idle, names, held))


# ------------------------------------------------------------------------------------------- 5a


def admissions(inputs: dict[str, Any]) -> dict[str, Any]:
    """Let waiting jobs begin. Tells the admissions, the jobs that were looked at, and pages left."""
    state = books_of(inputs)
    before = picture(state)
    Books.matched = CountedLine.looked = 0
    draft = PageDraft(state.pages, state.prefix)
    chosen = next_admissions(state, draft)
    looked = max(Books.matched, CountedLine.looked)
    return {
        "admissions": [
            {
                "job": each.job[0],
                "pages": each.pages,
                "shared": each.shared,
                "loads": each.loads,
                "by_layers": each.by_layers,
            }
            for each in chosen
        ],
        "available": draft.num_available,
        "looked": looked,
        "changed": picture(state) != before,
    }


# ------------------------------------------------------------------------------------------- 5b


def oldest_first(budget: int, wanted: Sequence[int]) -> list[int]:
    """Share a budget in place of 5c: the first prompt gets all that it needs, the next one the rest."""
    sizes = []
    for tokens in wanted:
        sizes.append(min(tokens, budget))
        budget -= sizes[-1]
    return sizes


def with_plain_shares(state: State, draft: PageDraft, ahead: Task | None = None) -> tuple[Any, Any]:
    """Compose a pass with `oldest_first` in place of the function of 5c."""
    real = continuous.chunk_sizes
    continuous.chunk_sizes = oldest_first
    try:
        return next_batch(state, draft, ahead)
    finally:
        continuous.chunk_sizes = real


def told(chunk: Chunk) -> dict[str, Any]:
    """What a test hears of a chunk."""
    return {
        "job": chunk.job[0],
        "start": chunk.start,
        "tokens": len(chunk.token_ids),
        "pages": chunk.pages,
        "draws": len(chunk.draws),
        "prompt": chunk.prompt,
    }


def batch(inputs: dict[str, Any]) -> dict[str, Any]:
    """Compose one pass."""
    state = books_of(inputs)
    before = picture(state)
    ahead = next((task for task in state.prefilling if task.id[0] == inputs["ahead"]), None)
    grow, chunks = with_plain_shares(state, PageDraft(state.pages, state.prefix), ahead)
    return {
        "grow": [{"job": each.job[0], "pages": each.pages, "copies": each.copies} for each in grow],
        "chunks": [told(chunk) for chunk in chunks],
        "changed": picture(state) != before,
    }


def passes(inputs: dict[str, Any]) -> list[dict[str, int]]:
    """Compose pass after pass until no prompt is left, at most `most`. Tells the tokens of each job in each.

    What a step does to the books is done by hand, in as few words as a batch without shared pages allows.
    """
    state = books_of(inputs)
    seen: list[dict[str, int]] = []
    while state.prefilling and len(seen) < inputs["most"]:
        grow, chunks = with_plain_shares(state, PageDraft(state.pages, state.prefix))
        for growth in grow:
            state.pages.take(growth.pages)
            state.tasks[growth.job].sequence.pages += growth.pages
        for chunk in chunks:
            task = state.tasks[chunk.job]
            task.sequence.num_computed += len(chunk.token_ids)
            if task.sequence.num_uncomputed == 0:
                task.sequence.token_ids.append(7)
                if task in state.prefilling:
                    state.prefilling.remove(task)
                    state.running.append(task)
        seen.append({chunk.job[0]: len(chunk.token_ids) for chunk in chunks})
    return seen


# ------------------------------------------------------------------------------------------- 5c


class CountedTokens(CountedNumber):
    """A number of tokens that counts how often it is compared, with 0 too by `if`."""

    __bool__ = counting("__bool__")


MOST_ROUNDS = 20_000


class Rounds:
    """Counts the rounds of loops in a file, and the calls of functions that are defined there.

    Each step back to an earlier or the same line of a function is a round. Use it in a `with` statement.
    """

    def __init__(self, file: str) -> None:
        self.file, self.count = file, 0
        self._lines: dict[FrameType, int] = {}

    def __enter__(self) -> Rounds:
        sys.settrace(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _see(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != self.file:
            return None
        if frame not in self._lines or (event == "line" and frame.f_lineno <= self._lines[frame]):
            self.count += 1
            if self.count == MOST_ROUNDS:  # far above every limit; to see each line takes long
                sys.settrace(None)
        self._lines[frame] = frame.f_lineno
        return self._see


def share(inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Share budgets. Tells the sizes, whether `wanted` was changed, and how often tokens were compared.

    A region could turn the numbers into plain ones, which count no comparison. So rounds of loops are counted
    too, and the larger count is told.
    """
    seen = []
    for given in inputs:
        wanted = [CountedTokens(tokens) for tokens in given["wanted"]]
        CountedTokens.count = 0
        with Rounds(chunk_sizes.__code__.co_filename) as rounds:
            sizes = chunk_sizes(given["budget"], wanted)
        compared = max(CountedTokens.count, rounds.count)
        changed = [int(tokens) for tokens in wanted] != given["wanted"]
        seen.append({"sizes": [int(size) for size in sizes], "changed": changed, "compared": compared})
    return seen


def rounds(inputs: dict[str, Any]) -> list[list[int]]:
    """Share the same budget pass after pass, at most `most` passes. Tells the sizes in each pass."""
    wanted, seen = list(inputs["wanted"]), []
    while any(wanted) and len(seen) < inputs["most"]:
        open_ones = [number for number, tokens in enumerate(wanted) if tokens > 0]
        sizes = [0] * len(wanted)
        for number, size in zip(open_ones, chunk_sizes(inputs["budget"], [wanted[n] for n in open_ones])):
            sizes[number] = size
            wanted[number] -= size
        seen.append(sizes)
    return seen


# ------------------------------------------------------------------------------------------- 5d


def preempted(inputs: dict[str, Any]) -> dict[str, Any]:
    """Choose who gives up pages. Tells their names in order, and how many jobs were looked at."""
    state = books_of(inputs)
    before = picture(state)
    Books.asked = CountedBatch.looked = 0
    chosen = to_preempt(state, inputs["num_free"])
    looked = max(Books.asked, CountedBatch.looked)
    return {
        "names": [task.id[0] for task in chosen],
        "looked": looked,
        "changed": picture(state) != before,
    }


CALLS = {
    "admissions": admissions,
    "batch": batch,
    "passes": passes,
    "share": share,
    "rounds": rounds,
    "preempted": preempted,
}
