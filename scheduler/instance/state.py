"""The books of one rank: its tasks, their stages, and the pages and slots that they hold. It makes no choice.

Read by the choices (`continuous`, `preemption`, `block_moves`), changed by `planner.begin` and `planner.on`
alone.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, MutableSequence
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from scheduler.instance.job import PREFETCH, PREFILL, Job, JobId
from scheduler.instance.limits import Limits
from scheduler.instance.pages import Pages
from scheduler.instance.prefix import PrefixCache
from scheduler.instance.staging import Staging
from scheduler.instance.step import Step, TransferEnded
from scheduler.instance.task import NewDrafter, Task

Preemption = Literal["recompute", "swap"]
"""The way in which a sequence leaves when pages run out: its KV is computed again, or moved into the pool."""

ANSWER_S = 60.0
"""A question to the pool without an answer for this long was lost, or its answer was.

Any value works that is far above the time of an answer: one that comes later changes nothing.
"""

NextKey = Callable[[Any, int | None, Seq[int]], int]
"""(salt, key of the block before or None for the first, token ids of the block) -> key of the block."""


@dataclass(slots=True)
class Put:
    """Blocks in staging slots that were offered to the pool.

    slots    of the blocks; after the pool's answer, of those that have a place
    sums     checksums of the same blocks, opaque
    asked_at when they were offered
    places   in the pool, None before the answer
    flying   their transfer has begun
    """

    slots: list[int]
    sums: list[Any]
    asked_at: float
    places: list[Any] | None = None
    flying: bool = False


@dataclass(slots=True)
class State:
    """The books of one rank.

        duties         what this rank serves; a job's duties are some of them
        block_tokens   tokens per block of the pool
        limits         how much this rank does at once
        tasks          every task of this rank by the id of its job
        waiting        tasks without pages, in the order of their arrival
        admitted       tasks of the step under way that have nothing to read
        loading        the task whose blocks are being read
        prefilling     tasks whose prompts are being computed, oldest first
        drawing        tasks whose prompts are computed, and whose first tokens come late, oldest first
        storing        tasks whose blocks are being written, oldest first
        running        the running batch, oldest first
        swapping       tasks that give up their pages once the pool has their KV, in the order of preemption
        preemption     what happens to tasks of the running batch when pages run out
        leaving        tasks whose answer is complete, and whose last blocks have to be saved before their end
        new_drafter    makes drafts for sequences of the running batch; None: there are none
        next_key       the pool's chain of keys, for blocks whose key the request did not bring
        prefix         pages of earlier tokens that new sequences may share
        puts           offers to the pool by their number; next_put: the number of the next one
        dropped_puts   full blocks that did not reach the pool
        passed_at      end of the last forward pass; None where no batch has run since
        under_way      the step that has begun and has not ended
        postponed      ends of transfers that concern this step's tasks; they count when it has ended

    Invariant: each task is in exactly one stage, and each half and slot is free or has one user.
    """

    duties: frozenset[str]
    pages: Pages
    staging: Staging
    block_tokens: int
    limits: Limits
    tasks: dict[JobId, Task] = field(default_factory=dict)
    waiting: deque[Task] = field(default_factory=deque)
    admitted: list[Task] = field(default_factory=list)
    loading: Task | None = None
    prefilling: list[Task] = field(default_factory=list)
    drawing: list[Task] = field(default_factory=list)
    storing: list[Task] = field(default_factory=list)
    running: list[Task] = field(default_factory=list)
    swapping: list[Task] = field(default_factory=list)
    preemption: Preemption = "recompute"
    leaving: list[Task] = field(default_factory=list)
    new_drafter: NewDrafter | None = field(default=None, compare=False)
    next_key: NextKey | None = None
    prefix: PrefixCache = field(default_factory=PrefixCache)
    puts: dict[int, Put] = field(default_factory=dict)
    next_put: int = 1
    dropped_puts: int = 0
    passed_at: float | None = None
    under_way: Step | None = None
    postponed: list[TransferEnded] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Tell whether the rank has work to do without another message."""
        flying = any(self.staging.halves) or any(put.places is not None for put in self.puts.values())
        return bool(self.tasks) or flying

    def next_deadline(self, now: float) -> float:
        """Return when to act without a message: an answer is overdue, or a half is free again; or inf."""
        asked = [task.asked_at for task in self.swapping if not task.granted]
        asked += [put.asked_at for put in self.puts.values() if put.places is None]
        free_from = [time for time in self.staging.free_from if time > now] if self.busy else []
        return min([*(time + ANSWER_S for time in asked), *free_from], default=inf)

    def drop_overdue_puts(self, now: float) -> None:
        """Free the slots of offers without an answer. One that comes later changes nothing."""
        for number, put in list(self.puts.items()):
            if put.places is None and put.asked_at + ANSWER_S <= now:
                del self.puts[number]
                self.staging.free_slots += put.slots
                self.dropped_puts += len(put.slots)

    @property
    def num_active(self) -> int:
        """Return the number of sequences that are loaded, prefilled or decoded."""
        prompts = [*self.prefilling, *([self.loading] if self.loading is not None else [])]
        return len(self.running) + sum(task.num_sequences for task in prompts)

    def serves(self, job: Job) -> bool:
        """Tell whether a job's duties are those of this rank."""
        return set() < job.duties <= self.duties | {PREFETCH}

    @property
    def writing(self) -> list[Task]:
        """Return the tasks whose blocks are being written to the pool, oldest first."""
        return [*self.storing, *self.drawing, *(task for task in self.swapping if task.granted)]

    @property
    def num_prefills(self) -> int:
        """Return the number of tasks whose prompts are computed, or will be once their blocks are loaded."""
        loading = self.loading is not None and PREFILL in self.loading.job.duties
        return len(self.prefilling) + loading

    @property
    def num_waiting(self) -> int:
        """Return the number of tasks that wait for pages or for their blocks, without prefetches."""
        waiting = (*self.waiting, *([self.loading] if self.loading is not None else []))
        return sum(not task.is_prefetch for task in waiting)

    def offering(self) -> Iterator[Task]:
        """Yield the tasks that offer the blocks that they fill, those that wait for it to end first."""
        for task in itertools.chain(self.leaving, self.swapping, self.running, self.prefilling):
            if task.job.offers:
                yield task

    def blocks_in(self, pages: Seq[int]) -> int:
        """Return how many whole blocks these pages hold."""
        return len(pages) * self.pages.page_tokens // self.block_tokens

    def block_pages(self, task: Task, first: int, count: int) -> Seq[int]:
        """Return the pages of blocks first .. first+count-1 of a task; the last block may have fewer."""
        per_block = self.block_tokens // self.pages.page_tokens
        pages = self.pages.of_blocks(task.sequence.pages, first, count, self.block_tokens)
        assert len(pages) > (count - 1) * per_block, f"block {first + count - 1} of {task.id} has no page"
        return pages

    def match(self, task: Task) -> tuple[int, ...]:
        """Return pages of this rank that hold a waiting task's leading tokens.

        Continues the task's last match, as far as that holds: a task may wait for many steps.
        """
        known = self.pages.still_cached(task.matched, task.matched_at)
        tokens = task.sequence.token_ids
        task.matched = self.prefix.match(task.chain, tokens, task.most_reused, known)
        task.matched_at = self.pages.num_cached
        return task.matched

    def next_pages(self, task: Task, left: Counter[int]) -> tuple[int, Seq[int]]:
        """Return how many pages a running task needs for its next token, and the page that it leaves.

        left   page -> users that leave it before this task

        A page that other branches use too is copied before the token is written into it (copy on
        write), and left. The last of its users keeps it.
        """
        pages, length = task.sequence.pages, len(task.sequence.token_ids)
        missing = self.pages.needed(length) - len(pages)
        if not missing:
            page = pages[self.pages.index(length - 1)]
            if self.pages.used[page] - left[page] > 1:
                return 1, (page,)
        return missing, ()

    def num_next_pages(self) -> int:
        """Return how many pages the running batch needs for its next tokens."""
        left: Counter[int] = Counter()
        total = 0
        for task in self.running:
            needed, copied = self.next_pages(task, left)
            left.update(copied)
            total += needed
        return total

    def name_blocks(self, task: Task, num_tokens: int) -> None:
        """Continue a task's chain of keys up to its first num_tokens tokens."""
        if task.job.salt is None:
            return
        size = self.block_tokens
        for index in range(len(task.keys), num_tokens // size):
            assert self.next_key is not None, "a rank that reuses blocks needs their keys"
            block = task.sequence.token_ids[index * size : (index + 1) * size]
            task.keys.append(self.next_key(task.job.salt, task.keys[-1] if task.keys else None, block))

    def note_computed(self, task: Task, num_tokens: int) -> None:
        """Note that the KV of a task's first num_tokens tokens is in its pages. Full pages may be shared."""
        sequence = task.sequence
        sequence.num_computed = num_tokens
        self.name_blocks(task, num_tokens)
        self.prefix.insert(task.chain, sequence.token_ids, sequence.pages, num_tokens)

    def fork(self, task: Task) -> list[Task]:
        """Replace a task by one task for each of its branches. They share its pages."""
        if task.forked:
            return [task]
        answers = dict(task.job.answers)
        twins = [task.fork(branch, answers.get(branch, ())) for branch in task.branches]
        for twin in twins:
            self.pages.share(twin.sequence.pages)
        for twin in twins[1:]:  # the first one offers the blocks of the prompt for all of them
            twin.saved = twin.sequence.num_computed // self.block_tokens
        self.remove(task)
        self.tasks |= {twin.id: twin for twin in twins}
        return twins

    def join(self, task: Task, now: float) -> None:
        """Add a task to the running batch."""
        task.joined = now
        self.running.append(task)

    def stop_loading(self) -> None:
        """Take the loading task out of its stage. A group that flies ends in a half that nobody uses."""
        for half in self.staging.of(self.loading):
            use = self.staging.halves[half]
            assert use is not None
            use.task = None
            if use.kind == "landed":
                self.staging.free(half)
        self.loading = None

    def leave(self, task: Task) -> None:
        """Take a task out of its stage."""
        if task is self.loading:
            self.stop_loading()
            return
        next(stage for stage in self._stages if task in stage).remove(task)

    def remove(self, task: Task) -> None:
        """Forget a task whose stage has been left, and free its pages."""
        del self.tasks[task.id]
        self.pages.give_back(task.sequence.pages)
        task.sequence.pages = []

    def check(self) -> None:
        """Assert the invariant."""
        staged = [*itertools.chain(*self._stages), *([] if self.loading is None else [self.loading])]
        assert len(staged) == len(self.tasks), "a task is in no stage, or in two"
        for task in staged:
            assert self.tasks[task.id] is task
            assert self.serves(task.job)
            task.check()
            self._check_pages(task)
        users = Counter(page for task in staged for page in task.sequence.pages)
        users.update(page for use in self.staging.halves if use is not None for page in use.pages)
        assert users == self.pages.used, "the pages count other users than there are"
        self.pages.check()
        self.prefix.check()
        self._check_staging()

    @property
    def _stages(self) -> list[MutableSequence[Task]]:
        """Return the tasks of each stage but `loading`, which has one."""
        working = [self.prefilling, self.drawing, self.storing, self.running]
        return [self.waiting, self.admitted, *working, self.swapping, self.leaving]

    def _check_pages(self, task: Task) -> None:
        """Assert that a task's pages hold what is computed, and that a waiting task has none."""
        sequence = task.sequence
        if task in self.waiting:
            assert sequence.pages == []
        assert self.pages.needed(sequence.num_computed) <= len(sequence.pages) or not sequence.pages

    def _check_staging(self) -> None:
        """Assert that every slot has one user, and that halves are used by tasks that move blocks."""
        used = [slot for put in self.puts.values() for slot in put.slots]
        slots = [*self.staging.free_slots, *used]
        if self.under_way is not None:
            slots += [save.slot for save in self.under_way.saves]
        assert sorted(slots) == list(range(self.staging.num_slots)), "a slot has no user, or two"
        for use in self.staging.halves:
            if use is None or use.task is None:
                assert use is None or use.kind == "reading"
            elif use.kind == "writing":
                assert use.task in self.writing or use.task in self.prefilling
            else:
                assert use.task is self.loading
