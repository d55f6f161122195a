"""Moves of blocks: which groups are read from the pool, put into pages, and written to the pool next."""

from __future__ import annotations

from scheduler.instance.state import State
from scheduler.instance.step import LandGroup, ReadGroup, SaveBlock, WriteGroup, WritePut
from scheduler.instance.task import Task


def next_writes(state: State, free_halves: list[int]) -> list[WriteGroup]:
    """Choose the groups to be stored next, oldest job first, as many as there are free halves.

    Takes the halves out of free_halves.
    """
    groups = []
    for task in state.storing:
        places, begin = task.job.store, task.copied
        while free_halves and begin < len(places) and not task.problem:
            group = places[begin : begin + state.staging.half_blocks]
            first = len(task.job.load) + begin
            pages = state.block_pages(task, first, len(group))
            groups.append(WriteGroup(free_halves.pop(0), pages, group, task.job.id, begin))
            begin += len(group)
    return groups


def next_reads(state: State, task: Task | None, free_halves: list[int]) -> list[ReadGroup]:
    """Choose the group of the loading task to be read next: one at a time.

    While it flies, the group before it is put into pages.
    """
    if task is None or not free_halves or task.read == len(task.job.load):
        return []
    if any(use is not None and use.kind == "reading" and use.task is task for use in state.staging.halves):
        return []
    group = task.job.load[task.read : task.read + state.staging.half_blocks]
    return [ReadGroup(free_halves.pop(0), group, task.job.id, task.read)]


def next_lands(state: State) -> list[LandGroup]:
    """List the halves whose blocks have arrived and must be copied into pages."""
    return [
        LandGroup(half, use.count, state.block_pages(use.task, use.first, use.count), use.task.job.id)
        for half, use in enumerate(state.staging.halves)
        if use is not None and use.kind == "landed" and use.task is not None
    ]


def next_saves(state: State) -> list[SaveBlock]:
    """Give staging slots to the blocks that have just become full, as long as slots are free."""
    slots = list(state.staging.free_slots)
    saves = []
    for task in state.filled:
        sequence, size = task.sequence, state.block_tokens
        index = sequence.num_computed // size - 1
        token_ids = tuple(sequence.token_ids[index * size : (index + 1) * size])
        pages = state.block_pages(task, index, 1)
        saves.append(SaveBlock(task.job.id, index, token_ids, pages, slots.pop() if slots else None))
    return saves


def next_puts(state: State) -> list[WritePut]:
    """List the offers whose places are known and whose blocks must be written."""
    return [
        WritePut(number, tuple(put.slots), tuple(put.places))
        for number, put in state.puts.items()
        if put.places is not None and not put.flying
    ]
