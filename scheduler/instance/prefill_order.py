"""The prefill order: which waiting job begins, and which tokens of its prompt are computed next."""

from __future__ import annotations

from scheduler.instance.pages import PageDraft
from scheduler.instance.state import State
from scheduler.instance.step import Admission, Chunk


def next_admission(state: State, draft: PageDraft) -> Admission | None:
    """Choose the waiting job that begins: first come, first served, one at a time.

    The next job begins when the one before it has been loaded and prefilled, and when pages for all of
    its tokens are free. It does not wait for the blocks of earlier jobs to be stored.
    """
    if not state.waiting or state.loading is not None or state.prefilling is not None:
        return None
    task = state.waiting[0]
    pages = draft.take(state.pages.needed(len(task.sequence.token_ids)))
    return None if pages is None else Admission(task.job.id, pages)


def next_chunk(state: State) -> Chunk | None:
    """Choose the next tokens of the prompt that is being computed: at most chunk_tokens.

    A chunk takes much longer than a store. None begins while blocks are on their way to the pool, because
    the decode rank of the job that stores them would wait for the end of the chunk.
    """
    task = state.prefilling
    if task is None or state.storing:
        return None
    sequence = task.sequence
    start = sequence.num_computed
    end = min(len(sequence.token_ids), start + state.chunk_tokens)
    return Chunk(
        task.job.id,
        tuple(sequence.token_ids[start:end]),
        start,
        tuple(sequence.pages),
        draw=task.draw if end == len(sequence.token_ids) else None,
        prompt=True,
    )
