"""The child's side of 6b, 6c and 6e: the books of a rank, and memory that tells layers and tokens apart.

It runs beside a student's code, so it knows no expected value. KV is a number for each layer and token. The
pages of the rank, its staging halves and the pool are lists of such numbers, so a block that moves too early,
or to another place, is seen in the layers and tokens that are wrong.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from scheduler.instance import progress
from scheduler.instance.block_moves import next_ahead, next_behind, next_lands, next_reads, next_writes
from scheduler.instance.job import DECODE, PREFETCH, PREFILL, Job
from scheduler.instance.limits import Limits
from scheduler.instance.pages import Pages
from scheduler.instance.planner import begin, on
from scheduler.instance.staging import HalfUse, Staging
from scheduler.instance.state import State
from scheduler.instance.step import Chunk, Draw, Result, Step, TransferEnded, WriteGroup
from scheduler.instance.task import Task

DUTIES = {"prefill": (PREFILL,), "decode": (DECODE,), "prefetch": (PREFETCH,), "both": (PREFILL, DECODE)}
NOTHING = -1
"""In memory that nothing was written to."""

BAD = 7
"""What a bad block has in one of its layers."""

MOST_STEPS = 500

Rows = list[list[int]]
"""KV of some tokens: for each layer the numbers of the tokens."""


def kv(job: int, layer: int, token: int) -> int:
    """The KV of a token in a layer, of a job with this number."""
    return 1_000_000 * job + 10_000 * layer + token


class Books(State):
    """The books of a rank; they count the questions for pages of blocks."""

    asked = 0

    def block_pages(self, task: Task, first: int, count: int) -> Sequence[int]:
        """Count a question."""
        Books.asked += 1
        return super().block_pages(task, first, count)


class Rank:
    """A rank as a test describes it: its books, its pages, and the pool that it reads and writes.

    memory   (layer, page) -> the numbers of the page's tokens
    pool     place -> KV of a block
    jobs     name of a task -> number of its job
    """

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.layers, self.block_tokens = inputs["layers"], inputs["block_tokens"]
        self.page_tokens = self.block_tokens // 2
        self.deal = deque(inputs["pages"])
        pages = Pages(len(self.deal), self.page_tokens)
        by_layers = {"layers": self.layers, "least": inputs["least"]} if "least" in inputs else {}
        limits = Limits(1 << 20, prefills=100, **by_layers)
        names = [given["duty"] for given in inputs["tasks"]] + inputs.get("duties", [])
        duties = frozenset(duty for name in names for duty in DUTIES[name])
        staging = Staging(inputs["half_blocks"], 2)
        self.state = Books(duties, pages, staging, self.block_tokens, limits)
        self.memory: dict[tuple[int, int], list[int]] = {}
        self.pool: dict[str, Rows] = {}
        self.jobs: dict[str, int] = {}
        self.task = {given["name"]: self.add(given) for given in inputs["tasks"]}
        used = Counter(page for task in self.task.values() for page in task.sequence.pages)
        pages.used = dict(used)
        pages.free = deque(page for page in reversed(range(pages.num_pages)) if page not in used)

    def add(self, given: dict[str, Any]) -> Task:
        """Make a task with its pages, and the KV of its first `computed` tokens in them."""
        name, size = given["name"], self.block_tokens
        self.jobs[name] = given["job"]
        tokens = list(range(size * given["blocks"] + given["tail"]))
        load = [f"{name}:{number}" for number in range(given["load"])]
        last = given["blocks"] + (given["tail"] > 0)
        store = [f"{name}:{number}" for number in range(given["load"], last)]
        duties = frozenset(DUTIES[given["duty"]])
        task = Task.of(Job(name, 0, duties, tokens, 0, 100, 1 << 20, load=load, store=store))
        if given["out"] is not None:
            task.out = [(number, f"{name}:{number}") for number in given["out"]]
        task.sequence.pages = [self.deal.popleft() for _ in range(-(-len(tokens) // self.page_tokens))]
        task.copied, task.problem, task.granted = given["copied"], given["problem"], True
        task.to_load = len(load) if given["to_load"] is None else given["to_load"]
        for number, place in enumerate(load):
            span = range(size * number, min(size * (number + 1), len(tokens)))
            self.pool[place] = [
                [kv(given["job"], layer, token) for token in span] for layer in range(self.layers)
            ]
        self.compute(task, range(given["computed"]))
        task.sequence.num_computed = given["computed"]
        self.state.tasks[task.id] = task
        if given["stage"] == "loading":
            self.state.loading = task
        else:
            getattr(self.state, given["stage"]).append(task)
        return task

    def compute(self, task: Task, tokens: Iterable[int], layers: Iterable[int] | None = None) -> None:
        """Compute the KV of tokens, and write it into their pages."""
        job, pages, size = self.jobs[task.id[0]], task.sequence.pages, self.page_tokens
        for token in tokens:
            for layer in range(self.layers) if layers is None else layers:
                page = self.memory.setdefault((layer, pages[token // size]), [NOTHING] * size)
                page[token % size] = kv(job, layer, token)

    def block(self, pages: Sequence[int], layers: Iterable[int]) -> Rows:
        """Copy some layers of a block out of its pages."""
        none = [NOTHING] * self.page_tokens
        return [[cell for page in pages for cell in self.memory.get((layer, page), none)] for layer in layers]

    def put(self, pages: Sequence[int], rows: Rows, layers: Sequence[int]) -> None:
        """Copy some layers of a block into its pages."""
        size = self.page_tokens
        for layer in layers:
            for number, page in enumerate(pages):
                cells = rows[layer][size * number : size * (number + 1)]
                self.memory[layer, page] = cells + [NOTHING] * (size - len(cells))

    def blocks_of(self, group: WriteGroup) -> list[tuple[str, Sequence[int]]]:
        """Pair each place of a group with the pages that the group names for it."""
        size = self.block_tokens // self.page_tokens
        return [
            (place, group.pages[size * number : size * (number + 1)])
            for number, place in enumerate(group.places)
        ]

    def kv_of(self, task: Task) -> Rows:
        """What the pages of a task hold, for each layer the numbers of its tokens."""
        rows = self.block(task.sequence.pages, range(self.layers))
        return [row[: len(task.sequence.token_ids)] for row in rows]

    def picture(self) -> str:
        """All that a region that only chooses must leave as it is."""
        tasks = [
            (task.id, task.out, task.copied, task.written, task.problem, task.sequence)
            for task in self.state.tasks.values()
        ]
        stages = [self.state.prefilling, self.state.storing, self.state.drawing, self.state.swapping]
        names = [[task.id for task in stage] for stage in stages]
        return repr((tasks, names, self.state.staging.halves))


def told(group: WriteGroup) -> dict[str, Any]:
    """What a test hears of a group."""
    return {
        "half": group.half,
        "job": group.job[0],
        "first": group.first,
        "places": list(group.places),
        "pages": list(group.pages),
        "numbers": list(group.numbers),
        "behind": group.behind,
    }


# ------------------------------------------------------------------------------------------- 6b


def writes(inputs: dict[str, Any]) -> dict[str, Any]:
    """Choose groups once. Tells them, the halves that are left, and what the pool has after them."""
    rank, halves = Rank(inputs), list(inputs["halves"])
    before = rank.picture()
    groups = next_writes(rank.state, [rank.task[name] for name in inputs["asked"]], halves)
    pool: dict[str, Rows] = {}
    for group in groups:
        pool |= {place: rank.block(pages, range(rank.layers)) for place, pages in rank.blocks_of(group)}
    return {
        "groups": [told(group) for group in groups],
        "halves": halves,
        "pool": pool,
        "changed": rank.picture() != before,
    }


def stored(inputs: dict[str, Any]) -> dict[str, Any]:
    """Compute a prompt chunk by chunk, and store it beside that. A transfer takes `line_steps` steps.

    Tells when each step has begun to write, when the prompt was computed, and when all of it was in the pool.
    """
    rank = Rank(inputs)
    state, task = rank.state, rank.task[inputs["asked"][0]]
    flying: list[tuple[int, WriteGroup, dict[str, Rows]]] = []
    pool: dict[str, Rows] = {}
    begun, computed_at, problem = [], 0, ""
    for step in range(1, MOST_STEPS):
        for one in [one for one in flying if one[0] <= step]:
            flying.remove(one)
            pool |= one[2]
            state.staging.free(one[1].half)
            task.written += len(one[1].places)
        if computed_at and task.written >= len(task.out):
            break
        halves = state.staging.free_halves(0.0)
        groups = next_writes(state, state.writing, halves) + next_writes(state, state.prefilling, halves)
        for group in groups:
            if state.staging.halves[group.half] is not None:
                problem = problem or f"step {step} writes through half {group.half}, which is in use"
            state.staging.halves[group.half] = HalfUse("writing", task, group.first, len(group.places))
            blocks = {place: rank.block(pages, range(rank.layers)) for place, pages in rank.blocks_of(group)}
            flying.append((step + inputs["line_steps"], group, blocks))
            task.copied += len(group.places)
            begun.append([step, group.half, group.first, len(group.places)])
        if task in state.prefilling:
            end = min(task.sequence.num_computed + inputs["chunk_tokens"], len(task.sequence.token_ids))
            rank.compute(task, range(task.sequence.num_computed, end))
            task.sequence.num_computed = end
            if end == len(task.sequence.token_ids):
                computed_at = step
                state.prefilling.remove(task)
                state.storing.append(task)
    return {"begun": begun, "computed_at": computed_at, "ended_at": step, "pool": pool, "problem": problem}


# ------------------------------------------------------------------------------------------- 6c


def behind(inputs: dict[str, Any]) -> dict[str, Any]:
    """Choose groups that leave behind a pass, and do the pass: each layer leaves when it is computed.

    chunks: [task, first token, tokens, whether it is of a prompt, whether it draws]; writes: [task, blocks].
    """
    rank, halves = Rank(inputs), list(inputs["halves"])
    chunks = [
        Chunk(
            rank.task[name].id, range(first, first + count), first, (),
            (Draw(None, (), 0, frozenset()),) if draws else (), prompt,
        )
        for name, first, count, prompt, draws in inputs["chunks"]
    ]  # fmt: skip
    others = [
        WriteGroup(9, (), [f"{name}:begun"] * count, rank.task[name].id, rank.task[name].copied)
        for name, count in inputs["writes"]
    ]
    before, Books.asked = rank.picture(), 0
    groups = next_behind(rank.state, chunks, others, halves)
    asked, changed = Books.asked, rank.picture() != before
    pool: dict[str, Rows] = {}
    early = [place for group in groups if not group.behind for place in group.places]
    for group in groups:
        if not group.behind:  # it is copied before the pass
            pool |= {place: rank.block(pages, range(rank.layers)) for place, pages in rank.blocks_of(group)}
    for layer in range(rank.layers):
        for chunk in chunks:
            tokens = range(chunk.start, chunk.start + len(chunk.token_ids))
            rank.compute(rank.state.tasks[chunk.job], tokens, [layer])
        for group in groups:
            for place, pages in rank.blocks_of(group):
                if place not in early:
                    pool.setdefault(place, []).extend(rank.block(pages, [layer]))
    return {
        "groups": [told(group) for group in groups],
        "halves": halves,
        "pool": pool,
        "changed": changed,
        "asked": asked,
    }


# ------------------------------------------------------------------------------------------- 6e


class Reader:
    """A rank that loads the blocks of its first task. Some transfers fail: {number of the transfer: how}."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.rank = Rank(inputs)
        self.state, self.now = self.rank.state, 0.0
        self.task = next(iter(self.rank.task.values()))
        self.task.landed = self.task.read = inputs["landed"]
        self.rank.compute(self.task, range(inputs["landed"] * self.rank.block_tokens))
        self.fails: dict[str, str] = inputs["fails"]
        self.halves: dict[int, dict[str, Rows]] = {}
        self.reads: list[list[int]] = []
        self.said: list[list[Any]] = []

    def stage(self) -> str:
        """Where the task is."""
        state, task = self.state, self.task
        if task.id not in state.tasks:
            return "gone"
        if task is state.loading:
            return "loading"
        stages = {"prefilling": state.prefilling, "running": state.running, "storing": state.storing}
        found = [name for name, tasks in stages.items() for one in tasks if one is task]
        return " and ".join(found) or "nowhere"

    def bytes_of(self, places: Sequence[str], how: str) -> dict[str, Rows]:
        """What a transfer brings: the KV of the pool, or something else in one layer of the last block."""
        if how == "lost":
            return {}
        blocks = {place: [list(row) for row in self.rank.pool[place]] for place in places}
        if how == "bad":
            blocks[places[-1]][self.rank.layers // 2] = [BAD] * self.rank.block_tokens
        return blocks

    def load(self) -> None:
        """Go on step by step until the task does not load any more."""
        for _ in range(MOST_STEPS):
            if self.task is not self.state.loading:
                return
            halves = self.state.staging.free_halves(self.now)
            reads = next_reads(self.state, self.task, self.task.read, halves)
            step = Step(self.now, reads=tuple(reads), lands=tuple(next_lands(self.state)))
            begin(self.state, step)
            ended = []
            for read in step.reads:
                how = self.fails.get(str(len(self.reads)), "")
                self.reads.append([read.first, len(read.places)])
                self.halves[read.half] = self.bytes_of(read.places, how)
                ended.append(TransferEnded(read.half, how, bad=[read.places[-1]] if how == "bad" else []))
            for land in step.lands:
                self.put_down(land.half, land.pages, range(self.rank.layers))
            self.on(Result(step, halves=ended))

    def put_down(self, half: int, pages: Sequence[int], layers: Sequence[int]) -> None:
        """Copy the blocks of a half into pages."""
        size = self.rank.block_tokens // self.rank.page_tokens
        for number, rows in enumerate(self.halves[half].values()):
            self.rank.put(pages[size * number : size * (number + 1)], rows, layers)

    def load_by_layers(self, how: str, layer: int) -> None:
        """Do the first pass, beside which the blocks come in. In this layer the load fails, if it does."""
        state, task = self.state, self.task
        task.by_layers = True
        task.sequence.num_computed = min(task.to_load * state.block_tokens, task.most_reused)
        if state.loading is task:
            state.loading = None
        state.prefilling.append(task)
        _, ahead = next_ahead(state, state.staging.free_halves(self.now))
        assert ahead is not None, "the test itself lacks a half"
        step = Step(self.now, ahead=ahead)
        begin(state, step)
        self.reads.append([task.landed, len(ahead.places)])
        self.halves[0] = self.bytes_of(ahead.places, how)
        self.put_down(0, ahead.pages, range(layer if how else self.rank.layers))
        bad = [ahead.places[-1]] if how == "bad" else []
        self.on(Result(step, lost=TransferEnded(0, how, how == "lost", bad) if how else None))

    def on(self, result: Result) -> None:
        """Apply the result of a step."""
        self.now += 1.0
        self.tell(on(self.state, result, self.now))

    def tell(self, outcomes: Iterable[Any]) -> None:
        """Note outcomes: their names, and what the tests look at."""
        for one in outcomes:
            words = {"Prefetched": "blocks", "Loaded": "blocks", "Failed": "reason"}
            name = type(one).__name__
            self.said.append([name, getattr(one, words[name])] if name in words else [name])

    def seen(self) -> dict[str, Any]:
        """What the tests hear. A prompt in its stage computes what it has not, so that its pages are full."""
        problem, stage, task = "", self.stage(), self.task
        try:
            self.state.check()
        except (AssertionError, KeyError) as error:
            problem = f"{type(error).__name__} {error}".strip()
        computed_from = task.sequence.num_computed
        if stage == "prefilling":
            self.rank.compute(task, range(computed_from, len(task.sequence.token_ids)))
        return {
            "stage": stage,
            "computed_from": computed_from,
            "reads": self.reads,
            "said": self.said,
            "failed_reads": task.failed_reads,
            "by_layers": task.by_layers,
            "loading": self.state.loading is not None,
            "kv": self.rank.kv_of(task) if task.sequence.pages else [],
            "problem": problem,
        }


def load(inputs: dict[str, Any]) -> dict[str, Any]:
    """Load the blocks of a task. Tells what became of it, and what its pages hold when it is computed.

    landed     blocks that are in its pages from the beginning
    by_layers  ["", 0], or how the load by layers fails and in which layer; None: it is no load by layers
    waits      blocks that were read before, and wait in a half, when a transfer that began after them
               fails for the last time; 0: the load is played from the beginning
    """
    reader = Reader(inputs)
    if inputs["by_layers"] is not None:
        reader.load_by_layers(*inputs["by_layers"])
    elif inputs["waits"]:
        state, task, count = reader.state, reader.task, inputs["waits"]
        places = task.job.load[task.landed : task.landed + count]
        reader.halves[0] = reader.bytes_of(places, "")
        state.staging.occupy(0, HalfUse("landed", task, task.landed, count))
        first = task.landed + count
        task.read, task.failed_reads = min(first + state.staging.half_blocks, task.to_load), 1
        reader.tell(progress._read_failed(state, task, first, "lost", 0.0))
    reader.load()
    return reader.seen()


CALLS = {"writes": writes, "stored": stored, "behind": behind, "load": load}
