"""Continuous batching: choose the sequences that begin, and the tokens of the next forward pass.

Called by `planner.next_step` before every iteration. Orca (Yu et al., OSDI 2022, section 3.1) schedules by
iteration: a sequence joins and leaves the batch between two forward passes, and never waits for the longest
sequence of its batch. Explained in docs/explain/batching.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from scheduler.instance.chunked import chunk_sizes, even_budget, whole_prompts
from scheduler.instance.job import DECODE, PREFILL
from scheduler.instance.pages import PageDraft
from scheduler.instance.state import State
from scheduler.instance.step import Admission, Chunk, Growth
from scheduler.instance.task import Task


def next_admissions(state: State, draft: PageDraft) -> list[Admission]:
    """Choose the waiting jobs that begin: first come, first served, and none passes another.

    A job begins when there are pages for all of its tokens, besides those that the running batch needs next.
    Pages of this rank that hold its leading tokens are shared. One job at a time loads blocks from the pool.
    No job waits for the blocks of an earlier one to be stored. A prefetch that finds no pages begins without,
    and so ends at once: nothing waits for it, and it waits for nothing.
    """
    limits, chosen = state.limits, list[Admission]()
    if not state.waiting:
        return chosen
    loading, active, prefills = state.loading is not None, state.num_active, state.num_prefills
    reserved = state.num_next_pages()
    for task in state.waiting:
        sequences = 0 if task.is_prefetch else len(task.branches)
        prefill = PREFILL in task.job.duties
        if (active and active + sequences > limits.sequences) or (prefill and prefills >= limits.prefills):
            break
        match = _match(state, task, draft)
        loads = task.job.reads and state.blocks_in(match) < len(task.job.load)
        if loads and loading:
            break
        needed = state.pages.needed(len(task.sequence.token_ids))
        pages = draft.keep_and_take(match, needed, leave=reserved)
        if pages is None and task.is_prefetch:
            pages, loads = ((), ()), False
        if pages is None:
            break
        shared, taken = pages
        by_layers = loads and _by_layers(state, task, shared)
        chosen.append(Admission(task.id, shared + taken, len(shared), loads, by_layers))
        loading = loading or (loads and not by_layers)
        active, prefills = active + sequences, prefills + prefill
    return chosen


def _by_layers(state: State, task: Task, shared: Seq[int]) -> bool:
    """Tell whether the blocks that a task loads come in by layers: one layer of all fits into a half.

    Not where the rank decodes: its running batch would wait for them.
    """
    if DECODE in state.duties:
        return False
    limits, count = state.limits, len(task.job.load) - state.blocks_in(shared)
    return bool(limits.layers) and limits.least <= count <= state.staging.half_blocks * limits.layers


def _match(state: State, task: Task, draft: PageDraft) -> tuple[int, ...]:
    """Find pages of this rank that hold the task's leading tokens.

    If blocks from the pool follow them, the pages are those of whole blocks: a block is loaded whole, and may
    not be written into pages that others use.
    """
    pages = draft.not_evicted(state.match(task))
    blocks = state.blocks_in(pages)
    if blocks < len(task.job.load):
        return pages[: blocks * state.block_tokens // state.pages.page_tokens]
    return pages


def next_batch(state: State, draft: PageDraft, ahead: Task | None) -> tuple[list[Growth], list[Chunk]]:
    """Compose one ragged forward pass: a token of every running sequence, then tokens of prompts.

    Prompts get what the running batch leaves of the token budget (chunked.py). Unless stores overlap with
    computing, they wait while blocks are on their way to the pool. Prompts whose prefix comes in by layers
    wait for both halves, but for `ahead`, which has them.

    `preemption.to_preempt` has made sure that there are pages for the tokens of the running batch, or
    will be: a sequence without one waits until another is swapped out.
    """
    grow: list[Growth] = []
    chunks: list[Chunk] = []
    left: Counter[int] = Counter()  # users that leave a shared page in this step
    for task in state.running:
        needed, copied = state.next_pages(task, left)
        if state.swapping and needed > draft.num_available:
            continue
        pages = task.sequence.pages
        if needed:
            new = draft.take(needed)
            assert new is not None, "an iteration without pages for its tokens"
            grow.append(Growth(task.id, new, copied[0] if copied else None))
            pages = [*pages[: len(pages) - len(copied)], *new]
            left.update(copied)
        chunks.append(_chunk(task, 1, pages, prompt=False))
    if state.limits.overlaps or not state.writing:
        prompts = [
            task for task in state.prefilling if not task.problem and (task is ahead or not task.by_layers)
        ]
        wanted = [task.sequence.num_uncomputed for task in prompts]
        share = chunk_sizes if state.limits.chunked else whole_prompts
        budget = max(1, state.limits.tokens - len(chunks))
        if state.limits.even and prompts:
            budget = even_budget(budget, prompts[0].sequence.num_computed, state.limits.even)
        sizes = share(budget, wanted)
        chunks += [_chunk(task, size, task.sequence.pages) for task, size in zip(prompts, sizes) if size]
    return grow, chunks


def _chunk(task: Task, size: int, pages: Seq[int], *, prompt: bool = True) -> Chunk:
    """Make the chunk of a task's next `size` tokens. Its next token is drawn when none are left."""
    sequence = task.sequence
    start = sequence.num_computed
    end = start + size
    ids = sequence.token_ids[start:end]
    draws = task.draws() if end == len(sequence.token_ids) else ()
    assert prompt or draws, f"{task.id} runs with {sequence.num_uncomputed} tokens to compute"
    return Chunk(task.id, ids, start, tuple(pages), draws, prompt, task.score(start, end) if prompt else None)
