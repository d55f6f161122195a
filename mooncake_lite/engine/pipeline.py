"""A pipeline of ranks over layers: chunks of one prompt are in different stages at once.

Used by `ranks/computing`. Mooncake's chunked pipeline parallelism (FAST'25, section 5.1). The first stage has
the planner. It tells the others what to do, and each does it after all that it was told before:

    stage 0   chunk 1 | chunk 2 | chunk 3 | next prompt
    stage 1             chunk 1 | chunk 2 | chunk 3 -> first token

All stages use the same numbers of pages and halves, for their own layers. Explained in
docs/explain/layer-wise-prefill.md.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from mooncake_lite.engine.contract import ComputeEngine, Drawn, OnMoved
from mooncake_lite.engine.flights import BAD, TRANSFER_LIMIT_S
from mooncake_lite.engine.penalties import counted
from mooncake_lite.engine.runner import Runner
from mooncake_lite.messages import BlockRef, Logprobs
from mooncake_lite.messages.stages import (
    HalfEnded,
    HiddenAt,
    HiddenTaken,
    LateTokens,
    StageChunk,
    StageMove,
    StageStep,
)
from mooncake_lite.model.layer_hook import LayerHook
from scheduler.instance import JobId, Late, Result, Step, TransferEnded
from scheduler.instance.step import NO_TOKEN, Chunk, Draw, LandGroup, ReadGroup, Score, WriteGroup
from store.layout import check_of
from transport.bulk.batch import Transfer

if TYPE_CHECKING:
    from transport.engine import TransferEngine

WAIT_S = 0.002
"""Longest wait for messages of a first stage that has nothing else to do."""

SILENCE_LIMIT_S = 600.0
"""Longest time without a report while one is due. Any value works that is far above the time of a pass."""

NO_JOB = JobId("", 0)

UNKNOWN = -1
"""In place of a token that a stage was not told: its draws need to know that it is there, and no more."""


class Neighbours:
    """What one stage hears from the others, and the hidden states between them.

    ranks     of the pipeline, first stage first; number: of this one
    receive   (seconds) -> messages of the others; tell: (stage, message)
    slots     (count, rows, nbytes) uint8: memory for hidden states, `offset` bytes from the start of this
              rank's segment
    steps     that the first stage has told and that have not begun
    ended     what the others have reported
    """

    def __init__(
        self,
        ranks: Seq[int],
        number: int,
        transfers: TransferEngine,
        slots: np.ndarray,
        offset: int,
        receive: Callable[[float], Iterable[Any]],
        tell: Callable[[int, Any], object],
    ) -> None:
        self.ranks, self.number, self.tell = ranks, number, tell
        self.steps = deque[StageStep]()
        self.ended = deque[HalfEnded | LateTokens]()
        self._chunks: list[StageChunk] = []  # of a step that has not come as a whole
        self._transfers, self._slots, self._offset, self._receive = transfers, slots, offset, receive
        self._free, self._come = deque(range(len(slots))), deque[HiddenAt]()

    def look(self, wait_s: float = 0.0) -> None:
        """Take the messages that have come. Waits wait_s at most."""
        for message in self._receive(wait_s):
            match message:
                case HiddenAt():
                    self._come.append(message)
                case HiddenTaken(slot):
                    self._free.append(slot)
                case StageStep():
                    self._chunks += message.chunks
                    if not message.more:
                        self.steps.append(replace(message, chunks=self._chunks))
                        self._chunks = []
                case HalfEnded() | LateTokens():
                    self.ended.append(message)

    @property
    def can_begin(self) -> bool:
        """Tell whether there is a next step, and nothing that it needs has still to come."""
        return bool(self.steps) and (bool(self._come) or not self.steps[0].chunks)

    def next_step(self) -> StageStep | None:
        """Take out the next step, if it can begin."""
        return self.steps.popleft() if self.can_begin else None

    def take(self, rows: int) -> np.ndarray:
        """Read the hidden states of the stage before, (rows, nbytes) uint8. Raises TransferError."""
        at = self._come.popleft()
        found = np.empty((rows, self._slots.shape[2]), np.uint8)
        read = Transfer("read", found.reshape(-1), self.ranks[self.number - 1], 0, at.offset, found.nbytes)
        self._transfers.submit([read], ("hidden states", "")).wait(TRANSFER_LIMIT_S)
        self.tell(self.number - 1, HiddenTaken(at.slot))
        return found

    def drop(self) -> None:
        """Free the slots that this stage will not read. The stage before may be waiting for one."""
        while self._come:
            self.tell(self.number - 1, HiddenTaken(self._come.popleft().slot))

    def give(self, hidden: np.ndarray, waits: Callable[[], object] = lambda: None) -> None:
        """Leave hidden states to the next stage. Waits while that is two passes behind.

        waits   called while it does

        Raises RuntimeError when it does not take them.
        """
        until = time.monotonic() + SILENCE_LIMIT_S
        while not self._free:
            if time.monotonic() > until:
                raise RuntimeError(f"rank {self.ranks[self.number + 1]} takes no hidden states")
            self.look(0.1)
            waits()
        slot = self._free.popleft()
        self._slots[slot, : len(hidden)] = hidden
        self.tell(self.number + 1, HiddenAt(slot, self._offset + slot * self._slots[0].nbytes))


class StageEngine:
    """Computes passes of one stage, as the runner wants it."""

    def __init__(self, engine: ComputeEngine, neighbours: Neighbours) -> None:
        self._engine, self._neighbours = engine, neighbours
        self.on_look: Callable[[], object] = lambda: None

    def compute(
        self, chunks: Seq[Chunk], hook: LayerHook | None = None
    ) -> tuple[list[Drawn], list[list[Logprobs]]]:
        """Compute a pass. What the last stage draws is returned there, and nothing elsewhere."""
        near = self._neighbours
        hidden = near.take(sum(len(chunk.token_ids) for chunk in chunks)) if near.number else None
        looking = _Looking(self._look, hook or LayerHook())
        if near.number == len(near.ranks) - 1:
            return self._engine.compute(chunks, looking, hidden)
        near.give(self._engine.pass_on(chunks, looking, hidden), self.on_look)
        return [], []

    def _look(self) -> None:
        self._neighbours.look()
        self.on_look()


class _Looking(LayerHook):
    """A hook that also looks after the messages of the other stages."""

    def __init__(self, look: Callable[[], None], inner: LayerHook) -> None:
        self._look, self._inner = look, inner

    def before(self, layer: int) -> None:
        self._look()
        self._inner.before(layer)

    def after(self, layer: int) -> None:
        self._inner.after(layer)


class FirstRunner:
    """The runner of a first stage: tells the others what it does, and the planner what all have done.

    part    (place of a block) -> place of this stage's layers of it
    _parts    half -> the ends of its transfer, by stage; _places: what is read into it
    _due      halves, and jobs, of which not all stages have reported; heard_at: the last report
    """

    def __init__(
        self,
        runner: Runner,
        engine: StageEngine,
        neighbours: Neighbours,
        part: Callable[[BlockRef], BlockRef],
    ) -> None:
        self._runner, self._engine, self._near, self._part = runner, engine, neighbours, part
        self._parts: dict[int, dict[int, TransferEnded]] = {}
        self._places: dict[int, Seq[BlockRef]] = {}
        self._due: set[int | JobId] = set()
        self._heard_at = time.monotonic()

    def run(self, step: Step, moved: OnMoved | None = None) -> Result:
        """Do this stage's part of a step, which the others do later. See Runner.run.

        Raises RuntimeError when they do not report for SILENCE_LIMIT_S.
        """
        self._due.update([read.half for read in step.reads], [write.half for write in step.writes])
        self._due.update(chunk.job for chunk in step.chunks if chunk.draws)
        for order in orders_of(step):
            for stage in range(1, len(self._near.ranks)):
                self._near.tell(stage, order)
        self._places |= {read.half: read.places for read in step.reads}
        tell = None if moved is None else partial(self._tell, moved)
        self._engine.on_look = (lambda: None) if tell is None else partial(tell, ())
        self._near.look(WAIT_S if step.only_waits and not step.reads else 0.0)
        result = self._runner.run(own_part(step, self._part), tell)
        halves, late = self._all_told(result.halves)
        return replace(result, step=step, halves=halves, late=late)

    def _tell(self, moved: OnMoved, own: Seq[TransferEnded], late: Seq[Late] = ()) -> None:
        """Tell of ends while a pass goes on."""
        if any(told := self._all_told(own)):
            moved(*told)

    def _all_told(self, own: Iterable[TransferEnded]) -> tuple[list[TransferEnded], list[Late]]:
        """Return transfers that have ended on all stages, and late tokens."""
        told: list[tuple[int, TransferEnded]] = [(0, one) for one in own]
        late: list[Late] = []
        if self._near.ended or not self._due:
            self._heard_at = time.monotonic()
        elif time.monotonic() - self._heard_at > SILENCE_LIMIT_S:
            raise RuntimeError(f"other ranks of the pipeline have reported nothing for {SILENCE_LIMIT_S:g} s")
        while self._near.ended:
            report = self._near.ended.popleft()
            if isinstance(report, HalfEnded):
                told.append((report.stage, report.ended))
            else:
                late.append(Late(JobId(*report.job), report.tokens, report.logprobs, report.scores))
        whole = list(self._whole(told))
        self._due.difference_update([one.number for one in whole], [one.job for one in late if one.tokens])
        return whole, late

    def _whole(self, told: Iterable[tuple[int, TransferEnded]]) -> Iterator[TransferEnded]:
        for stage, one in told:
            parts = self._parts.setdefault(one.number, {})
            parts[stage] = one
            if len(parts) == len(self._near.ranks):
                del self._parts[one.number]
                yield self._joined([parts[number] for number in range(len(parts))])

    def _joined(self, parts: Seq[TransferEnded]) -> TransferEnded:
        """Join the ends of a transfer's parts, first layers first. What was read is compared here."""
        number, places = parts[0].number, self._places.pop(parts[0].number, None)
        problem = next((part.problem for part in parts if part.problem), "")
        if problem:
            return TransferEnded(number, problem, any(part.may_still_land for part in parts))
        sums = [list(itertools.chain(*some)) for some in zip(*(part.sums for part in parts))]
        if places is None:
            return TransferEnded(number, sums=sums)
        checked = [ref for ref in places if ref.check]
        bad = [ref for ref, found in zip(checked, sums, strict=True) if check_of(found) != ref.check]
        return TransferEnded(number, BAD if bad else "", bad=bad)


