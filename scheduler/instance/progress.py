"""Progress: apply the result of a step to the books of a rank.

Called by `planner.on` alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

from scheduler.instance import outcomes
from scheduler.instance.drafts import accepted, note_acceptance, summed
from scheduler.instance.events import Moved
from scheduler.instance.faults import Attempt, end_job, fail_job, faults_of, not_finite
from scheduler.instance.job import DECODE, PREFILL
from scheduler.instance.outcomes import Outcome
from scheduler.instance.state import Put, State
from scheduler.instance.step import NO_TOKEN, Chunk, Fault, Late, LayerLoad, Result, TransferEnded
from scheduler.instance.swap import overdue, preempt, recompute, swapped
from scheduler.instance.task import Task

MOST_READ_AGAIN = 1
"""Failed transfers of a task's blocks that are begun again. One: the transport makes second tries too."""

LATE_S = 120.0
"""Time in which bytes of a failed read may still come.

The transport reports a transfer after 5 s in which nothing moves. Bytes that have not come two minutes later
were dropped with their connection.
"""


def apply(state: State, result: Result, now: float) -> list[Outcome]:
    """Apply a result. Return the outcomes, in order."""
    step = result.step
    said: list[Outcome] = []
    for admission in step.admit:
        if (task := state.tasks[admission.job]) in state.admitted:
            said += _loaded(state, task, now)
    state.admitted = []
    for job in step.preempt:
        said.append(preempt(state, state.tasks[job], now))
    for land in step.lands:
        state.staging.free(land.half)
        task = state.tasks[land.job]
        task.landed += land.count
        if task.landed == task.to_load:
            said += _loaded(state, task, now)
    if step.saves:
        said += _save(state, result, now)
    faults = faults_of(result)
    if result.passes:
        said += _leapt(state, result, faults, now)
    if step.ahead is not None:
        said += _came_in(state, step.ahead, result, now)
    if result.lost is None:
        said += _tokens(state, result, faults, now)
    if (result.step.chunks and result.lost is None) or not state.running:
        state.passed_at = now if state.running else None
    postponed, state.postponed = state.postponed, []
    for half in [*postponed, *result.halves]:
        if half.bad:
            said.append(outcomes.BadBlocks(half.bad))
        said += _half_ended(state, half, now)
    said += _come_late(state, result.late, now)
    for put in result.puts:
        said.append(_put_ended(state, put))
    if state.puts:
        state.drop_overdue_puts(now)
    return said + overdue(state, now) if state.swapping else said


def moved(state: State, event: Moved, now: float) -> list[Outcome]:
    """Apply ends of transfers, and late tokens, while a step is under way.

    Those that could take a task out of the step, or that the next step alone can use, wait for its end.
    """
    said: list[Outcome] = []
    for half in event.ended:
        use = state.staging.halves[half.number]
        task = use.task if use is not None and use.kind == "writing" else None
        if (
            task in state.storing
            or task in state.drawing
            or (task in state.prefilling and not (half.problem or task.problem))
        ):
            said += _half_ended(state, half, now)
        else:
            state.postponed.append(half)
    return said + _come_late(state, event.late, now)


def _loaded(state: State, task: Task, now: float) -> list[Outcome]:
    """Advance a task whose blocks are all in its pages: to its prefill, or into the running batch.

    On a full hit the last token is computed all the same: its logits choose the next one.
    """
    if task.by_layers:
        task.sequence.num_computed = min(task.to_load * state.block_tokens, task.most_reused)
        task.saved = task.sequence.num_computed // state.block_tokens
        state.prefilling.append(task)
        return []
    reused = max(task.landed * state.block_tokens, task.shared)
    state.note_computed(task, min(reused, task.most_reused))
    task.saved = min(reused, task.tokens_in_pool) // state.block_tokens
    blocks = 0
    if task is state.loading:
        blocks = task.to_load - task.shared // state.block_tokens
        task.load_s = now - task.load_began
        state.loading = None
    if task.is_prefetch:
        state.remove(task)
        return [outcomes.Prefetched(task.id, blocks)]
    if PREFILL in task.job.duties:
        state.prefilling.append(task)
    else:
        for branch in state.fork(task):
            state.join(branch, now)
    return [outcomes.Loaded(task.id, task.load_s, task.shared, blocks)]


