"""Continuous batching: which sequences begin, and which tokens the next forward pass computes.

Called by `planner.next_step` before every iteration. Orca (Yu et al., OSDI 2022, section 3.1) schedules by
iteration: a sequence joins and leaves the batch between two forward passes, and never waits for the longest
sequence of its batch. Explained in docs/explain/batching.md.
"""

from __future__ import annotations

from scheduler.instance.chunked import chunk_sizes, whole_prompts
from scheduler.instance.job import PREFILL, JobId
from scheduler.instance.pages import PageDraft
from scheduler.instance.state import State
from scheduler.instance.step import Admission, Chunk
from scheduler.instance.task import Task

Growth = tuple[JobId, tuple[int, ...]]
"""(job, pages that its sequence needs in addition)."""


def next_admissions(state: State, draft: PageDraft) -> list[Admission]:
    """Choose the waiting jobs that begin: first come, first served, and none passes another.

    A job begins when pages for all of its tokens are free. One job at a time loads blocks from the pool. No
    job waits for the blocks of an earlier one to be stored.
    """
    limits = state.limits
    chosen: list[Admission] = []
    loading, active, prefills = state.loading is not None, state.num_active, state.num_prefills
    for task in state.waiting:
        loads, prefill = bool(task.job.load), PREFILL in task.job.duties
        if active >= limits.sequences or (prefill and prefills >= limits.prefills) or (loads and loading):
            break
        pages = draft.take(state.pages.needed(len(task.sequence.token_ids)))
        if pages is None:
            break
        chosen.append(Admission(task.job.id, pages))
        loading, active, prefills = loading or loads, active + 1, prefills + prefill
    return chosen


def next_batch(state: State, draft: PageDraft) -> tuple[list[Growth], list[Chunk]]:
    """Compose one ragged forward pass: a token of every running sequence, then tokens of prompts.

    Prompts get what the running batch leaves of the token budget (chunked.py). They wait while blocks are on
    their way to the pool: a chunk takes much longer than a store, and the decode rank of the job that stores
    would wait for its end.

    `preemption.to_preempt` has made sure that there are pages for the tokens of the running batch.
    """
    grow: list[Growth] = []
    chunks: list[Chunk] = []
    for task in state.running:
        missing = state.pages.needed(len(task.sequence.token_ids)) - len(task.sequence.pages)
        more = draft.take(max(0, missing))
        assert more is not None, "an iteration without pages for its tokens"
        if more:
            grow.append((task.job.id, more))
        chunks.append(_chunk(task, 1, more, prompt=False))
    if not state.storing:
        wanted = [task.sequence.num_uncomputed for task in state.prefilling]
        share = chunk_sizes if state.limits.chunked else whole_prompts
        sizes = share(max(1, state.limits.tokens - len(chunks)), wanted)
        chunks += [_chunk(task, size) for task, size in zip(state.prefilling, sizes) if size]
    return grow, chunks


def _chunk(task: Task, size: int, more_pages: tuple[int, ...] = (), *, prompt: bool = True) -> Chunk:
    """Make the chunk of a task's next `size` tokens. Its next token is drawn when none are left."""
    sequence = task.sequence
    start = sequence.num_computed
    end = start + size
    ids = tuple(sequence.token_ids[start:end])
    draw = task.draw if end == len(sequence.token_ids) else None
    assert prompt or draw is not None, f"{task.job.id} runs with {sequence.num_uncomputed} tokens to compute"
    return Chunk(task.job.id, ids, start, (*sequence.pages, *more_pages), draw, prompt)
