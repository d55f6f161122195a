"""What the ranks of a pipeline tell each other, and what its first one makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from mooncake_lite.engine import members, pipeline, telling
from mooncake_lite.engine.contract import Drawn
from mooncake_lite.engine.flights import BAD
from mooncake_lite.engine.members import Leader, chained
from mooncake_lite.engine.pipeline import Neighbours, StageEngine
from mooncake_lite.engine.telling import orders_of, reports_of, step_of
from mooncake_lite.messages import BlockRef, Logprobs, Sampling
from mooncake_lite.messages.members import (
    TO_MEMBER,
    Dismissed,
    HiddenAt,
    HiddenTaken,
    LateTokens,
    MemberStep,
    PartEnded,
)
from mooncake_lite.model.layer_hook import LayerHook
from scheduler.instance import JobId, Late, Result, Step, TransferEnded
from scheduler.instance.step import NO_TOKEN, Chunk, Draw, LandGroup, ReadGroup, Score, WriteGroup
from store.layout import check_of
from transport.bulk.batch import Transfer
from transport.errors import TransferError
from transport.wire import Decoder, encode

pytestmark = pytest.mark.quick

A, B = JobId("a", 3), JobId("b", 0)
RANKS = (4, 5, 6)
ROWS, NBYTES = 6, 8
LAYER = 10
"""Bytes of a layer of a block; each stage has two."""

DECODER = Decoder(TO_MEMBER)


class Moves:
    """Transfers that end at once: each byte that is read is 7, or they fail."""

    def __init__(self) -> None:
        self.moves: list[Transfer] = []
        self.problem = ""

    def submit(self, moves: Sequence[Transfer], label: object) -> Moves:
        self.moves += moves
        return self

    def wait(self, timeout_s: float) -> None:
        if self.problem:
            raise TransferError(self.problem)
        self.moves[-1].local[:] = 7


class Place:
    """Where one stage stands: what it has told, and what it will hear, one list of messages at each look."""

    def __init__(self, number: int) -> None:
        self.told: list[tuple[int, Any]] = []
        self.heard: list[list[Any]] = []
        self.moves: Any = Moves()
        self.slots = np.zeros((2, ROWS, NBYTES), np.uint8)
        self.near = Neighbours(RANKS, number, self._receive, self._tell, self.moves, self.slots, 100)

    def _receive(self, wait_s: float) -> list[Any]:
        came = self.heard.pop(0) if self.heard else []
        return [DECODER.decode(encode(one)) for one in came]

    def _tell(self, stage: int, message: Any) -> None:
        self.told.append((stage, message))


class Own:
    """The first stage's own runner. ends: what has ended when a step has; during: called within it."""

    def __init__(self) -> None:
        self.ends: list[TransferEnded] = []
        self.during: Any = lambda moved: None
        self.steps: list[Step] = []

    def run(self, step: Step, moved: Any) -> Result:
        self.steps.append(step)
        self.during(moved)
        ends, self.ends = self.ends, []
        return Result(step, halves=ends, compute_s=2.0)


class First(Place):
    """The first of three stages."""

    def __init__(self) -> None:
        super().__init__(0)
        self.own: Any = Own()
        engine: Any = None
        self.engine = StageEngine(engine, self.near)
        self.runner = Leader(self.own, self.near, chained, self.engine.on_look, late=True)

    def step(self, own: Sequence[TransferEnded] = (), step: Step | None = None, moved: Any = None) -> Result:
        """Do a step in which these transfers end on the first stage."""
        self.own.ends = list(own)
        return self.runner.run(Step(0.0) if step is None else step, moved)

    def hear(self, *reports: PartEnded | LateTokens) -> None:
        self.heard.append(list(reports))


def told(
    stage: int, number: int, sums: Sequence[list[int]] = (), problem: str = "", late: bool = False
) -> PartEnded:
    return PartEnded(stage, False, ended(number, problem, late, bad=[], sums=list(sums)))


def ended(number: int, problem: str = "", late: bool = False, **more: Any) -> TransferEnded:
    """An end as the first stage tells it to its planner."""
    return TransferEnded(number, problem, late, **({"bad": (), "sums": []} | more))


