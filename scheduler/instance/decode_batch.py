"""The running batch: every job in it gets its next token in each iteration."""

from __future__ import annotations

from scheduler.instance.job import JobId
from scheduler.instance.pages import PageDraft
from scheduler.instance.state import State
from scheduler.instance.step import Chunk

Growth = tuple[JobId, tuple[int, ...]]
"""(job, pages that its sequence needs in addition)."""


def decode_chunks(state: State, draft: PageDraft) -> tuple[list[Growth], list[Chunk]]:
    """Make the next iteration: one token for every job of the running batch.

    Computes the KV of each sequence's last token. `preemption.to_preempt` has made sure that there are
    pages for these tokens.
    """
    grow: list[Growth] = []
    chunks: list[Chunk] = []
    for task in state.running:
        sequence = task.sequence
        pages = tuple(sequence.pages)
        missing = state.pages.needed(len(sequence.token_ids)) - len(pages)
        if missing > 0:
            more = draft.take(missing)
            assert more is not None, "an iteration without pages for its tokens"
            grow.append((task.job.id, more))
            pages += more
        last = (sequence.token_ids[-1],)
        start = len(sequence.token_ids) - 1
        assert sequence.num_computed == start, (
            f"{task.job.id} runs with {start - sequence.num_computed} to compute"
        )
        chunks.append(Chunk(task.job.id, last, start, pages, task.draw, prompt=False))
    return grow, chunks