def _came_in(state: State, load: LayerLoad, result: Result, now: float) -> list[Outcome]:
    """Apply the end of a load by layers."""
    task, lost = state.tasks[load.job], result.lost
    task.load_s = now - task.load_began - result.compute_s
    if lost is not None:
        for half in load.halves:
            state.staging.free(half, now + LATE_S if lost.may_still_land else 0.0)
        said: list[Outcome] = [outcomes.BadBlocks(lost.bad)] if lost.bad else []
        return said + _read_failed(state, task, task.landed, lost.problem, now)
    task.by_layers = False
    blocks, task.read, task.landed = task.to_load - task.landed, task.to_load, task.to_load
    return [outcomes.Loaded(task.id, task.load_s, task.shared, blocks, beside=True)]


def _leapt(state: State, result: Result, faults: dict[Attempt, Fault], now: float) -> list[Outcome]:
    """Apply the passes of a leap but the last one, which end no answer and fill no block.

    Tokens of the last pass that end no answer either are told here, with the others.
    """
    said: list[Outcome] = []
    passes, batch = len(result.passes), len(state.running)
    for number, growth in result.step.later:
        if number <= passes + 1:
            sequence = state.tasks[growth.job].sequence
            state.pages.take(growth.pages)
            sequence.pages += growth.pages
    context = sum(chunk.end for chunk in result.step.chunks)
    times_s, computed_s = zip(*result.passes)
    seconds = [end_s - before_s for before_s, end_s in itertools.pairwise((state.passed_at or 0.0, *times_s))]
    if state.passed_at is None:
        seconds[0] = computed_s[0]
    state.passed_at = times_s[-1]
    said.append(
        outcomes.Iterated(
            batch, computed_s, seconds, passes * context + batch * math.comb(passes, 2), True, batch
        )
    )
    all_times_s = (*times_s, now)
    for index, task in enumerate(state.running):
        sequence, first = task.sequence, task.sequence.answered
        tokens = result.tokens[index::batch]
        sequence.token_ids.extend(tokens[:passes])
        sequence.answered += passes
        told = passes + (task.id[:2] not in faults and sequence.end_with(tokens[passes]) is None)
        said.append(outcomes.Run(task.id, first, tokens[:told], all_times_s[:told]))
    return said


def _tokens(state: State, result: Result, faults: dict[Attempt, Fault], now: float) -> list[Outcome]:
    """Apply a forward pass: each chunk's KV is in its pages, and some chunks have a next token.

    Of the jobs at fault nothing counts, in none of their branches, and they fail.
    """
    said: list[Outcome] = []
    before = len(result.passes)  # passes of a leap, each with one token for every chunk
    tokens = zip(result.tokens[before * len(result.step.chunks) :], result.logprobs or itertools.repeat(None))
    scores = iter(result.scores)
    batch: list[tuple[Chunk, int]] = []
    computed = sum(len(chunk.token_ids) for chunk in result.step.chunks)
    for chunk in result.step.chunks:
        drawn = list(itertools.islice(tokens, len(chunk.draws))) if chunk.draws else []
        scored = next(scores, ()) if chunk.score is not None else ()
        if faults and chunk.job[:2] in faults:
            continue
        task = state.tasks[chunk.job]
        if not chunk.prompt:
            if len(drawn) == 1:
                count = 0
                state.note_computed(task, chunk.end + before)
                said += _decoded(state, task, *drawn[0], now, leapt=before > 0)
            else:
                count = _drafted(state, task, chunk, drawn, now, said)
            batch.append((chunk, count))
            continue
        state.note_computed(task, chunk.end)
        task.scores += scored
        task.compute_s += result.compute_s * len(chunk.token_ids) / computed  # its share of the pass
        task.computed += len(chunk.token_ids)
        if chunk.draws:
            said += _computed(state, task, chunk, drawn, now)
    if batch:
        seconds = result.compute_s if state.passed_at is None else now - state.passed_at
        said.insert(0, summed(batch, result, seconds, computed))
    for fault in faults.values():
        said += fail_job(state, fault)
    return said


def _drafted(
    state: State, task: Task, chunk: Chunk, drawn: list[tuple[int, Any]], now: float, said: list[Outcome]
) -> int:
    """Append the first token drawn, and those after accepted drafts. Adds their outcomes to `said`.

    Tokens after the end of the answer are dropped. The next tokens overwrite the KV of drafts that are not
    accepted before any token attends to it.

    Returns how many drafts are in the answer now.
    """
    drafted = len(drawn) - 1
    count = accepted(chunk, [token for token, _ in drawn])
    note_acceptance(task, drafted, count)
    for row, (token, logprobs) in enumerate(drawn[: count + 1]):
        ends = task.sequence.end_with(token) is not None
        state.note_computed(task, chunk.start + 1 + row)
        said += _decoded(
            state, task, token, logprobs, now, leapt=False, predicted=chunk.predicted and row < count
        )
        if ends:
            return row
    return count