def refs(count: int) -> list[BlockRef]:
    return [BlockRef(n, 9, 100 * n, 3 * 2 * LAYER) for n in range(count)]


# ------------------------------------------------------------------------------- what all have done


def test_a_transfer_has_ended_when_it_has_on_all_stages_and_is_told_once() -> None:
    first = First()
    assert first.step([TransferEnded(1)]).halves == []
    first.hear(told(2, 1))
    assert first.step().halves == []
    first.hear(told(1, 0), told(1, 1))
    assert first.step().halves == [ended(1)]
    first.hear(told(2, 0))
    assert first.step().halves == []
    assert first.step([TransferEnded(0)]).halves == [ended(0)]
    assert first.step().halves == []


def test_the_checksums_of_a_block_are_those_of_all_layers_in_their_order() -> None:
    first = First()
    first.hear(told(2, 0, [[5, 6], [50, 60]]), told(1, 0, [[3, 4], [30, 40]]))
    (whole,) = first.step([TransferEnded(0, sums=[[1, 2], [10, 20]])]).halves
    assert whole == ended(0, sums=[[1, 2, 3, 4, 5, 6], [10, 20, 30, 40, 50, 60]])


def test_a_block_that_is_read_is_compared_with_the_checksums_of_all_layers() -> None:
    first = First()
    checks = (check_of([1, 2, 3]), 0, check_of([4, 5, 6]), check_of([4, 5, 7]))
    places = [replace(ref, check=check) for ref, check in zip(refs(4), checks)]
    first.step(step=Step(0.0, reads=(ReadGroup(1, places, A, 0),)))
    first.hear(told(1, 1, [[2], [5], [5]]), told(2, 1, [[3], [6], [6]]))
    (read,) = first.step([TransferEnded(1, sums=[[1], [4], [4]])]).halves
    assert read == ended(1, BAD, bad=[places[3]], sums=())

    first.hear(told(1, 1, [[2]]), told(2, 1, [[3]]))
    (written,) = first.step([TransferEnded(1, sums=[[1]])]).halves
    assert written == ended(1, sums=[[1, 2, 3]]), "a later write from that half is not compared"


def test_a_read_of_good_blocks_has_no_problem() -> None:
    first = First()
    places = [replace(ref, check=check_of([1, 2, 3])) for ref in refs(2)]
    first.step(step=Step(0.0, reads=(ReadGroup(0, places, A, 0),)))
    first.hear(told(1, 0, [[2], [2]]), told(2, 0, [[3], [3]]))
    assert first.step([TransferEnded(0, sums=[[1], [1]])]).halves == [ended(0, bad=[], sums=())]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_a_transfer_that_fails_on_one_stage_has_failed_once_it_has_ended_on_all(
    stage: int, late: bool
) -> None:
    first = First()
    first.step(step=Step(0.0, reads=(ReadGroup(0, refs(1), A, 0),)))
    problems = ["cut" if number == stage else "" for number in range(3)]
    lates = [late and number == stage for number in range(3)]
    own = TransferEnded(0, problems[0], lates[0])
    first.hear(told(1, 0, [], problems[1], lates[1]))
    assert first.step([own]).halves == []
    first.hear(told(2, 0, [], problems[2], lates[2]))
    assert first.step().halves == [ended(0, "cut", late, sums=())]


def test_what_ends_and_what_comes_late_is_told_while_a_pass_goes_on() -> None:
    first = First()
    seen: list[Any] = []

    def during(moved: Any) -> None:
        first.hear(told(1, 0))
        first.engine._look()
        assert seen == [], "one stage still moves"
        first.hear(told(2, 0), LateTokens((*A,), [5], [None], []))
        first.engine._look()
        moved([TransferEnded(0)])

    first.own.during = during
    chunk = Chunk(A, [1, 2], 0, [0], (), True)
    result = first.step(step=Step(0.0, chunks=(chunk,)), moved=lambda *one: seen.append(one))
    assert seen == [([], [Late(A, [5], [None], [])]), ([ended(0)], [])]
    assert (result.halves, result.late) == ([], [])


