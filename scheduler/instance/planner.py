"""The planner of one rank: `next_step` decides, `begin` reserves, `on` applies.

Called by computing ranks, live or simulated, and by `mooncake-lite generate`: a loop around a runner. It
reads no clock and moves no byte; it knows page numbers, staging numbers and opaque tokens.
"""

from __future__ import annotations

from scheduler.instance import block_moves
from scheduler.instance.continuous import next_admissions, next_batch
from scheduler.instance.drafts import with_drafts
from scheduler.instance.events import Arrived, Cancelled, Event, Forgotten, Granted, Moved, SwapAnswered
from scheduler.instance.job import DECODE, Job
from scheduler.instance.leap import leap
from scheduler.instance.outcomes import Ended, Failed, Outcome, Prefetched
from scheduler.instance.pages import PageDraft
from scheduler.instance.preemption import to_preempt
from scheduler.instance.progress import apply, moved
from scheduler.instance.staging import HalfUse
from scheduler.instance.state import State
from scheduler.instance.step import Admission, Chunk, Growth, Result, Step
from scheduler.instance.swap import grant
from scheduler.instance.task import Task


def next_step(state: State, now: float, most: int = 1) -> Step:
    """Decide what the rank does next. The state stays as it is, but waiting tasks remember their matches, and
    drafters what they have read.

    most   forward passes that the step may stand for; more than 1 only for runners in virtual time

    Copies from staging into pages, and of blocks that decode has filled, are short, and a job or the pool
    waits for each of them: they come before the next forward pass.
    """
    draft = PageDraft(state.pages, state.prefix)
    halves = state.staging.free_halves(now)
    task, ahead = block_moves.next_ahead(state, halves)
    admit = next_admissions(state, draft)
    writes = block_moves.next_writes(state, state.writing, halves)
    lands, saves = block_moves.next_lands(state), block_moves.next_saves(state)
    reads, puts = block_moves.next_reads(state, *_loading(state, admit), halves), block_moves.next_puts(state)
    if state.limits.overlaps:
        writes += block_moves.next_writes(state, state.prefilling, halves)
    preempted: list[Task] = []
    grow: list[Growth] = []
    chunks: list[Chunk] = []
    if not (lands or saves):
        preempted = to_preempt(state, draft.num_available)
        if not preempted:
            grow, chunks = next_batch(state, draft, task)
            chunks = with_drafts(state, chunks)
    if ahead is not None and all(chunk.job != ahead.job for chunk in chunks):
        ahead = None
    if state.limits.layers:
        writes += block_moves.next_behind(state, chunks, writes, halves)
    step = Step(
        now,
        tuple(admit),
        draft.evicted,
        tuple([task.id for task in preempted]),
        tuple(grow),
        tuple(reads),
        tuple(lands),
        tuple(writes),
        tuple(saves),
        tuple(puts),
        ahead,
        tuple(chunks),
    )
    return leap(state, step, most) if chunks else step


def _loading(state: State, admit: list[Admission]) -> tuple[Task | None, int]:
    """Return the task that loads, perhaps one that begins in this step, and its next block to be read."""
    if state.loading is not None:
        return state.loading, state.loading.read
    for admission in admit:
        if admission.loads and not admission.by_layers:
            return state.tasks[admission.job], state.blocks_in(admission.pages[: admission.shared])
    return None, 0


def begin(state: State, step: Step) -> None:
    """Reserve what a step needs: pages, halves and slots. The next event has to be its result."""
    assert state.under_way is None, "the step before has not ended"
    state.under_way = step
    state.prefix.drop(step.evict)
    for admission in step.admit:
        _admit(state, admission, step.now)
    for growth in step.grow:
        _grow(state, growth)
    for group in step.reads:
        task, count = state.tasks[group.job], len(group.places)
        state.staging.occupy(group.half, HalfUse("reading", task, group.first, count))
        task.read += count
    for out in step.writes:
        task, count = state.tasks[out.job], len(out.places)
        pages = () if task in state.swapping else out.pages
        state.pages.share(pages)
        state.staging.occupy(out.half, HalfUse("writing", task, out.first, count, pages))
        task.copied += count
    state.staging.take_slots([save.slot for save in step.saves])
    for put in step.puts:
        state.puts[put.put].flying = True


def on(state: State, event: Event | Result, now: float) -> list[Outcome]:
    """Apply an event. Return the outcomes, in order."""
    if isinstance(event, Result):
        assert state.under_way is event.step, "a result of another step"
        state.under_way = None
        return apply(state, event, now)
    if isinstance(event, Moved):
        return moved(state, event, now)
    assert state.under_way is None, "a step is under way"
    if isinstance(event, Arrived):
        return _arrive(state, event.job)
    if isinstance(event, Cancelled):
        return _cancel(state, event)
    if isinstance(event, Forgotten):
        state.prefix.clear()
        return []
    if isinstance(event, SwapAnswered):
        return grant(state, event)
    assert isinstance(event, Granted)
    return _grant(state, event)


