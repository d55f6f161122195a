"""Moves of blocks: the next groups to read from the pool, to put into pages, and to write to the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from scheduler.instance.job import JobId
from scheduler.instance.state import State
from scheduler.instance.step import Chunk, LandGroup, LayerLoad, ReadGroup, SaveBlock, WriteGroup, WritePut
from scheduler.instance.task import Task


def next_writes(state: State, tasks: Iterable[Task], free_halves: list[int]) -> list[WriteGroup]:
    """Choose the groups of blocks that leave next, while steps go on: as many as there are free halves.

        tasks         whose blocks leave, in this order; nothing of them is changed
        free_halves   numbers of the halves that no other group uses. Each group takes the first one out: when
                      none is left, the other blocks wait in their pages

    `task.out` lists the blocks that a task writes, as (number in its sequence, place). Those before
    `task.copied` have begun to leave. Of a task in `state.prefilling` only blocks whose tokens are all
    computed may leave. The first len(task.job.load) blocks of its sequence came from the pool; those of
    `task.out` follow. Any other task is complete, one that is swapped out too: all its blocks may leave, also
    the last one, which may not be full. None leaves of a task that has a `problem`.

    A group holds at most `state.staging.half_blocks` blocks of one task, one after the other. A task may
    begin several groups. `first` of a group is the place of its first block in `task.out`, `numbers` are
    those of its blocks. `state.block_pages(task, number, 1)` names the pages of a block.
    """
    # labs:begin 6b
    groups = []
    for task in tasks:
        begin, ready = task.copied, len(task.out)
        if task in state.prefilling:
            full = task.sequence.num_computed // state.block_tokens - len(task.job.load)
            ready = min(full, ready)
        while free_halves and begin < ready and not task.problem:
            group = task.out[begin : min(ready, begin + state.staging.half_blocks)]
            pages = [page for number, _ in group for page in state.block_pages(task, number, 1)]
            numbers, places = zip(*group)
            half = free_halves.pop(0)
            groups.append(WriteGroup(half, pages, list(places), task.id, begin, numbers=numbers))
            begin += len(group)
    return groups
    # labs:end 6b


def next_ahead(state: State, free_halves: list[int]) -> tuple[Task | None, LayerLoad | None]:
    """Choose the prompt whose prefix comes in by layers beside the next pass: the oldest one.

    Takes the halves out of free_halves: it waits until no half is in use, and nothing else may begin to use
    one. It does without a half into which late bytes may come.
    """
    task = next((task for task in state.prefilling if task.by_layers), None)
    if task is None:
        return None, None
    free = tuple(free_halves)
    free_halves.clear()
    if any(state.staging.halves) or not free:
        return None, None
    first, count = task.landed, task.to_load - task.landed
    places, pages = task.job.load[first : task.to_load], state.block_pages(task, first, count)
    return task, LayerLoad(free, places, pages, task.id)


def next_behind(
    state: State, chunks: Iterable[Chunk], writes: Iterable[WriteGroup], free_halves: list[int]
) -> list[WriteGroup]:
    """Choose the last blocks of prompts that leave by layers behind the pass that ends their computing.

        chunks        of the pass. The last chunk of a prompt draws tokens; chunks of the running batch do too
        writes        the other groups of the step: they have begun, and `task.copied` does not know of them
        free_halves   as in `next_writes`

    All blocks of a prompt that have not begun to leave are one group, with `behind`, also those of earlier
    chunks. It uses one half, and the two parts of the half in turn: one part is filled while the other one
    leaves. A part takes some layers of all the blocks, at least one layer of `state.limits.layers`. So a half
    has space for `half_blocks * layers // 2` blocks. A group with more, or with fewer than
    `state.limits.least`, does not leave by layers: `next_writes` chooses its blocks after the pass.

    Returns groups in the order of the chunks, without `numbers`. Other fields: as in `next_writes`.
    """
    # labs:begin 6c
    groups = []
    begun = Counter[JobId]()
    for write in writes:
        begun[write.job] += len(write.places)
    most = state.staging.half_blocks * state.limits.layers // 2
    for chunk in chunks:
        if not (free_halves and chunk.prompt and chunk.draws):
            continue
        task = state.tasks[chunk.job]
        begin = task.copied + begun[task.id]
        last = task.out[begin:]
        if state.limits.least <= len(last) <= most:
            pages = [page for number, _ in last for page in state.block_pages(task, number, 1)]
            places = [place for _, place in last]
            groups.append(WriteGroup(free_halves.pop(0), pages, places, task.id, begin, behind=True))
    return groups
    # labs:end 6c


def next_reads(state: State, task: Task | None, first: int, free_halves: list[int]) -> list[ReadGroup]:
    """Choose the group of the loading task to be read next: one at a time, from block `first` on.

    While it flies, the group before it is put into pages.
    """
    if task is None or not free_halves or first == task.to_load or state.staging.is_reading(task):
        return []
    group = task.job.load[first : min(first + state.staging.half_blocks, task.to_load)]
    return [ReadGroup(free_halves.pop(0), group, task.id, first)]


def next_lands(state: State) -> list[LandGroup]:
    """List the halves whose blocks have arrived and must be copied into pages."""
    return [
        LandGroup(half, use.count, state.block_pages(use.task, use.first, use.count), use.task.id)
        for half, use in enumerate(state.staging.halves)
        if use is not None and use.kind == "landed" and use.task is not None
    ]


def next_saves(state: State) -> list[SaveBlock]:
    """Give staging slots to full blocks that have not been offered to the pool, as long as slots are free.

    The others wait in their pages until slots are free again.
    """
    slots = list(state.staging.free_slots)
    saves: list[SaveBlock] = []
    for task in state.offering():
        full = task.sequence.num_computed // state.block_tokens
        for index in range(task.saved, full):
            if not slots:
                return saves
            saves.append(_save(state, task, index, slots.pop()))
    return saves


def _save(state: State, task: Task, index: int, slot: int) -> SaveBlock:
    start, size = index * state.block_tokens, state.block_tokens
    token_ids = task.sequence.token_ids[start : start + size]
    parent = task.keys[index - 1] if index else None
    pages = state.block_pages(task, index, 1)
    return SaveBlock(task.id, index, token_ids, task.keys[index], parent, pages, slot)


def next_puts(state: State) -> list[WritePut]:
    """List the offers whose places are known and whose blocks must be written."""
    return [
        WritePut(number, tuple(put.slots), tuple(put.places))
        for number, put in state.puts.items()
        if put.places is not None and not put.flying
    ]
