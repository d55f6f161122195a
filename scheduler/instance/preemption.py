"""Preemption: choose the jobs that leave the running batch when pages run out. `swap.py` removes them."""

from __future__ import annotations

from collections import Counter

from scheduler.instance.state import State
from scheduler.instance.task import Task


def to_preempt(state: State, num_free: int) -> list[Task]:
    """Choose the jobs that give up their pages, so that the others have one for their next token.

        state      of the rank; nothing is changed
        num_free   pages that the running batch can take

    `state.next_pages` tells how many pages a running job needs, and which page it leaves. `_leave` tells how
    many pages can be taken once a job has left its own. Both read `left`, which says how many users have left
    each page, and `_leave` adds to it.

    The youngest job of the batch is preempted first, because it loses the least, and no more jobs than must
    be. A job that runs alone gives up its pages too if a job that is loading holds the rest. The pages of
    jobs that are being swapped out (`state.swapping`) are as good as free: the batch waits for them. A
    prefetch that is loading gives way before all others, and then alone, even if its pages do not suffice.

    Returns the jobs in the order of preemption; empty when there are pages enough.
    """
    # labs:begin 5d
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
    # labs:end 5d


def _leave(state: State, task: Task, left: Counter[int]) -> int:
    """Let a task leave its pages. Return how many can then be taken: those that have no other user."""
    left.update(task.sequence.pages)
    return sum(left[page] == state.pages.used[page] for page in task.sequence.pages)
