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

        state   of the rank; `state.waiting` has the jobs in the order of their arrival. Nothing is changed
        draft   chooses pages: `draft.keep_and_take`. What it gives is taken when the step begins. So it
                is asked only for a job that meets all other conditions

    A job begins when all of this holds, counting also the jobs that begin before it in this step:

    - With its own (`task.num_sequences`), at most `state.limits.sequences` sequences are active. There are
      `state.num_active` now. While none is active, the next job begins whatever its number.
    - If it has a prompt to compute (PREFILL), fewer than `state.limits.prefills` prompts are in progress.
      There are `state.num_prefills` now.
    - If it loads blocks from the pool, no other job does: neither `state.loading` nor one that begins before
      it in this step and `loads`, but not `by_layers`. This holds for a prefetch too.
    - There are pages for all of its tokens. Its leading pages may be shared ones, which `_found` finds.
      Besides, as many pages remain available as the running batch needs next: `state.num_next_pages()`.

    A prefetch that finds no pages begins without, and so ends at once: nothing waits for it. Where another
    job may not begin, neither does any job behind it. No job waits for the blocks of an earlier one to be
    stored.

    Returns the admissions, which `_admission` makes, in the order of arrival.
    """
    # labs:begin 5a
    chosen: list[Admission] = []
    if not state.waiting:
        return chosen
    limits, reserved = state.limits, state.num_next_pages()
    active, prefills, loading = state.num_active, state.num_prefills, state.loading is not None
    for task in state.waiting:
        if active and active + task.num_sequences > limits.sequences:
            break
        prefill = PREFILL in task.job.duties
        if prefill and prefills >= limits.prefills:
            break
        shared, loads = _found(state, task, draft)
        if loads and loading:
            break
        needed = state.pages.needed(len(task.sequence.token_ids))
        pages = draft.keep_and_take(shared, needed, leave=reserved)
        if pages is None and not task.is_prefetch:
            break
        chosen.append(_admission(state, task, pages, loads))
        active, prefills = active + task.num_sequences, prefills + prefill
        loading = loading or (chosen[-1].loads and not chosen[-1].by_layers)
    return chosen
    # labs:end 5a


def _admission(
    state: State, task: Task, pages: tuple[tuple[int, ...], tuple[int, ...]] | None, loads: bool
) -> Admission:
    """Make the admission of a job.

    pages   that it shares, and that it takes; None: it is a prefetch that begins without
    loads   blocks from the pool follow the shared pages
    """
    if pages is None:
        return Admission(task.id, ())
    shared, taken = pages
    by_layers = loads and _by_layers(state, task, shared)
    return Admission(task.id, shared + taken, len(shared), loads, by_layers)


def _by_layers(state: State, task: Task, shared: Seq[int]) -> bool:
    """Tell whether the blocks that a task loads come in by layers: one layer of all fits into a half.

    Not where the rank decodes: its running batch would wait for them.
    """
    if DECODE in state.duties:
        return False
    limits, count = state.limits, len(task.job.load) - state.blocks_in(shared)
    return bool(limits.layers) and limits.least <= count <= state.staging.half_blocks * limits.layers


def _found(state: State, task: Task, draft: PageDraft) -> tuple[tuple[int, ...], bool]:
    """Find pages of this rank that hold a waiting job's leading tokens.

    If blocks from the pool follow them, the pages are those of whole blocks: a block is loaded whole, and may
    not be written into pages that others use.

    Returns (pages, whether blocks are to be loaded from the pool).
    """
    pages = draft.not_evicted(state.match(task))
    blocks = state.blocks_in(pages)
    if blocks < len(task.job.load):
        return pages[: blocks * state.block_tokens // state.pages.page_tokens], task.job.reads
    return pages, False


def next_batch(state: State, draft: PageDraft, ahead: Task | None) -> tuple[list[Growth], list[Chunk]]:
    """Compose one ragged forward pass: a token of every running sequence, then tokens of prompts.

        state   of the rank; nothing is changed
        draft   chooses pages, and tells how many are left: `draft.num_available`
        ahead   for `_prompts`

    Each task of `state.running` gets a chunk of 1 token, the oldest first. `state.next_pages` tells how many
    pages it needs for that, and which page it leaves. Pages that are left count for the tasks after it.
    `_grown` chooses the pages. `preemption.to_preempt` has made sure that there are enough, or there will be:
    while tasks are being swapped out, a sequence for whose pages too few are left gets no chunk in this pass.

    After them come the prompts of `_prompts`, in its order. They share what the chunks of the running batch
    leave of `state.limits.tokens`, and at least 1 token, so that a prompt makes progress beside any batch.
    `_level` adjusts this budget to the context of the prompts. `chunk_sizes` shares it; where
    `state.limits.chunked` is false, `whole_prompts` does. A prompt whose share is 0 has no chunk.

    Returns (growths, chunks). `_chunk` makes a chunk.
    """
    # labs:begin 5b
    grow: list[Growth] = []
    chunks: list[Chunk] = []
    left: Counter[int] = Counter()  # users that leave a shared page in this pass
    for task in state.running:
        needed, copied = state.next_pages(task, left)
        if state.swapping and needed > draft.num_available:
            continue
        pages = task.sequence.pages
        if needed:
            growth, pages = _grown(task, draft, needed, copied)
            grow.append(growth)
            left.update(copied)
        chunks.append(_chunk(task, 1, pages, prompt=False))
    prompts = _prompts(state, ahead)
    budget = _level(state, max(1, state.limits.tokens - len(chunks)), prompts)
    share = chunk_sizes if state.limits.chunked else whole_prompts
    sizes = share(budget, [task.sequence.num_uncomputed for task in prompts])
    chunks += [_chunk(task, size, task.sequence.pages) for task, size in zip(prompts, sizes) if size]
    return grow, chunks
    # labs:end 5b


def _grown(task: Task, draft: PageDraft, needed: int, copied: Seq[int]) -> tuple[Growth, list[int]]:
    """Choose `needed` pages for a running sequence. Return its growth, and its pages after that.

    copied   the shared page that it leaves, if any: the new page takes its place
    """
    new = draft.take(needed)
    assert new is not None, "an iteration without pages for its tokens"
    if copied:
        pages = [new[0] if page == copied[0] else page for page in task.sequence.pages]
    else:
        pages = [*task.sequence.pages, *new]
    return Growth(task.id, new, copied[0] if copied else None), pages


def _prompts(state: State, ahead: Task | None) -> list[Task]:
    """List the tasks whose prompts may be computed in the next pass, oldest first.

    Unless stores overlap with computing, prompts wait while blocks are on their way to the pool. Prompts
    whose prefix comes in by layers wait for both halves, but for `ahead`, which has them.
    """
    if not state.limits.overlaps and state.writing:
        return []
    return [task for task in state.prefilling if not task.problem and (task is ahead or not task.by_layers)]


def _level(state: State, budget: int, prompts: list[Task]) -> int:
    """Return the budget of prompts on this rank: a stage of a pipeline shrinks it with their context."""
    if state.limits.even and prompts:
        return even_budget(budget, prompts[0].sequence.num_computed, state.limits.even)
    return budget


def _chunk(task: Task, size: int, pages: Seq[int], *, prompt: bool = True) -> Chunk:
    """Make the chunk of a task's next `size` tokens. Its next token is drawn when none are left."""
    sequence = task.sequence
    start = sequence.num_computed
    end = start + size
    ids = sequence.token_ids[start:end]
    draws = task.draws() if end == len(sequence.token_ids) else ()
    assert prompt or draws, f"{task.id} runs with {sequence.num_uncomputed} tokens to compute"
    return Chunk(task.id, ids, start, tuple(pages), draws, prompt, task.score(start, end) if prompt else None)
