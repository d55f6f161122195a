"""An exception in a pass is about one of its chunks: that one fails, and all others have their results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mooncake_lite.engine.contract import Drawn
from mooncake_lite.engine.isolation import MOST_UNEXPLAINED
from mooncake_lite.engine.runner import Runner
from mooncake_lite.engine.staging import StagingBlocks
from mooncake_lite.messages import Sampling
from scheduler.instance import JobId, Step
from scheduler.instance.step import ENGINE_ERROR, NO_TOKEN, Chunk, Draw, LayerLoad, Score, WriteGroup
from tests.mooncake_lite.engine.test_by_layers import LAYOUT, PAGES, Pool, refs
from tests.mooncake_lite.engine.test_by_layers import Engine as Pages

pytestmark = pytest.mark.quick

DRAW = Draw(Sampling(), (1,), 0, frozenset())


class Engine(Pages):
    """Answers with the last token of each chunk, plus 1. fails: is asked about the tokens of each chunk.

    passes   the jobs of each pass; broken: what a probe raises
    at       the layer in which a pass fails
    """

    def __init__(self) -> None:
        super().__init__(LAYOUT)
        self.fails: Callable[[Sequence[int]], Exception | None] = lambda ids: None
        self.passes: list[list[str]] = []
        self.broken: Exception | None = None
        self.at, self.probes = 0, 0

    def compute(self, chunks: Sequence[Chunk], hook: Any = None) -> tuple[list[Drawn], list[Any]]:
        self.passes.append([chunk.job.request_id for chunk in chunks])
        failures = [error for chunk in chunks if (error := self.fails(chunk.token_ids)) is not None]
        for layer in range(LAYOUT.layers):
            if hook is not None:
                hook.before(layer)
            if failures and layer == self.at:
                raise failures[0]
            if hook is not None:
                hook.after(layer)
        drawn = [Drawn(chunk.token_ids[-1] + 1) for chunk in chunks for _ in chunk.draws]
        return drawn, [list(chunk.score.targets) for chunk in chunks if chunk.score is not None]

    def store_blocks(self, pages: Sequence[int], out: np.ndarray, layers: slice = slice(None)) -> None:
        super().store_blocks(pages, out, layers)

    def probe(self) -> None:
        self.probes += 1
        if self.broken is not None:
            raise self.broken


def chunk(name: str, *ids: int, draws: int = 1, score: Score | None = None) -> Chunk:
    return Chunk(JobId(name, 0), ids, 0, PAGES, (DRAW,) * draws, True, score)


def poisoned(ids: Sequence[int]) -> Exception | None:
    return IndexError("index 99 is out of range\nand more lines") if 99 in ids else None


def test_the_chunk_that_raises_alone_is_at_fault_and_the_others_have_their_tokens_in_their_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine: Any = Engine()
    engine.fails = poisoned
    score = Score(Sampling(), (7, 8))
    chunks = (chunk("a", 3), chunk("b", 5, 99, draws=2, score=score), chunk("c", 8, score=score))
    result = Runner(engine).run(Step(0.0, chunks=chunks))
    assert engine.passes == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    assert list(result.tokens) == [4, NO_TOKEN, NO_TOKEN, 9]
    assert result.scores == [[], [7, 8]]
    (fault,) = result.faults
    assert (fault.job, fault.code) == (JobId("b", 0), ENGINE_ERROR)
    assert fault.reason.endswith("IndexError: index 99 is out of range")
    said = capsys.readouterr().err
    assert said.startswith("engine: b: IndexError: index 99 is out of range at ")
    assert (said.count("\n"), f"{__file__}:" in said) == (1, True)
    assert engine.probes == 1


def test_a_sound_pass_is_done_once_and_asks_for_no_probe() -> None:
    engine: Any = Engine()
    result = Runner(engine).run(Step(0.0, chunks=(chunk("a", 3), chunk("b", 5))))
    assert (list(result.tokens), result.faults, engine.passes) == ([4, 6], [], [["a", "b"]])
    assert not engine.probes


def test_several_chunks_may_be_at_fault_in_one_pass() -> None:
    engine: Any = Engine()
    engine.fails = poisoned
    result = Runner(engine).run(Step(0.0, chunks=(chunk("a", 99), chunk("b", 5), chunk("c", 99))))
    assert [fault.job.request_id for fault in result.faults] == ["a", "c"]
    assert list(result.tokens) == [NO_TOKEN, 6, NO_TOKEN]


def test_an_engine_that_cannot_do_a_probe_ends_the_rank() -> None:
    engine: Any = Engine()
    engine.fails, engine.broken = poisoned, RuntimeError("no memory at all")
    with pytest.raises(RuntimeError, match="no memory at all"):
        Runner(engine).run(Step(0.0, chunks=(chunk("a", 99), chunk("b", 5))))


@pytest.mark.parametrize("between", [False, True])
def test_passes_in_a_row_that_raise_without_a_chunk_at_fault_end_the_rank(between: bool) -> None:
    """A pass that goes well, or one with a chunk at fault, begins a new row."""
    engine: Any = Engine()
    runner = Runner(engine)
    pair, sound = (chunk("a", 3), chunk("b", 5)), (chunk("a", 3),)

    def fails_together(ids: Sequence[int]) -> Exception | None:
        return ValueError("together") if len(engine.passes[-1]) > 1 else None

    engine.fails = fails_together
    for _ in range(MOST_UNEXPLAINED - 1):
        assert list(runner.run(Step(0.0, chunks=pair)).tokens) == [4, 6]
    if between:
        runner.run(Step(0.0, chunks=sound))
        for _ in range(MOST_UNEXPLAINED - 1):
            runner.run(Step(0.0, chunks=pair))
        engine.fails = poisoned
        runner.run(Step(0.0, chunks=(chunk("a", 99), chunk("b", 5))))
        engine.fails = fails_together
        for _ in range(MOST_UNEXPLAINED - 1):
            runner.run(Step(0.0, chunks=pair))
    with pytest.raises(ValueError, match="together"):
        runner.run(Step(0.0, chunks=pair))


def test_a_chunk_that_raises_with_its_drafts_alone_is_computed_without_them_however_often() -> None:
    engine: Any = Engine()
    engine.fails = poisoned
    runner, draws = Runner(engine), (DRAW, DRAW, DRAW)
    drafted = Chunk(JobId("a", 0), (3, 99, 4), 5, PAGES, draws, False)
    for _ in range(3 * MOST_UNEXPLAINED):
        result = runner.run(Step(0.0, chunks=(drafted, chunk("b", 5))))
        assert list(result.tokens) == [4, NO_TOKEN, NO_TOKEN, 6]
        assert not result.faults


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        type("CudaAPIError", (Exception,), {})("[700] Call to cuCtxSynchronize"),
        type("DriverError", (Exception,), {"__module__": "numba.cuda.driver"})("launch failed"),
    ],
)
def test_an_error_of_the_device_ends_the_rank_at_once(error: Exception) -> None:
    engine: Any = Engine()
    engine.fails = lambda ids: error
    with pytest.raises(type(error)):
        Runner(engine).run(Step(0.0, chunks=(chunk("a", 3), chunk("b", 5))))
    assert len(engine.passes) == 1


def test_in_a_pipeline_an_exception_ends_the_rank() -> None:
    engine: Any = Engine()

    def compute(chunks: Sequence[Chunk], hook: Any = None) -> Any:
        engine.passes.append([])
        raise IndexError("of a later stage")

    with pytest.raises(IndexError, match="of a later stage"):
        Runner(engine, compute=compute).run(Step(0.0, chunks=(chunk("a", 3),)))
    assert len(engine.passes) == 1


# ------------------------------------------------------------------------------ beside KV that moves


class Rank:
    """A runner whose blocks come in and leave by layers."""

    def __init__(self) -> None:
        self.engine: Any = Engine()
        self.engine.fails = poisoned
        self.pool: Any = Pool(LAYOUT)
        self.staging = StagingBlocks(np.zeros(8 * LAYOUT.nbytes, np.uint8), LAYOUT, self.engine)
        self.runner = Runner(self.engine, self.staging, self.pool)

    def ahead(self, name: str) -> LayerLoad:
        return LayerLoad((0, 1), refs(self.pool), PAGES, JobId(name, 0))

    def behind(self, name: str, half: int = 0) -> WriteGroup:
        return WriteGroup(half, PAGES, refs(self.pool), JobId(name, 0), 0, behind=True)

    def ended(self, result: Any) -> list[Any]:
        """Wait until the groups of a step have left."""
        halves = list(result.halves)
        while self.runner._leaving:
            halves += self.runner.run(Step(1.0)).halves
        return halves


@pytest.mark.parametrize("at", range(LAYOUT.layers))
def test_blocks_of_a_chunk_at_fault_do_not_leave_as_if_they_were_computed(at: int) -> None:
    rank = Rank()
    rank.engine.at = at
    result = rank.runner.run(Step(0.0, writes=(rank.behind("b"),), chunks=(chunk("a", 3), chunk("b", 99))))
    assert [fault.job.request_id for fault in result.faults] == ["b"]
    (ended,) = rank.ended(result)
    assert ended.problem
    assert not ended.sums
    assert len(rank.pool.batches) <= at


@pytest.mark.parametrize("at", range(LAYOUT.layers))
def test_blocks_of_a_sound_chunk_leave_whole_beside_one_at_fault(at: int) -> None:
    rank = Rank()
    rank.engine.at = at
    result = rank.runner.run(Step(0.0, writes=(rank.behind("a"),), chunks=(chunk("a", 3), chunk("b", 99))))
    (ended,) = rank.ended(result)
    assert ended.problem == ""
    expected = [np.ascontiguousarray(rank.engine.pages[:, page]) for page in PAGES]
    for ref, block in zip(refs(rank.pool), expected):
        assert (rank.pool.block(ref) == block).all()
    assert ended.sums == [LAYOUT.checksums(block) for block in expected]


@pytest.mark.parametrize("at", range(LAYOUT.layers))
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_prefix_that_comes_by_layers_is_whole_after_the_pass_whichever_chunk_is_at_fault(
    at: int, name: str
) -> None:
    rank = Rank()
    rank.engine.at = at
    result = rank.runner.run(Step(0.0, ahead=rank.ahead(name), chunks=(chunk("a", 3), chunk("b", 99))))
    assert (result.lost, [fault.job.request_id for fault in result.faults]) == (None, ["b"])
    assert all(batch.over for batch in rank.pool.batches)
    for page, ref in zip(PAGES, refs(rank.pool)):
        assert rank.engine.pages[:, page].tobytes() == rank.pool.block(ref).tobytes()


def test_a_prefix_that_does_not_come_gives_up_the_pass_and_what_was_to_leave_behind_it() -> None:
    """The pass has computed nothing: blocks that left would have bytes of nothing, and matching checksums."""
    rank = Rank()
    rank.pool.fails_after = 0
    step = Step(
        0.0, writes=(rank.behind("a", 1),), ahead=rank.ahead("b"), chunks=(chunk("a", 3), chunk("b", 5))
    )
    result = rank.runner.run(step)
    assert result.lost is not None
    assert (result.tokens, result.faults) == ([], [])
    (ended,) = rank.ended(result)
    assert (ended.number, bool(ended.problem)) == (1, True)


def test_a_prefix_that_cannot_even_be_asked_for_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    from transport.errors import BadTransfer

    def refuse(moves: Any, label: Any) -> Any:
        raise BadTransfer("offset 7 is outside the segment")

    monkeypatch.setattr(rank.pool, "submit", refuse)
    step = Step(
        0.0, writes=(rank.behind("a", 1),), ahead=rank.ahead("b"), chunks=(chunk("a", 3), chunk("b", 5))
    )
    result = rank.runner.run(step)
    assert result.lost is not None
    (ended,) = rank.ended(result)
    assert ended.problem


def test_what_the_planner_raises_within_a_pass_ends_the_rank() -> None:
    rank = Rank()
    rank.runner.run(Step(0.0, writes=(WriteGroup(0, PAGES[:2], refs(rank.pool)[:2], JobId("z", 0), 0),)))
    while not rank.pool.batches:
        rank.runner.run(Step(0.5))
    copied = threading.Event()

    def moved(halves: Any, late: Any = ()) -> None:
        copied.set()
        raise AssertionError("half 0 has no transfer")

    for batch in rank.pool.batches:
        batch.over = True
    with pytest.raises(AssertionError, match="half 0 has no transfer"):
        rank.runner.run(Step(1.0, chunks=(chunk("a", 3), chunk("b", 5))), moved)
    assert copied.is_set()
    assert len(rank.engine.passes) == 1
