"""Drafts: tokens that a sequence may say next, computed in the same pass as its last token.

Called by `planner.next_step` once the pass is composed, and by `progress` with the tokens drawn. Speculative
decoding as in Leviathan et al. (ICML 2023), but without a model that drafts: `lookup.py` copies drafts from
the text. Each row draws as if the drafts before it were said, and its token counts only if they were
(`accepted`). So no draft changes an answer. Explained in docs/explain/speculation.md.

    the sequence  .. a b c     drafts  d e f        rows     c   d   e   f
                                                    drawn    d   e   x   -     accepted: d e, then x
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import islice, pairwise

from msgspec.structs import replace

from scheduler.instance.limits import Limits
from scheduler.instance.outcomes import Iterated
from scheduler.instance.state import State
from scheduler.instance.step import NO_TOKEN, Chunk, Result
from scheduler.instance.task import Task

LENGTHS = (3, 7)
"""Drafts of a sequence in one pass: with its own token they fill one or two tiles of the CPU's kernels."""

WEIGHT = 0.1
"""Weight of the last draft in a task's mean acceptance: about ten drafts decide."""

TRIAL = 32
"""Tokens after which a sequence whose drafts do not seem to pay tries its next ones."""

WORTH = 1.1
"""Least factor on the pass's tokens per second for which a trial is made: what its drafts would give if all
were right. A large batch has no trials, because its rows are not cheap any more."""


def with_drafts(state: State, chunks: list[Chunk]) -> list[Chunk]:
    """Add drafts to the chunks of a pass where they pay. A pass that computes prompts gets none.

    They take no page, only free slots of the last one. limits.row_costs has the most rows of the pass.
    """
    if state.new_drafter is None or any(chunk.prompt for chunk in chunks):
        return chunks
    rows, tokens = len(chunks), float(len(chunks))
    found = []
    for chunk in chunks:
        task = state.tasks[chunk.job]
        drafts, predicted = _drafts(state, task, chunk, rows, tokens)
        if drafts:
            rows, tokens = rows + len(drafts), tokens + expected(task.acceptance, len(drafts))
            chunk = _with(chunk, drafts, predicted)
        found.append(chunk)
    return found


def _drafts(state: State, task: Task, chunk: Chunk, rows: int, tokens: float) -> tuple[Seq[int], bool]:
    """Return the drafts of one sequence, and whether they are from its request's prediction.

    rows, tokens   of the pass so far: those that it computes, and those that it is expected to give
    """
    sequence, costs = task.sequence, state.limits.row_costs
    most = min(
        len(chunk.pages) * state.pages.page_tokens - chunk.end,
        sequence.max_tokens - sequence.answered - 1,
        sequence.max_len - len(sequence.token_ids) - 1,
        costs[-1][0] - rows,
        LENGTHS[-1],
    )
    if most < 1 or not task.job.speculates:
        return (), False
    most = _length(state.limits, task, most, rows, tokens)
    if not most:
        return (), False
    if task.drafter is None:
        assert state.new_drafter is not None
        task.drafter = state.new_drafter(task.job, task.branch)
    return task.drafter.after(sequence, most)


def _length(limits: Limits, task: Task, most: int, rows: int, tokens: float) -> int:
    """Return with how many drafts the whole pass gives the most tokens per second; if with none, of a trial.

    most   drafts that there may be; rows, tokens: as in `_drafts`
    """

    def per_cost(count: int, acceptance: float) -> float:
        return (tokens + expected(acceptance, count)) / cost(limits, rows + count)

    lengths = [min(length, most) for length in LENGTHS]
    best = max((0, *lengths), key=lambda count: per_cost(count, task.acceptance))
    if best or task.sequence.answered < task.next_trial:
        return best
    return lengths[0] if per_cost(lengths[0], 1.0) >= WORTH * per_cost(0, 1.0) else 0


def expected(acceptance: float, count: int) -> float:
    """Return how many of `count` drafts are accepted on average, if each is so with this probability after
    accepted ones."""
    return float(sum(acceptance ** (number + 1) for number in range(count)))


def cost(limits: Limits, rows: int) -> float:
    """Return the cost of a pass of so many rows, on the line between the two measured points around it."""
    points = limits.row_costs
    for (low, low_cost), (high, high_cost) in pairwise(points):
        if rows <= high:
            return low_cost + (high_cost - low_cost) * max(0, rows - low) / (high - low)
    return points[-1][1] * rows / points[-1][0]


def _with(chunk: Chunk, drafts: Seq[int], predicted: bool) -> Chunk:
    """Return a chunk with drafts after its one token, and a draw after each of them."""
    (draw,) = chunk.draws
    draws = [
        replace(draw, answered=draw.answered + row, ahead=tuple(islice(drafts, row)))
        for row in range(len(drafts) + 1)
    ]
    return replace(chunk, token_ids=(*chunk.token_ids, *drafts), draws=tuple(draws), predicted=predicted)


def accepted(chunk: Chunk, drawn: Seq[int]) -> int:
    """Return how many leading drafts of a chunk are accepted: those equal to the token drawn before them.

    drawn   a token for each draw. A draft is not accepted if the token after it could not be drawn. The next
            pass draws this token again, without a draft before it, and only then can it fail its job
    """
    count = 0
    for draft, before, after in zip(islice(chunk.token_ids, 1, None), drawn, islice(drawn, 1, None)):
        if draft != before or after == NO_TOKEN:
            break
        count += 1
    return count


def note_acceptance(task: Task, drafted: int, count: int) -> None:
    """Add a pass to a task's mean acceptance: `count` drafts were right, the next one was not."""
    task.next_trial = task.sequence.answered + TRIAL
    for right in (1.0,) * count + (0.0,) * (count < drafted):
        task.acceptance += WEIGHT * (right - task.acceptance)


def summed(batch: Seq[tuple[Chunk, int]], result: Result, seconds: float, computed: int) -> Iterated:
    """Sum up a pass, of a leap the last one.

    batch      (chunk of the running batch, number of its drafts that are in the answer now)
    seconds    since the pass before
    computed   tokens of the pass, those of prompts included
    """
    before = len(result.passes)
    rows = drafts = kept = context = 0
    for chunk, count in batch:
        size = len(chunk.token_ids)
        rows, drafts, kept = rows + size, drafts + (size > 1), kept + count
        context += size * (chunk.start + before) + size * (size + 1) // 2
    tokens, drafted, alone = len(batch) + kept, rows - len(batch), computed == rows
    return Iterated(tokens, [result.compute_s], [seconds], context, alone, rows, drafts, drafted, kept)