def test_late_tokens_that_nobody_was_told_of_come_with_the_result() -> None:
    first, score = First(), Logprobs(-0.5, [(3, -0.5)])
    drawn = LateTokens((*A,), [5, 6], [None, score], [score])
    first.hear(drawn, LateTokens((*B,), [], [], [score]))
    assert first.step().late == [Late(A, [5, 6], [None, score], [score]), Late(B, [], [], [score])]
    assert first.step().late == []


@pytest.mark.parametrize(
    "due",
    [
        Step(0.0, reads=(ReadGroup(0, refs(1), A, 0),)),
        Step(0.0, writes=(WriteGroup(0, [1], refs(1), A, 0),)),
        Step(0.0, chunks=(Chunk(A, [1], 0, [0], (Draw(Sampling(), [1], 0, frozenset()),), True),)),
    ],
)
def test_a_first_stage_ends_when_others_report_nothing_that_is_due(
    due: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(members.time, "monotonic", lambda: clock.now)
    first = First()
    for _ in range(3):  # nothing is due
        clock.now += members.SILENCE_LIMIT_S - 1
        first.step()
    first.step(step=due)
    clock.now += members.SILENCE_LIMIT_S - 1
    first.hear(told(1, 1))
    first.step()
    clock.now += members.SILENCE_LIMIT_S - 1
    first.step()
    clock.now += 2
    with pytest.raises(RuntimeError, match="other ranks of the instance have reported nothing for 600 s"):
        first.step()


def test_nothing_is_due_any_more_once_all_have_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(members.time, "monotonic", lambda: clock.now)
    first = First()
    draws = (Draw(Sampling(), [1], 0, frozenset()),)
    first.step(
        step=Step(0.0, reads=(ReadGroup(0, refs(1), A, 0),), chunks=(Chunk(A, [1], 0, [0], draws, True),))
    )
    first.hear(told(1, 0), told(2, 0), LateTokens((*A,), [5], [None], []))
    assert first.step([TransferEnded(0)]).late
    for _ in range(2):
        clock.now += 10 * members.SILENCE_LIMIT_S
        first.step()


# ------------------------------------------------------------------------------- what is told


def a_step() -> Step:
    """A step that reads, lands, writes and computes."""
    sampling = Sampling(0.7, seed=4, min_tokens=2, repetition_penalty=1.1)
    draws = tuple(Draw(sampling, [1, 2, 3], 2, frozenset({8, 9}), n) for n in range(3))
    chunks = (
        Chunk(A, [2, 3], 1, [4, 5], draws, True),
        Chunk(B, [6, 7], 0, [6], (), True, Score(Sampling(0.0, prompt_logprobs=2), [7, 8])),
        Chunk(JobId("c", 1), [6], 9, [7], (), True),
    )
    return Step(
        5.0,
        reads=(ReadGroup(0, refs(2), A, 3),),
        lands=(LandGroup(1, 1, [8, 9], B),),
        writes=(WriteGroup(1, [2, 3, 4], refs(2), A, 1),),
        chunks=chunks,
    )


def test_the_first_stage_tells_the_others_of_whole_blocks() -> None:
    first, step = First(), a_step()
    result = first.step(step=step)
    assert result.step is step, "the planner knows it by this"
    assert first.own.steps == [step]
    assert [stage for stage, _ in first.told] == [1, 2] * 2
    moves, passes = [order for stage, order in first.told if stage == 1]
    assert ([one.places for one in moves.reads], moves.chunks, moves.more) == ([refs(2)], [], False)
    assert (passes.reads, passes.lands, passes.writes, passes.more) == ([], [], [], False)
    assert [told.job for told in passes.chunks] == [(*chunk.job,) for chunk in step.chunks]


def heard(stage: Place, *messages: Any) -> list[MemberStep]:
    """What a stage will do that has heard these messages, if nothing else has to come."""
    stage.heard = [list(messages)]
    stage.near.look()
    steps = list(stage.near.steps)
    stage.near.steps.clear()
    return steps


def test_a_step_is_the_same_behind_the_wire() -> None:
    step = a_step()
    moves, passes = (step_of(order, 6.0) for order in heard(Place(1), *orders_of(step)))
    for mine, theirs in ((moves.reads, step.reads), (moves.lands, step.lands), (moves.writes, step.writes)):
        (one,), (other,) = mine, theirs
        assert (one.half, getattr(one, "places", [])) == (other.half, getattr(other, "places", []))
        assert list(getattr(one, "pages", [])) == list(getattr(other, "pages", []))
    assert moves.lands[0].count == 1
    assert (moves.chunks, moves.now) == ((), 6.0)
    assert passes.chunks == step.chunks
    assert (passes.reads, passes.lands, passes.writes) == ((), (), ())


def test_a_step_in_which_others_have_nothing_to_do_is_not_told() -> None:
    first = First()
    first.step(step=Step(0.0, admit=(), preempt=(A,)))
    assert first.told == []


def test_a_pass_begins_when_the_last_of_its_chunks_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "MOST_NUMBERS", 1)
    stage, (moves, *chunks) = Place(1), orders_of(a_step())
    assert heard(stage, moves, *chunks[:2]) == [moves]
    (whole,) = heard(stage, chunks[2])
    assert whole.chunks == [chunk for order in chunks for chunk in order.chunks]
    (next_one,) = heard(stage, chunks[2])
    assert next_one == chunks[2]


