"""Swap: a preempted task keeps its pages until the pool has its KV, so that no token is computed again.

Called by `progress` and `planner`. Without swap, a preempted task gives up its pages at once and is computed
again later (recomputation). Explained in docs/explain/paged-memory.md.

    running --preempt--> swapping --grant--> blocks are written --swapped--> Swapped: any rank resumes it
                             `-- no space or answer, a failed transfer --> Preempted: it is prefilled again
"""

from __future__ import annotations

from scheduler.instance.events import SwapAnswered
from scheduler.instance.outcomes import Outcome, Preempted, Prefetched, Swapped, SwapWanted
from scheduler.instance.state import ANSWER_S, State
from scheduler.instance.task import Task


def preempt(state: State, task: Task, now: float) -> Outcome:
    """Take a task out of the running batch. To be swapped, it keeps its pages for now. A prefetch ends."""
    if task.is_prefetch:
        state.stop_loading()
        state.remove(task)
        return Prefetched(task.id, 0)
    state.running.remove(task)
    if state.preemption == "recompute":
        return recompute(state, task)
    state.swapping.append(task)
    task.asked_at = now
    computed = task.sequence.num_computed
    keys = task.keys[: computed // state.block_tokens]
    return SwapWanted(task.id, task.sequence.token_ids[:computed], tuple(keys))


def grant(state: State, granted: SwapAnswered) -> list[Outcome]:
    """Write the blocks that the pool has places for. It has the others already."""
    task = state.tasks.get(granted.job)
    if task is None or task not in state.swapping:
        return []  # it was cancelled
    if granted.places is None:
        return [recompute(state, task)]
    task.granted = True
    task.out = [(number, place) for number, place in enumerate(granted.places) if place is not None]
    return [] if task.out else [swapped(state, task)]


def overdue(state: State, now: float) -> list[Outcome]:
    """Give up the KV of tasks whose question has no answer. One that comes later changes nothing."""
    late = [task for task in state.swapping if not task.granted and task.asked_at + ANSWER_S <= now]
    return [recompute(state, task) for task in late]


def swapped(state: State, task: Task) -> Swapped:
    """End a task whose KV is in the pool."""
    if task.job.offers:
        state.dropped_puts += task.sequence.num_computed // state.block_tokens - task.saved
    _leave(state, task)
    return Swapped(task.id, *_so_far(state, task), task.checksums())


def recompute(state: State, task: Task) -> Preempted:
    """End a task whose KV is given up."""
    _leave(state, task)
    return Preempted(task.id, *_so_far(state, task), task.may_still_write)


def _so_far(state: State, task: Task) -> tuple[list[int], int, tuple[int, ...]]:
    """Return prompt and answer, the length of the answer, and the keys of all full blocks."""
    token_ids = task.sequence.token_ids
    state.name_blocks(task, len(token_ids))
    return token_ids[:], task.sequence.answered, tuple(task.keys)


def _leave(state: State, task: Task) -> None:
    if task in state.swapping:
        state.swapping.remove(task)
    state.remove(task)
