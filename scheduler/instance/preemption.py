"""Preemption: which jobs leave the running batch when pages run out. `swap.py` says how they leave."""

from __future__ import annotations

from scheduler.instance.state import State
from scheduler.instance.task import Task


def to_preempt(state: State, num_free: int) -> list[Task]:
    """Choose the jobs that give up their pages, so that the others have one for their next token.

    The youngest job of the batch is preempted first, because it loses the least. A job that runs alone gives
    up its pages too if a job that is loading holds the rest. The pages of jobs that are being swapped out are
    as good as free: the batch waits for them. Returns the jobs in the order of preemption.
    """
    running = state.running
    num_free += sum(map(state.pages_freed_by, state.swapping))
    stay = len(running)
    for index, task in enumerate(running):
        missing = state.pages_for_next_token(task)
        while missing > num_free and index < stay:
            stay -= 1
            num_free += state.pages_freed_by(running[stay])
        if index == stay:
            break
        num_free -= max(0, missing)
    return running[stay:][::-1]