# ----------------------------------------------------------------------------------- what is told


def part_of(layers: range, layer_nbytes: int) -> Callable[[BlockRef], BlockRef]:
    """Return what turns the place of a block into the place of these layers of it."""
    first, nbytes = layers.start * layer_nbytes, len(layers) * layer_nbytes
    return lambda ref: replace(ref, offset=ref.offset + first, nbytes=nbytes)


def own_part(step: Step, part: Callable[[BlockRef], BlockRef]) -> Step:
    """Return a step with the places of a stage's layers."""
    return replace(
        step,
        reads=tuple(replace(one, places=[*map(part, one.places)]) for one in step.reads),
        writes=tuple(replace(one, places=[*map(part, one.places)]) for one in step.writes),
    )


def orders_of(step: Step) -> list[StageStep]:
    """Return what the other stages have to do: moves do not wait for hidden states."""
    reads = [StageMove(one.half, len(one.places), list(one.places), []) for one in step.reads]
    lands = [StageMove(one.half, one.count, [], list(one.pages)) for one in step.lands]
    writes = [StageMove(one.half, len(one.places), list(one.places), list(one.pages)) for one in step.writes]
    found = [StageStep(reads, lands, writes, [])] if reads or lands or writes else []
    last = len(step.chunks) - 1
    passes = [StageStep([], [], [], [_told(one)], number < last) for number, one in enumerate(step.chunks)]
    return [*found, *passes]