def test_the_last_stage_reports_each_chunks_tokens_and_scores() -> None:
    step = step_of(heard(Place(2), *orders_of(a_step()))[1], 0.0)
    scores = [Logprobs(-0.5, []), Logprobs(-1.5, [(4, -1.5)])]
    result = Result(step, [11, 12, 13], logprobs=[None, None, scores[0]], scores=[scores])
    reports = reports_of(2, replace(result, halves=[TransferEnded(1, "cut"), TransferEnded(0)]))
    assert [DECODER.decode(encode(one)) for one in reports] == [
        PartEnded(2, False, ended(1, "cut", bad=[])),
        PartEnded(2, False, ended(0, bad=[])),
        LateTokens((*A,), [11, 12, 13], [None, None, scores[0]], []),
        LateTokens((*B,), [], [], scores),
    ]
    assert reports_of(1, Result(step)) == [], "no other stage draws"


def test_a_chunk_whose_scores_are_not_finite_is_reported_whether_it_draws_or_not() -> None:
    step = step_of(heard(Place(2), *orders_of(a_step()))[1], 0.0)
    without = reports_of(2, Result(step, [11, 12, 13], logprobs=[None] * 3, scores=[[]]))
    assert without == [
        LateTokens((*A,), [11, 12, 13], [None] * 3, []),
        LateTokens((*B,), [NO_TOKEN], [None], []),
    ]
    assert [DECODER.decode(encode(one)) for one in without] == without


@pytest.mark.parametrize(
    "message",
    [HiddenAt(1, 4096), HiddenTaken(0), told(1, 0, [[1, 2]], "cut", True), MemberStep(), Dismissed()],
)
def test_every_message_survives_the_wire(message: Any) -> None:
    assert DECODER.decode(encode(message)) == message


# ------------------------------------------------------------------------------- hidden states


def test_hidden_states_lie_in_a_slot_until_the_next_stage_has_taken_them() -> None:
    stage = Place(1)
    for number in (1, 2):
        stage.near.give(np.full((3, NBYTES), number, np.uint8))
    assert stage.told == [(2, HiddenAt(0, 100)), (2, HiddenAt(1, 100 + ROWS * NBYTES))]
    assert [int(slot[:3].min()) for slot in stage.slots] == [1, 2]
    stage.heard = [[], [HiddenTaken(1)]]
    stage.near.give(np.full((ROWS, NBYTES), 3, np.uint8))
    assert stage.heard == [], "it has waited"
    assert stage.told[2:] == [(2, HiddenAt(1, 100 + ROWS * NBYTES))]
    assert [int(slot[0, 0]) for slot in stage.slots] == [1, 3]