def _computed(
    state: State, task: Task, chunk: Chunk, drawn: list[tuple[int, Any]], now: float
) -> list[Outcome]:
    """Advance a task whose prompt is computed, with (token, logprobs) of each branch."""
    reused = chunk.end - task.computed
    said: list[Outcome] = [outcomes.Computed(task.id, task.compute_s, task.computed, reused)]
    state.prefilling.remove(task)
    if state.limits.late:
        state.drawing.append(task)
        return said
    return said + _drawn(state, task, drawn, now)


def _come_late(state: State, late: Iterable[Late], now: float) -> list[Outcome]:
    """Apply what the last stage of a pipeline has made of earlier passes. Tasks may have left meanwhile."""
    said: list[Outcome] = []
    for one in late:
        task = state.tasks.get(one.job)
        if task is None:
            continue
        task.scores += one.scores
        if NO_TOKEN in one.tokens:
            task.fault = not_finite(task.id)
        if not one.tokens or task not in state.drawing:
            continue
        if task.fault is not None:  # of this chunk, or of one before
            said += fail_job(state, task.fault)
        else:
            state.drawing.remove(task)
            said += _drawn(state, task, list(zip(one.tokens, one.logprobs)), now)
    return said


def _drawn(state: State, task: Task, drawn: list[tuple[int, Any]], now: float) -> list[Outcome]:
    """Apply the first (token, logprobs) of each branch."""
    index = task.sequence.answered
    said: list[Outcome] = [outcomes.Scored(task.id, task.scores)] if task.scores else []
    if DECODE in task.job.duties:
        for branch, (token, logprobs) in zip(state.fork(task), drawn, strict=True):
            said += _first_token(state, branch, token, logprobs, now)
        return said
    for branch_number, (token, logprobs) in zip(task.branches, drawn, strict=True):
        finish = task.sequence.end_with(token)
        task.first_tokens.append(token)
        task.finishes.append(finish)
        said.append(outcomes.Token(task.id._replace(branch=branch_number), index, token, finish, logprobs))
    task.store_began = now
    if task.written < len(task.out):
        state.storing.append(task)
        return said
    return [*said, _stored(state, task, now)]


def _first_token(state: State, task: Task, token: int, logprobs: Any, now: float) -> list[Outcome]:
    """Let a branch whose prompt was computed here join the running batch, unless its answer ends at once."""
    index = task.sequence.answered
    finish = task.sequence.append(token)
    said: list[Outcome] = [outcomes.Token(task.id, index, token, finish, logprobs)]
    if finish is None:
        state.join(task, now)
        return said
    return said + _leave(state, task)


def _stored(state: State, task: Task, now: float) -> outcomes.Prefilled:
    """End a task whose prompt is computed and stored, and which decodes elsewhere."""
    state.remove(task)
    store_s = now - task.store_began
    return outcomes.Prefilled(
        task.id, task.first_tokens, task.finishes, task.checksums(), task.load_s, task.compute_s, store_s
    )


def _decoded(
    state: State, task: Task, token: int, logprobs: Any, now: float, *, leapt: bool, predicted: bool = False
) -> list[Outcome]:
    """Append a token to a task of the running batch; a complete answer leaves the batch.

    leapt   it is of the last pass of a leap; `_leapt` has told it unless it ends the answer
    """
    sequence = task.sequence
    index = sequence.answered
    finish = sequence.append(token)
    if finish is None and leapt:
        return []
    said: list[Outcome] = [outcomes.Token(task.id, index, token, finish, logprobs, predicted)]
    if finish is None:
        return said
    state.running.remove(task)
    said.insert(0, outcomes.Decoded(task.id, now - task.joined, sequence.answered))
    return said + _leave(state, task)


def _leave(state: State, task: Task) -> list[Outcome]:
    """End a task whose answer is complete, or let it wait until its last blocks have been copied."""
    unsaved = task.sequence.num_computed // state.block_tokens - task.saved if task.job.offers else 0
    if unsaved and state.staging.free_slots:
        state.leaving.append(task)
        return []
    state.dropped_puts += unsaved
    state.remove(task)
    return [outcomes.Ended(task.id, "finished", task.sequence.answered)]