def _told(chunk: Chunk) -> StageChunk:
    draw = chunk.draws[0] if chunk.draws else None
    asks = draw or chunk.score
    first = len(draw.token_ids) - counted(draw) if draw is not None else 0
    return StageChunk(
        (*chunk.job,), list(chunk.token_ids), chunk.start, list(chunk.pages),
        None if asks is None else asks.sampling,
        [] if draw is None else list(draw.token_ids[first : chunk.start]),
        0 if draw is None else draw.answered,
        [] if draw is None else list(draw.stop_ids),
        [one.branch for one in chunk.draws],
        None if chunk.score is None else list(chunk.score.targets),
    )  # fmt: skip


def step_of(order: StageStep, now: float) -> Step:
    """Return the step that a stage does for an order."""
    return Step(
        now,
        reads=tuple(ReadGroup(one.half, one.places, NO_JOB, 0) for one in order.reads),
        lands=tuple(LandGroup(one.half, one.count, one.pages, NO_JOB) for one in order.lands),
        writes=tuple(WriteGroup(one.half, one.pages, one.places, NO_JOB, 0) for one in order.writes),
        chunks=tuple(map(_heard, order.chunks)),
    )


def _heard(told: StageChunk) -> Chunk:
    stops, sampling = frozenset(told.stop_ids), told.sampling
    sequence = [UNKNOWN] * (told.start - len(told.before)) + told.before + told.token_ids
    draws = [Draw(sampling, sequence, told.answered, stops, branch) for branch in told.branches]
    score = None if told.targets is None else Score(sampling, told.targets)
    return Chunk(JobId(*told.job), told.token_ids, told.start, told.pages, tuple(draws), True, score)


def reports_of(stage: int, result: Result) -> list[HalfEnded | LateTokens]:
    """Return what a stage reports of a step to the first one."""
    reports: list[HalfEnded | LateTokens] = [*halves_of(stage, result.halves)]
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


def halves_of(stage: int, ended: Iterable[TransferEnded]) -> list[HalfEnded]:
    """Return what a stage reports of transfers."""
    return [HalfEnded(stage, one) for one in ended]
