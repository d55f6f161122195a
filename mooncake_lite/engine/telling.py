"""What the first rank of an instance tells the others of a step, and what they make of it and report.

Pure. Used by `members.py`, `pipeline.py` and `ranks/computing`. See docs/explain/several-ranks.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from mooncake_lite.engine.penalties import counted
from mooncake_lite.messages.members import LateTokens, MemberChunk, MemberMove, MemberStep, PartEnded
from scheduler.instance import JobId, Result, Step, TransferEnded
from scheduler.instance.step import (
    NO_TOKEN,
    Chunk,
    Draw,
    Growth,
    LandGroup,
    ReadGroup,
    SaveBlock,
    Score,
    WriteGroup,
    WritePut,
)

NO_JOB = JobId("", 0)

UNKNOWN = -1
"""In place of a token that a rank was not told: its draws need to know that it is there, and no more."""

MOST_NUMBERS = 1 << 18
"""Token ids and page numbers of a message, beyond its first chunk: a fifth of its limit at most."""


def orders_of(step: Step) -> list[MemberStep]:
    """Return what the other ranks have to do: moves do not wait for the hidden states of a pipeline."""
    moves = MemberStep(
        [MemberMove(one.half, len(one.places), list(one.places), [], one.first) for one in step.reads],
        [MemberMove(one.half, one.count, [], list(one.pages)) for one in step.lands],
        [
            MemberMove(one.half, len(one.places), list(one.places), list(one.pages), 0, list(one.numbers))
            for one in step.writes
        ],
        [MemberMove(one.slot, 1, [], list(one.pages), one.index) for one in step.saves],
        [MemberMove(one.put, len(one.places), list(one.places), list(one.slots)) for one in step.puts],
        [(one.copies, one.pages[0]) for one in step.grow if one.copies is not None],
    )
    groups = list(_grouped(step.chunks))
    passes = [MemberStep(chunks=one, more=number < len(groups)) for number, one in enumerate(groups, 1)]
    return passes if moves == MemberStep() else [moves, *passes]


def _grouped(chunks: Seq[Chunk]) -> Iterator[list[MemberChunk]]:
    """Yield chunks in groups that fit into a message."""
    group, numbers = list[MemberChunk](), 0
    for chunk in map(_told, chunks):
        numbers += len(chunk.token_ids) + len(chunk.pages) + len(chunk.before)
        if group and numbers > MOST_NUMBERS:
            yield group
            group, numbers = [], 0
        group.append(chunk)
    if group:
        yield group


def _told(chunk: Chunk) -> MemberChunk:
    draw = chunk.draws[0] if chunk.draws and chunk.prompt else None
    asks = draw or chunk.score
    first = len(draw.token_ids) - counted(draw) if draw is not None else 0
    return MemberChunk(
        (*chunk.job,), list(chunk.token_ids), chunk.start, list(chunk.pages),
        None if asks is None else asks.sampling,
        [] if draw is None else list(draw.token_ids[first : chunk.start]),
        0 if draw is None else draw.answered,
        [] if draw is None else list(draw.stop_ids),
        [one.branch for one in chunk.draws],
        None if chunk.score is None else list(chunk.score.targets),
        chunk.prompt,
    )  # fmt: skip


def step_of(order: MemberStep, now: float) -> Step:
    """Return the step that a rank does for an order."""
    return Step(
        now,
        grow=tuple(Growth(NO_JOB, (target,), source) for source, target in order.copies),
        reads=tuple(ReadGroup(one.number, one.places, NO_JOB, one.first) for one in order.reads),
        lands=tuple(LandGroup(one.number, one.count, one.pages, NO_JOB) for one in order.lands),
        writes=tuple(
            WriteGroup(one.number, one.pages, one.places, NO_JOB, 0, numbers=one.numbers)
            for one in order.writes
        ),
        saves=tuple(SaveBlock(NO_JOB, one.first, (), 0, None, one.pages, one.number) for one in order.saves),
        puts=tuple(WritePut(one.number, one.pages, one.places) for one in order.puts),
        chunks=tuple(map(_heard, order.chunks)),
    )


def _heard(told: MemberChunk) -> Chunk:
    stops, sampling = frozenset(told.stop_ids), told.sampling
    sequence = [UNKNOWN] * (told.start - len(told.before)) + told.before + told.token_ids
    draws = [Draw(sampling, sequence, told.answered, stops, branch) for branch in told.branches]
    score = None if told.targets is None else Score(sampling, told.targets)
    return Chunk(JobId(*told.job), told.token_ids, told.start, told.pages, tuple(draws), told.prompt, score)


def reports_of(member: int, result: Result) -> list[PartEnded | LateTokens]:
    """Return what a rank reports of a step to the first one. Only a last stage has drawn tokens."""
    puts = [PartEnded(member, True, one) for one in result.puts]
    reports: list[PartEnded | LateTokens] = [*halves_of(member, result.halves), *puts]
    tokens, logprobs, scores = iter(result.tokens), iter(result.logprobs), iter(result.scores)
    for chunk in result.step.chunks if result.tokens or result.scores else ():
        count = len(chunk.draws)
        scored = list(next(scores)) if chunk.score is not None else []
        drawn, said = list(itertools.islice(tokens, count)), list(itertools.islice(logprobs, count))
        if chunk.score is not None and len(scored) < len(chunk.score.targets):
            drawn, said = [NO_TOKEN] * max(count, 1), [None] * max(count, 1)
        if drawn or scored:
            reports.append(LateTokens((*chunk.job,), drawn, said, scored))
    return reports


def halves_of(member: int, ended: Iterable[TransferEnded]) -> list[PartEnded]:
    """Return what a rank reports of transfers of halves."""
    return [PartEnded(member, False, one) for one in ended]