def _admit(state: State, admission: Admission, now: float) -> None:
    task = state.waiting.popleft()
    assert task.id == admission.job
    task.load_began = now
    shared, taken = admission.pages[: admission.shared], admission.pages[admission.shared :]
    state.pages.share(shared)
    state.pages.take(taken)
    task.sequence.pages += admission.pages
    task.matched = ()
    task.shared = min(len(shared) * state.pages.page_tokens, task.most_reused)
    task.read = task.landed = min(state.blocks_in(shared), len(task.job.load))
    if admission.loads and not admission.by_layers:
        assert state.loading is None, f"{state.loading} is loading"
        state.loading = task
        return
    task.by_layers = admission.by_layers
    task.to_load = task.to_load if task.by_layers else task.landed
    state.admitted.append(task)


def _grow(state: State, growth: Growth) -> None:
    sequence = state.tasks[growth.job].sequence
    copied = state.pages.grow(sequence.pages, len(sequence.token_ids), growth.pages)
    assert copied == growth.copies, f"page {copied} is copied, and the step copies page {growth.copies}"


def _arrive(state: State, job: Job) -> list[Outcome]:
    """Queue a job. A job that can never have enough pages fails at once."""
    task = Task.of(job)
    num_tokens = len(task.sequence.token_ids)
    if task.is_prefetch and (task.id in state.tasks or num_tokens < state.prefix.unit_tokens):
        return []
    said = _drop_prefetches(state, job)
    assert task.id not in state.tasks, f"{task.id} is here already"
    assert state.serves(job), f"{job.id}: {set(job.duties)} of {set(state.duties)}"
    needed = state.pages.needed(num_tokens)
    if needed > state.pages.num_pages and not task.is_prefetch:
        reason = f"{needed} KV pages are needed, the rank has {state.pages.num_pages}"
        return [Failed(task.id, reason, for_good=True)]
    state.name_blocks(task, num_tokens)
    state.tasks[task.id] = task
    ahead = [other for other in state.waiting if task.is_prefetch or not other.is_prefetch]
    state.waiting.insert(len(ahead), task)  # prefetches wait behind all others
    return said


def _drop_prefetches(state: State, job: Job) -> list[Outcome]:
    """End the prefetches of a request that wait, because a longer one or the request itself has come."""
    old = [task for task in state.waiting if task.is_prefetch and task.id[:2] == job.id[:2]]
    return [outcome for task in old for outcome in _cancel_task(state, task)]


def _cancel(state: State, event: Cancelled) -> list[Outcome]:
    """End the tasks of a job, or of one branch, at once, unless their blocks are on their way to the pool.

    A load drops its remaining groups. The end is told now, although a group may still be flying: its bytes
    come into a half that this rank alone uses, and that is free when the transfer has ended. Pages, leases
    and the place in the batch need not wait for that.

    A task that stores, or whose first token comes late, goes on: its blocks are of use to other requests, and
    its places in the pool may not be given away while they are written. The latter holds for a swap, too.
    """
    job, branch = (event.request_id, event.attempt), event.branch
    tasks = [task for task in state.tasks.values() if task.id[:2] == job]
    said: list[Outcome] = []
    for task in tasks:
        if branch is None or task.branches == [branch]:
            said += _cancel_task(state, task)
        elif branch in task.branches and DECODE in task.job.duties:
            task.dropped.add(branch)
            said.append(Ended(task.id._replace(branch=branch), "cancelled", task.sequence.answered))
    return said


def _cancel_task(state: State, task: Task) -> list[Outcome]:
    if task in state.writing or task in state.leaving:
        return []
    prefills = task in state.prefilling
    state.leave(task)
    if prefills and state.staging.of(task):  # its places in the pool are being written
        state.storing.append(task)
        task.problem = "cancelled"
        return []
    state.remove(task)
    if task.is_prefetch:
        return [Prefetched(task.id, 0)]
    branches = task.branches if DECODE in task.job.duties else task.branches[:1]
    return [
        Ended(task.id._replace(branch=branch), "cancelled", task.sequence.answered) for branch in branches
    ]


def _grant(state: State, granted: Granted) -> list[Outcome]:
    """Keep the blocks that have a place, and free the slots of the others."""
    put = state.puts.get(granted.put)
    if put is None or put.places is not None:
        return []
    wanted = [place is not None for place in granted.places]
    state.staging.free_slots += [slot for slot, keep in zip(put.slots, wanted) if not keep]
    put.slots = [slot for slot, keep in zip(put.slots, wanted) if keep]
    put.sums = [sums for sums, keep in zip(put.sums, wanted) if keep]
    put.places = [place for place in granted.places if place is not None]
    if not put.places:
        del state.puts[granted.put]
    return []