def test_a_stage_whose_hidden_states_nobody_takes_ends_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Place(1)
    hidden = np.zeros((1, NBYTES), np.uint8)
    stage.near.give(hidden)
    stage.near.give(hidden)
    monkeypatch.setattr(pipeline, "SILENCE_LIMIT_S", 0.02)
    with pytest.raises(RuntimeError, match="rank 6 takes no hidden states"):
        stage.near.give(hidden)
    assert len(stage.told) == 2


def test_a_stage_reads_hidden_states_in_order_and_then_frees_their_slot() -> None:
    stage = Place(2)
    stage.heard = [[HiddenAt(1, 500), HiddenAt(0, 300)]]
    stage.near.look()
    found = stage.near.take(3)
    assert (found.shape, found.dtype, int(found.min())) == ((3, NBYTES), np.uint8, 7)
    (move,) = stage.moves.moves
    assert (move.op, move.rank, move.segment, move.offset, move.nbytes) == ("read", 5, 0, 500, 3 * NBYTES)
    assert stage.told == [(1, HiddenTaken(1))]
    stage.near.take(1)
    assert stage.told == [(1, HiddenTaken(1)), (1, HiddenTaken(0))]


def test_a_stage_that_stops_frees_the_slots_of_what_it_will_not_read() -> None:
    stage = Place(2)
    stage.heard = [[HiddenAt(1, 500), HiddenAt(0, 300)]]
    stage.near.look()
    stage.near.leave()
    assert stage.told == [(1, HiddenTaken(1)), (1, HiddenTaken(0))]


def test_hidden_states_that_cannot_be_read_are_not_given_back() -> None:
    stage = Place(2)
    stage.heard = [[HiddenAt(1, 500)]]
    stage.near.look()
    stage.moves.problem = "cut"
    with pytest.raises(TransferError, match="cut"):
        stage.near.take(3)
    assert stage.told == []


def test_a_pass_waits_for_hidden_states_and_a_move_does_not() -> None:
    stage = Place(1)
    moves, *chunks = orders_of(a_step())
    stage.heard = [[moves, *chunks], [HiddenAt(0, 100)]]
    stage.near.look()
    assert stage.near.next_step() == moves
    assert stage.near.next_step() is None
    stage.near.look()
    assert stage.near.can_begin
    passes = stage.near.next_step()
    assert passes is not None
    assert len(passes.chunks) == 3
    assert stage.near.next_step() is None


class Engine:
    """Passes on what it gets, one more; the last stage draws what it gets as a token for each chunk."""

    def pass_on(self, chunks: Sequence[Chunk], hook: Any, hidden: Any) -> np.ndarray:
        hook.before(0)
        hook.after(0)
        rows = sum(len(chunk.token_ids) for chunk in chunks)
        return np.full((rows, NBYTES), 1 if hidden is None else hidden[0, 0] + 1, np.uint8)

    def compute(self, chunks: Sequence[Chunk], hook: Any, hidden: Any) -> Any:
        hook.before(0)
        hook.after(0)
        return [Drawn(int(hidden[0, 0])) for _ in chunks], []


class Seen(LayerHook):
    """Notes its calls."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def before(self, layer: int) -> None:
        self.seen.append(f"before {layer}")

    def after(self, layer: int) -> None:
        self.seen.append(f"after {layer}")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_stage_takes_computes_gives_and_hears_the_others_meanwhile(number: int) -> None:
    stage = Place(number)
    stage.heard = [[HiddenAt(0, 100)], [told(2, 0)]]
    if number:
        stage.near.look()
    else:
        stage.heard.pop(0)
    engine: Any = Engine()
    hook = Seen()
    drawn, scores = StageEngine(engine, stage.near).compute(a_step().chunks, hook)
    assert hook.seen == ["before 0", "after 0"]
    assert stage.near.ended.popleft() == told(2, 0)
    assert ([one.token for one in drawn], scores) == ([7] * 3 if number == 2 else [], [])
    given = [message for to, message in stage.told if to == number + 1]
    assert given == ([HiddenAt(0, 100)] if number < 2 else [])
    if number < 2:
        assert stage.slots[0, :5].min() == stage.slots[0, :5].max() == (8 if number else 1)
