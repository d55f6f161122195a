"""Preemption: choose the jobs that leave the running batch when pages run out. `swap.py` removes them."""

from __future__ import annotations

from collections import Counter

from scheduler.instance.state import State
from scheduler.instance.task import Task


def to_preempt(state: State, num_free: int) -> list[Task]:
    """Choose the jobs that give up their pages, so that the others have one for their next token.

    The youngest job of the batch is preempted first, because it loses the least. A job that runs alone gives
    up its pages too if a job that is loading holds the rest. The pages of jobs that are being swapped out are
    as good as free: the batch waits for them. A prefetch gives way before all others. Returns the jobs in
    the order of preemption.
    """
    running = state.running
    if len(running) <= num_free:
        return []  # a sequence needs one page at most
    left: Counter[int] = Counter()
    num_free += sum(_leave(state, task, left) for task in state.swapping)
    stay = len(running)
    for index, task in enumerate(running):
        needed, copied = state.next_pages(task, left)
        while needed > num_free and index < stay:
            stay -= 1
            num_free += _leave(state, running[stay], left)
            needed, copied = state.next_pages(task, left)
        if index == stay:
            break
        num_free -= needed
        left.update(copied)
    if stay < len(running) and state.loading is not None and state.loading.is_prefetch:
        return [state.loading]
    return running[stay:][::-1]


def _leave(state: State, task: Task, left: Counter[int]) -> int:
    """Let a task leave its pages. Return how many can then be taken: those that have no other user."""
    left.update(task.sequence.pages)
    return sum(left[page] == state.pages.used[page] for page in task.sequence.pages)
