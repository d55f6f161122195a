"""Leaps: a step of the running batch that stands for several steps like it.

Called by `planner.next_step` for a rank whose runner works in virtual time; a live rank never leaps. Between
two events, a batch that only decodes repeats one step: every sequence gets a token, and now and then a page.
A leap is these steps in one, with the same books at its end. A test compares both, event by event.

    step 1     2     3     4  ...
    a    .     .  +page    .              a leap ends with the step that ends an answer, or fills a block;
    b    .     .     .     .  +page       before a step that must evict or copy a page; and as soon as its
                                          runner cuts it short, because something has happened
"""

from __future__ import annotations

from itertools import islice

from msgspec.structs import replace

from scheduler.instance.dealt_pages import DealtPages
from scheduler.instance.state import State
from scheduler.instance.step import Growth, Step
from scheduler.instance.task import Task


def leap(state: State, step: Step, most: int) -> Step:
    """Return a step that stands for up to `most` steps like this one, or the step itself."""
    if most < 2 or not _repeats(state, step):
        return step
    steps = min(most, *(_steps_left(state, task) for task in state.running))
    if steps < 2:
        return step
    growths = _later_growths(state, step, steps)
    first = len(step.grow) + sum(len(one.pages) - one.shared for one in step.admit)
    taken, free = len(growths), len(state.pages.free) - first
    if taken > free:  # the first of the others would evict a page
        steps, taken = growths[free][0] - 1, free
        if steps < 2:
            return step
    pages = islice(reversed(state.pages.free), first, first + taken)
    later = tuple(
        (number, Growth(state.running[index].id, (page,)))
        for (number, index), page in zip(growths, pages)
        if number <= steps
    )
    return replace(step, steps=steps, later=later)


def _repeats(state: State, step: Step) -> bool:
    """Tell whether the next step would be like this one if nothing happened."""
    moves = step.evict or step.preempt or step.lands or step.writes or step.saves
    if not step.chunks or moves or len(step.chunks) != len(state.running):
        return False
    if state.new_drafter is not None or isinstance(state.pages, DealtPages):
        return False  # of dealt pages, any page of a row may have to be copied in any step
    if any(not one.loads or one.by_layers for one in step.admit):
        return False
    if state.prefilling or state.storing or state.swapping or state.leaving:
        return False
    if any(growth.copies is not None for growth in step.grow):
        return False
    # Until the group that is on its way has arrived, no other one begins.
    return state.loading is None or bool(step.reads) or state.staging.is_reading(state.loading)


def _steps_left(state: State, task: Task) -> int:
    """Return the number of the step that ends this task's answer by its length, or that fills a block."""
    sequence = task.sequence
    left = min(sequence.max_tokens - sequence.answered, sequence.max_len - len(sequence.token_ids))
    if task.job.salt is None:
        return left
    computed, shared = sequence.num_computed, state.prefix.unit_tokens
    if computed >= shared:
        last = computed // shared * shared // state.pages.page_tokens - 1
        if sequence.pages[last] not in state.pages.cached:
            return 1  # the cache was cleared: the next step brings its blocks in
    unit = min(state.block_tokens, shared)
    return min(left, unit - computed % unit)


def _later_growths(state: State, step: Step, steps: int) -> list[tuple[int, int]]:
    """List (number of the step, index of the sequence) of each page that steps 2, 3, ... need, in order."""
    grown = {growth.job for growth in step.grow}
    size, found = state.pages.page_tokens, []
    for index, task in enumerate(state.running):
        held = len(task.sequence.pages) + (task.id in grown)
        first = held * size - len(task.sequence.token_ids) + 2
        found += [(number, index) for number in range(first, steps + 1, size)]
    return sorted(found)