def _save(state: State, result: Result, now: float) -> list[Outcome]:
    """Offer the blocks that are in slots now, and end the tasks that waited for that."""
    saves = result.step.saves
    number, state.next_put = state.next_put, state.next_put + 1
    state.puts[number] = Put([save.slot for save in saves], list(result.saved), now)
    for save in saves:
        state.tasks[save.job].saved = save.index + 1
    leaving, state.leaving = state.leaving, []
    ended = itertools.chain.from_iterable(_leave(state, task) for task in leaving)
    return [outcomes.Saved(number, saves), *ended]


def _half_ended(state: State, ended: TransferEnded, now: float) -> list[Outcome]:
    """Apply the end of a group's transfer."""
    use = state.staging.halves[ended.number]
    assert use is not None, f"half {ended.number} has no transfer"
    assert use.kind != "landed", f"the transfer of half {ended.number} has ended before"
    task = use.task
    if use.kind == "reading" and task is not None and not ended.problem:
        use.kind = "landed"
        return []
    late = ended.may_still_land and use.kind == "reading"
    state.staging.free(ended.number, now + LATE_S if late else 0.0)
    state.pages.give_back(use.pages)
    if task is None:
        return []
    if use.kind == "reading":
        return _read_failed(state, task, use.first, ended.problem, now)
    task.written += use.count
    task.sums.update(enumerate(ended.sums, use.first))
    task.problem = task.problem or ended.problem
    task.may_still_write = task.may_still_write or ended.may_still_land
    if task.problem:
        return _write_failed(state, task)
    if task in state.prefilling:
        return [outcomes.Stored(task.id, use.first, tuple(ended.sums))]
    if task.written < len(task.out) or task in state.drawing:
        return []
    if task in state.swapping:
        return [swapped(state, task)]
    state.storing.remove(task)
    return [_stored(state, task, now)]


def _read_failed(state: State, task: Task, first: int, problem: str, now: float) -> list[Outcome]:
    """Go on with a task after blocks have not come from the pool, or with other bytes than were put there.

        first    block of job.load with which the failed transfer begins; problem: why it failed, for `_fail`

    - `task.by_layers`: the pass beside which they came has computed nothing. The task leaves `prefilling`, is
      not by layers any more, and computes the blocks. There is no second try.
    - Otherwise the failure counts (`failed_reads`). Up to MOST_READ_AGAIN of them, the blocks are read again:
      reading goes on at `task.read`. After that a prefetch gives up (`preempt`). A task without PREFILL among
      its duties cannot compute the blocks: it leaves `state.loading`, which is None then, and fails
      (`_fail`). Any other task computes them.

    To compute blocks `first` and later, a task wants none of them: `to_load` and `read` say so. It goes on at
    once (`_loaded`) if all blocks before are in its pages (`landed`), else when the last of them has landed.
    Returns the outcomes of the functions that it calls.
    """
    # labs:begin 6e
    if task.by_layers:
        task.by_layers = False
        state.prefilling.remove(task)
    else:
        task.failed_reads += 1
        if task.failed_reads <= MOST_READ_AGAIN:
            task.read = first
            return []
        if task.is_prefetch:
            return [preempt(state, task, now)]
        if PREFILL not in task.job.duties:
            state.loading = None
            return _fail(state, task, problem)
    task.read = task.to_load = first
    return _loaded(state, task, now) if task.landed == first else []
    # labs:end 6e


def _write_failed(state: State, task: Task) -> list[Outcome]:
    """Fail a task once none of its groups is flying; until then its places are being written.

    A task that is swapped out can be computed again instead.
    """
    if state.staging.of(task):
        return []
    if task in state.swapping:
        return [recompute(state, task)]
    state.leave(task)
    return _fail(state, task, task.problem)


def _fail(state: State, task: Task, problem: str) -> list[Outcome]:
    state.remove(task)
    if task.fault is not None:
        return end_job(state, task.fault, task.may_still_write)
    return [outcomes.Failed(task.id, f"KV could not be moved: {problem}", task.may_still_write)]


def _put_ended(state: State, ended: TransferEnded) -> outcomes.PutFinished:
    """Free the slots of an offer whose blocks are written, or could not be."""
    put = state.puts.pop(ended.number)
    assert put.places is not None
    state.staging.free_slots += put.slots
    if ended.problem:
        state.dropped_puts += len(put.places)
    sums = ended.sums or put.sums
    return outcomes.PutFinished(ended.number, put.places, sums, ended.problem, ended.may_still_land)
