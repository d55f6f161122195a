"""Members of an instance: their parts of blocks, what the first one tells, and what all have done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replaced
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mooncake_lite.engine import members
from mooncake_lite.engine.engine import Engine
from mooncake_lite.engine.flights import BAD, Part
from mooncake_lite.engine.members import Leader, Peers, WholeBlocks, part_of
from mooncake_lite.engine.runner import Runner
from mooncake_lite.engine.staging import StagingBlocks
from mooncake_lite.engine.telling import orders_of, reports_of, step_of
from mooncake_lite.messages import BlockRef, Sampling
from mooncake_lite.messages.members import TO_MEMBER, Dismissed, LateTokens, MemberStep, PartEnded
from mooncake_lite.model.config import ModelConfig
from mooncake_lite.model.shares import Share, shares_of
from scheduler.instance import JobId, Result, Step, TransferEnded
from scheduler.instance.step import (
    Chunk,
    Draw,
    Growth,
    LandGroup,
    ReadGroup,
    SaveBlock,
    WriteGroup,
    WritePut,
)
from store.layout import BlockLayout, check_of
from tests.conftest import examples
from tests.mooncake_lite.engine.byte_pool import BytePool
from tests.mooncake_lite.launch.test_preflight import SMALL_MODEL
from transport.bulk.batch import Transfer
from transport.errors import TransferError
from transport.wire import Decoder, encode

pytestmark = pytest.mark.quick

A = JobId("a", 3)
UNIT = 256


# ------------------------------------------------------------------------------- parts of a block


def sized(layers: int, kv_heads: int, head_dim: int = 8) -> ModelConfig:
    windows = (None,) * layers
    sizes = {"layers": layers, "windows": windows, "kv_heads": kv_heads, "heads": 3 * kv_heads}
    return replaced(SMALL_MODEL.config, head_dim=head_dim, **sizes)  # type: ignore[arg-type]


def layout_of(
    model: ModelConfig, share: Share | None = None, block: int = 64, codec: str = "none"
) -> BlockLayout:
    own = model if share is None else share.part_of(model)
    return BlockLayout(own.layers, own.kv_heads, block, own.head_dim, 4, codec)


@settings(max_examples=examples(60))
@given(
    st.integers(1, 5), st.integers(1, 8), st.integers(1, 5), st.booleans(),
    st.sampled_from(["none", "bfloat16", "int8", "int4"]),
)  # fmt: skip
def test_the_parts_of_all_cover_each_byte_once_and_lie_as_in_own_blocks(
    layers: int, kv_heads: int, count: int, stages: bool, codec: str
) -> None:
    model = sized(layers, kv_heads, 32)
    most = min(count, layers if stages else kv_heads)
    shares = shares_of(model, stages=most) if stages else shares_of(model, members=most)
    layout = layout_of(model, codec=codec)
    ref = BlockRef(1, 2, 7 * layout.nbytes, layout.nbytes)
    block = np.random.default_rng(0).integers(0, 255, layout.nbytes, np.uint8)
    units = block.reshape(layers, 2, kv_heads, -1)
    taken = np.zeros(layout.nbytes, int)
    for share in shares:
        own = units[share.layers.start : share.layers.stop, :, share.kv_heads.start : share.kv_heads.stop]
        part = part_of(share, layout, UNIT)
        found = [block[offset - ref.offset :][:nbytes] for offset, nbytes in part.ranges(ref)]
        np.testing.assert_array_equal(np.concatenate(found), own.reshape(-1))
        assert own.nbytes == layout_of(model, share, codec=codec).nbytes
        assert len(found) == (1 if share.members == 1 else 2 * layers)
        for offset, nbytes in part.ranges(ref):
            taken[offset - ref.offset :][:nbytes] += 1
        assert part.owns(0)
        assert part.owns(12345)
        assert part.sums == (share.members == 1), "nobody has whole layers"
    assert (taken == 1).all()


@pytest.mark.parametrize(("block", "unit"), [(16, 256), (64, 256), (256, 256), (512, 512)])
@pytest.mark.parametrize("turns", [2, 3, 5])
def test_each_block_has_one_owner_that_has_all_tokens_of_it(turns: int, block: int, unit: int) -> None:
    model = sized(2, 2)
    layout = layout_of(model, block=block)
    parts = [part_of(share, layout, unit) for share in shares_of(model, turns=turns)]
    ref = BlockRef(1, 2, 3000, layout.nbytes)
    for number in range(6 * turns * unit // block):
        tokens = range(number * block, (number + 1) * block)
        (owner,) = {token // unit % turns for token in tokens}
        assert [part.owns(number) for part in parts] == [turn == owner for turn in range(turns)]
    for part in parts:
        assert list(part.ranges(ref)) == [(3000, layout.nbytes)]
        assert not part.sums


# ------------------------------------------------------------------------------- blocks know nothing of sizes

GROUP = 11
"""Blocks of a sequence that are moved at once: with units of 4 blocks, no whole number of rounds."""

MODEL = sized(2, 3)
PAGES = 64


class Ranks:
    """Ranks of one size, each with a real engine, staging memory and runner, and one sequence on all of them.

    pages   of the sequence, the same numbers on each rank
    """

    def __init__(self, pool: BytePool, *, members: int = 1, turns: int = 1) -> None:
        shares, whole = shares_of(MODEL, members=members, turns=turns), layout_of(MODEL)
        self.shares, moves = shares, SimpleNamespace(submit=pool.submit)
        order = np.random.default_rng(members * 10 + turns).permutation(PAGES).tolist()
        rows = -(-GROUP * 4 // (16 * turns)) * 16
        self.pages = order[:rows]
        self.engines, self.runners = list[Engine](), list[Runner]()
        for share in shares:
            config: Any = share.part_of(MODEL)
            model: Any = SimpleNamespace(config=config, dtype=torch.float32, device=torch.device("cpu"))
            engine = Engine(model, PAGES, 64)
            layout = layout_of(MODEL, share)
            blocks = StagingBlocks(np.zeros(2 * 16 * layout.nbytes, np.uint8), layout, engine)
            blocks.half_blocks, blocks.num_slots = 12, 8
            alone = members * turns == 1
            part = None if alone else part_of(share, whole, UNIT)
            compute = None if alone else engine.compute
            self.engines.append(engine)
            self.runners.append(Runner(engine, blocks, moves, compute, part))  # type: ignore[arg-type]

    def places(self) -> list[tuple[int, list[int]]]:
        """(turn of the owner, its pages) of each block of the sequence."""
        turns, found = self.shares[0].turns, []
        for number in range(GROUP):
            unit, within = divmod(number, 4)
            first = unit // turns * 16 + within * 4
            found.append((unit % turns, self.pages[first : first + 4]))
        return found

    def fill(self, kv: np.ndarray) -> None:
        """Put KV into pages. kv: (blocks, layers, 2, kv_heads, 64, head_dim)"""
        for engine in self.engines:
            engine.caches.fill_(float("nan"))
        for block, (turn, pages) in zip(kv, self.places()):
            for share, engine in zip(self.shares, self.engines):
                if share.turn == turn:
                    own = block[:, :, share.kv_heads.start : share.kv_heads.stop]
                    for number, page in enumerate(pages):
                        engine.caches[:, :, page] = torch.from_numpy(
                            own[:, :, :, 16 * number : 16 * (number + 1)].copy()
                        )

    def found(self) -> np.ndarray:
        """The KV in pages, as fill() has it."""
        kv = np.full((GROUP, MODEL.layers, 2, MODEL.kv_heads, 64, MODEL.head_dim), np.nan, np.float32)
        for block, (turn, pages) in zip(kv, self.places()):
            for share, engine in zip(self.shares, self.engines):
                if share.turn == turn:
                    for number, page in enumerate(pages):
                        block[
                            :, :, share.kv_heads.start : share.kv_heads.stop, 16 * number : 16 * (number + 1)
                        ] = engine.caches[:, :, page].numpy()
        return kv

    def run(self, step: Step) -> list[Result]:
        """Do a step on each of them, as it comes over the wire, until what it begins has ended."""
        results = []
        for runner in self.runners:
            (order,) = orders_of(step)
            heard = step_of(Decoder(MemberStep).decode(encode(order)), 0.0)
            result = runner.run(heard)
            while runner.is_moving:
                result = replace(result, halves=[*result.halves, *runner.run(Step(1.0)).halves])
            assert [end.problem for end in (*result.halves, *result.puts)] == [""]
            results.append(result)
        return results

    def pages_of(self, numbers: Sequence[int]) -> list[int]:
        places = self.places()
        return [page for number in numbers for page in places[number][1]]

    def write(self, places: Sequence[BlockRef], numbers: Sequence[int]) -> None:
        self.run(Step(0.0, writes=(WriteGroup(1, self.pages_of(numbers), places, A, 0, numbers=numbers),)))

    def put(self, places: Sequence[BlockRef], numbers: Sequence[int]) -> None:
        """The same by way of slots, in another order."""
        for place, number in zip(places, numbers):
            save = SaveBlock(A, number, (), 0, None, self.pages_of([number]), number % 5)
            for runner in self.runners:
                (order,) = orders_of(Step(0.0, saves=(save,)))
                runner.run(step_of(order, 0.0))
            self.run(Step(0.0, puts=(WritePut(number, (number % 5,), (place,)),)))

    def read(self, places: Sequence[BlockRef], first: int) -> None:
        numbers = range(first, first + len(places))
        self.run(Step(0.0, reads=(ReadGroup(0, places, A, first),)))
        for runner in self.runners:
            (order,) = orders_of(Step(1.0, lands=(LandGroup(0, len(places), self.pages_of(numbers), A),)))
            runner.run(step_of(order, 1.0))


SIZES = [{}, {"members": 2}, {"members": 3}, {"turns": 2}, {"turns": 3}]


def kv_and_pool() -> tuple[np.ndarray, BytePool, list[BlockRef]]:
    shape = (GROUP, MODEL.layers, 2, MODEL.kv_heads, 64, MODEL.head_dim)
    kv = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
    pool = BytePool(layout_of(MODEL).nbytes)
    return kv, pool, [pool.new_place() for _ in range(GROUP)]


def test_equal_kv_gives_equal_bytes_of_a_block_at_every_size() -> None:
    kv, pool, places = kv_and_pool()
    for size in SIZES:
        ranks = Ranks(pool, **size)
        ranks.fill(kv)
        ranks.write(places[:7], range(7))
        ranks.put(places[7:], range(7, GROUP))
        bytes_of = [pool._blocks[place.offset].copy() for place in places]
        if not size:
            wanted = bytes_of
            np.testing.assert_array_equal(np.array(wanted).reshape(-1).view(np.float32), kv.reshape(-1))
        for number, (found, bytes_) in enumerate(zip(bytes_of, wanted, strict=True)):
            np.testing.assert_array_equal(found, bytes_, f"block {number} of {size}")
        for place in places:
            pool._blocks[place.offset][:] = 0xAB


@pytest.mark.parametrize("reader", SIZES, ids=str)
@pytest.mark.parametrize("writer", SIZES, ids=str)
def test_kv_that_members_of_one_size_wrote_is_read_by_those_of_another(
    writer: dict[str, int], reader: dict[str, int]
) -> None:
    kv, pool, places = kv_and_pool()
    wrote = Ranks(pool, **writer)
    wrote.fill(kv)
    wrote.write(places[3:10], range(3, 10))
    wrote.write([places[n] for n in (10, 1, 0, 2)], (10, 1, 0, 2))  # of a swap: some are missing between them
    read = Ranks(pool, **reader)
    read.fill(np.full_like(kv, 5.0))
    read.read(places[:5], 0)
    read.read(places[5:], 5)
    np.testing.assert_array_equal(read.found(), kv)


def test_a_member_moves_its_own_blocks_alone() -> None:
    kv, pool, places = kv_and_pool()
    ranks = Ranks(pool, turns=3)
    ranks.fill(kv)
    own = ranks.runners[1]
    moved: list[Transfer] = []
    submit = own._transfers.submit

    def noted(moves: Sequence[Transfer], label: Any) -> Any:
        moved.extend(moves)
        return submit(moves, label)

    own._transfers.submit = own._halves._transfers.submit = own._puts._transfers.submit = noted  # type: ignore[method-assign]
    loaded, stored = list[list[int]](), list[list[int]]()
    engine = own.engine
    own.engine = SimpleNamespace(  # type: ignore[assignment]
        load_blocks=lambda pages, blocks: loaded.append(list(pages)),
        store_blocks=lambda pages, blocks: stored.append(list(pages)),
    )
    numbers = range(2, 10)  # blocks 4 to 7 are its own
    pages = ranks.pages_of(numbers)
    own.run(Step(0.0, reads=(ReadGroup(0, places[2:10], A, 2),)))
    own.run(Step(0.0, lands=(LandGroup(0, 8, pages, A),)))
    own.run(Step(0.0, writes=(WriteGroup(1, pages, places[2:10], A, 0, numbers=numbers),)))
    while own.is_moving:
        own.run(Step(1.0))
    saves = tuple(SaveBlock(A, n, (), 0, None, ranks.pages_of([n]), n - 2) for n in (3, 6, 8))
    assert own.run(Step(2.0, saves=saves)).saved == [[], [], []], "the first member makes the sums of blocks"
    own.run(Step(3.0, puts=(WritePut(0, (1, 4, 6), (places[3], places[6], places[8])),)))
    own.run(Step(4.0, puts=(WritePut(1, (6,), (places[8],)),)))
    mine = [places[n].offset for n in (4, 5, 6, 7)]
    assert [(move.op, move.offset) for move in moved] == [
        *(("read", offset) for offset in mine), *(("write", offset) for offset in mine), ("write", mine[2])
    ]  # fmt: skip
    of_blocks = [pages[4 * n : 4 * n + 4] for n in (2, 3, 4, 5)]
    assert loaded == of_blocks
    assert stored == [*of_blocks, of_blocks[2]]
    own.engine = engine


# ------------------------------------------------------------------------------- what all have done

RANKS = (4, 5, 6)
LAYOUT = BlockLayout(2, 3, 16, 8, 4)


class Memory:
    """Segments, of which rank 9's is mapped here. problem: of each read."""

    def __init__(self) -> None:
        self.segment = np.random.default_rng(1).integers(0, 255, 8 * LAYOUT.nbytes, np.uint8)
        self.problem, self.reads = "", list[Transfer]()

    def mapped(self, rank: int) -> np.ndarray | None:
        return self.segment if rank == 9 else None

    def submit(self, moves: Sequence[Transfer], label: Any) -> Memory:
        for move in moves:
            assert move.op == "read"
            self.reads.append(move)
            move.local[:] = self.segment[move.offset : move.offset + move.nbytes]
        return self

    def wait(self, limit_s: float) -> None:
        if self.problem:
            raise TransferError(self.problem)


class First:
    """The first of three members, with a runner that a test plays."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Any]] = []
        self.heard: list[Any] = []
        self.ends = (list[TransferEnded](), list[TransferEnded]())
        self.during: Any = lambda moved: None
        self.memory = Memory()
        moves: Any = self.memory
        own: Any = SimpleNamespace(run=self._run)
        self.peers = Peers(
            RANKS, 0, self._receive, lambda number, message: self.told.append((number, message))
        )
        self.leader = Leader(own, self.peers, WholeBlocks(moves, LAYOUT).sums_of)

    def _receive(self, wait_s: float) -> list[Any]:
        came, self.heard = self.heard, []
        return [Decoder(TO_MEMBER).decode(encode(one)) for one in came]

    def _run(self, step: Step, moved: Any) -> Result:
        self.during(moved)
        (halves, puts), self.ends = self.ends, ([], [])
        return Result(step, halves=halves, puts=puts)

    def step(self, step: Step | None = None, moved: Any = None) -> Result:
        return self.leader.run(step or Step(0.0), moved)

    def others_end(self, number: int, put: bool = False, problems: tuple[str, str] = ("", "")) -> None:
        self.heard += [
            PartEnded(member, put, TransferEnded(number, problem, bool(problem)))
            for member, problem in zip((1, 2), problems)
        ]

    def sums(self, *refs: BlockRef) -> list[list[int]]:
        return [LAYOUT.checksums(self.memory.segment[ref.offset : ref.offset + ref.nbytes]) for ref in refs]

    def refs(self, count: int, rank: int = 9, checked: bool = False) -> list[BlockRef]:
        found = [BlockRef(n, rank, n * LAYOUT.nbytes, LAYOUT.nbytes) for n in range(count)]
        return [replace(ref, check=check_of(self.sums(ref)[0])) for ref in found] if checked else found


def test_halves_and_puts_of_one_number_are_two_transfers() -> None:
    first, (one, *more) = First(), First().refs(3)
    first.step(
        Step(
            0.0,
            writes=(WriteGroup(1, [0], [one], A, 0, numbers=[0]),),
            puts=(WritePut(1, (0, 1), tuple(more)),),
        )
    )
    first.ends = [TransferEnded(1)], []
    first.heard = [PartEnded(1, False, TransferEnded(1)), PartEnded(2, True, TransferEnded(1))]
    assert first.step().halves == []
    first.ends = [], [TransferEnded(1)]
    first.heard = [PartEnded(1, True, TransferEnded(1))]
    result = first.step()
    assert (result.halves, result.puts) == ([], [TransferEnded(1, sums=first.sums(*more))])
    first.heard = [PartEnded(2, False, TransferEnded(1))]
    result = first.step()
    assert (result.halves, result.puts) == ([TransferEnded(1, sums=first.sums(one))], [])


@pytest.mark.parametrize("rank", [9, 3], ids=["mapped", "read"])
def test_the_sums_of_what_was_written_are_those_of_the_blocks_where_they_lie(rank: int) -> None:
    first = First()
    places = first.refs(3, rank)
    first.step(Step(0.0, writes=(WriteGroup(0, [0], places, A, 0, numbers=[0, 1, 2]),)))
    first.others_end(0)
    before = first.memory.segment.copy()
    first.memory.segment[:] = before[::-1]  # what lies there when the last part has ended is what counts
    first.ends = [TransferEnded(0, sums=[[], [], []])], []
    (whole,) = first.step().halves
    assert whole == TransferEnded(0, sums=first.sums(*places))
    assert [move.offset for move in first.memory.reads] == (
        [] if rank == 9 else [one.offset for one in places]
    )


@pytest.mark.parametrize("rank", [9, 3], ids=["mapped", "read"])
def test_what_was_read_is_compared_where_it_lies_if_it_has_to_be(rank: int) -> None:
    first = First()
    places = first.refs(4, rank, checked=True)
    places[1] = replace(places[1], check=0)
    for number, damaged in enumerate(([], [1], [2], [0, 1, 3])):
        first.step(Step(0.0, reads=(ReadGroup(0, places, A, 0),)))
        intact = first.memory.segment.copy()
        for block in damaged:
            first.memory.segment[block * LAYOUT.nbytes + 5] ^= 1
        first.others_end(0)
        first.ends = [TransferEnded(0)], []
        (end,) = first.step().halves
        bad = [places[block] for block in damaged if places[block].check]
        assert end == TransferEnded(0, BAD if bad else "", bad=bad), number
        first.memory.segment[:] = intact


def test_blocks_whose_sums_cannot_be_made_are_a_transfer_that_has_failed() -> None:
    first = First()
    first.memory.problem = "rank 3 is lost"
    first.step(Step(0.0, writes=(WriteGroup(0, [0], first.refs(1, 3), A, 0, numbers=[0]),)))
    first.others_end(0)
    first.ends = [TransferEnded(0)], []
    assert first.step().halves == [TransferEnded(0, "rank 3 is lost")]
    first.step(Step(0.0, writes=(WriteGroup(0, [0], first.refs(1, 9), A, 0, numbers=[0]),)))
    first.others_end(0)
    first.ends = [TransferEnded(0)], []
    assert first.step().halves[0].problem == "", "the next one is another matter"


@pytest.mark.parametrize("member", [0, 1, 2])
def test_a_part_that_has_failed_fails_the_transfer_and_no_sums_are_made(member: int) -> None:
    first = First()
    first.step(Step(0.0, writes=(WriteGroup(0, [0], first.refs(1, 3), A, 0, numbers=[0]),)))
    problems = ["cut" if number == member else "" for number in range(3)]
    first.others_end(0, problems=(problems[1], problems[2]))
    first.ends = [TransferEnded(0, problems[0], bool(problems[0]))], []
    assert first.step().halves == [TransferEnded(0, "cut", True)]
    assert first.memory.reads == []


def test_ends_are_told_during_a_pass_and_puts_with_its_result() -> None:
    first = First()
    seen: list[Any] = []
    (place,) = first.refs(1)
    step = Step(
        0.0,
        writes=(WriteGroup(0, [0], [place], A, 0, numbers=[0]),),
        puts=(WritePut(7, (0,), (place,)),),
        chunks=(Chunk(A, [1], 5, [0], (Draw(Sampling(), [1] * 6, 1, frozenset()),), False),),
    )

    def during(moved: Any) -> None:
        first.others_end(0)
        first.others_end(7, put=True)
        moved([])
        assert seen == [], "the first member still moves"
        moved([TransferEnded(0)])
        moved([])

    first.during, first.ends = during, ([], [TransferEnded(7)])
    result = first.step(step, lambda *one: seen.append(one))
    ended = TransferEnded(0, sums=first.sums(place))
    assert seen == [([ended], [])]
    assert (result.halves, result.puts) == ([], [TransferEnded(7, sums=first.sums(place))])
    assert result.step is step
    first.during = lambda moved: None
    assert first.step().puts == []


def test_a_put_whose_last_part_ends_during_a_pass_is_not_lost() -> None:
    first = First()
    (place,) = first.refs(1)
    first.ends = [], [TransferEnded(7)]
    first.step(Step(0.0, puts=(WritePut(7, (0,), (place,)),)))

    def during(moved: Any) -> None:
        first.others_end(7, put=True)
        moved([])

    first.during = during
    chunk = Chunk(A, [1], 5, [0], (Draw(Sampling(), [1] * 6, 1, frozenset()),), False)
    result = first.step(Step(0.0, chunks=(chunk,)), lambda *one: None)
    assert result.puts == [TransferEnded(7, sums=first.sums(place))]


def test_of_members_no_tokens_are_due_and_of_puts_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(members.time, "monotonic", lambda: clock.now)
    first = First()
    draws = (Draw(Sampling(), [1], 0, frozenset()),)
    first.step(Step(0.0, chunks=(Chunk(A, [1], 0, [0], draws, True),)))
    clock.now += 10 * members.SILENCE_LIMIT_S
    first.step()
    first.ends = [], [TransferEnded(7)]
    first.step(Step(0.0, puts=(WritePut(7, (0,), tuple(first.refs(1))),)))
    clock.now += members.SILENCE_LIMIT_S + 1
    with pytest.raises(RuntimeError, match="other ranks of the instance have reported nothing for 600 s"):
        first.step()


# ------------------------------------------------------------------------------- what is told


def a_step() -> Step:
    """A step with everything in it that a rank does: a row with drafts and a prompt, both forked."""
    sampling = Sampling(0.7, seed=4)
    row = tuple(Draw(sampling, [1, 2, 3], 2, frozenset({8}), 1, tuple(range(n))) for n in range(3))
    prompt = tuple(Draw(Sampling(0.0), [4, 5], 0, frozenset({8}), branch) for branch in range(2))
    refs = First().refs(5, checked=True)
    return Step(
        5.0,
        grow=(Growth(A, (7,), 3), Growth(A, (8,)), Growth(A, (9,), 1)),
        reads=(ReadGroup(0, refs[:2], A, 3),),
        lands=(LandGroup(1, 1, [8, 9], A),),
        writes=(WriteGroup(1, [2, 3, 4], refs[2:4], A, 5, numbers=(6, 9)),),
        saves=(SaveBlock(A, 4, [1, 2], 77, 66, [5, 6], 3), SaveBlock(A, 5, [3, 4], 88, 77, [7], 0)),
        puts=(WritePut(6, (2, 1), (refs[3], refs[4])),),
        chunks=(
            Chunk(A, [3, 10, 11], 2, [4, 5], row, False),
            Chunk(JobId("b", 0), [4, 5], 0, [6], prompt, True),
        ),
    )


def test_copies_saves_puts_and_rows_with_drafts_are_the_same_behind_the_wire() -> None:
    step, heard = a_step(), Peers(RANKS, 1, lambda wait_s: (), lambda number, message: None)
    for order in orders_of(step):
        heard.hear(Decoder(TO_MEMBER).decode(encode(order)))
    moves, passes = (step_of(order, 6.0) for order in heard.steps)
    assert [(one.copies, one.pages) for one in moves.grow] == [(3, (7,)), (1, (9,))]
    assert [(one.half, list(one.places), one.first) for one in moves.reads] == [
        (0, list(step.reads[0].places), 3)
    ]
    (land,) = moves.lands
    assert (land.half, land.count, list(land.pages)) == (1, 1, [8, 9])
    (write,) = moves.writes
    assert (write.half, list(write.places), list(write.pages), list(write.numbers), write.behind) == (
        1, list(step.writes[0].places), [2, 3, 4], [6, 9], False,
    )  # fmt: skip
    assert [(one.index, list(one.pages), one.slot) for one in moves.saves] == [(4, [5, 6], 3), (5, [7], 0)]
    assert [(one.put, list(one.slots), list(one.places)) for one in moves.puts] == [
        (6, [2, 1], list(step.puts[0].places))
    ]
    assert moves.chunks == ()
    row, prompt = passes.chunks
    assert (row.job, list(row.token_ids), row.start, list(row.pages), row.prompt) == (
        A, [3, 10, 11], 2, [4, 5], False,
    )  # fmt: skip
    assert [len(one.token_ids) for one in row.rows] == [1, 1, 1], "an engine computes a row for each token"
    assert [bool(one.draws) for one in row.rows] == [True] * 3, "logits of all of them are wanted"
    assert prompt == step.chunks[1]


def test_a_step_that_copies_pages_alone_is_told() -> None:
    (order,) = orders_of(Step(0.0, grow=(Growth(A, (7,), 3),)))
    assert order.copies == [(3, 7)]
    assert orders_of(Step(0.0, grow=(Growth(A, (7,)),))) == []


def test_a_member_that_has_drawn_nothing_reports_no_tokens() -> None:
    result = Result(a_step(), halves=[TransferEnded(1)], puts=[TransferEnded(6)])
    assert reports_of(2, result) == [
        PartEnded(2, False, TransferEnded(1)), PartEnded(2, True, TransferEnded(6))
    ]  # fmt: skip


def test_the_first_member_dismisses_all_others_and_another_one_nobody() -> None:
    first = First()
    first.peers.leave()
    assert first.told == [(1, Dismissed()), (2, Dismissed())]
    told: list[Any] = []
    other = Peers(RANKS, 2, lambda wait_s: [Dismissed()], lambda number, message: told.append(message))
    other.leave()
    assert told == []
    assert not other.dismissed
    other.look()
    assert other.dismissed
    assert not other.can_begin


def test_reports_and_orders_are_kept_in_their_order() -> None:
    late = LateTokens((*A,), [5], [None], [])
    came = [
        PartEnded(1, False, TransferEnded(0)),
        MemberStep(copies=[(1, 2)]),
        late,
        MemberStep(copies=[(3, 4)]),
    ]
    peers = Peers(RANKS, 0, lambda wait_s: came, lambda number, message: None)
    peers.look()
    assert [*peers.ended] == [came[0], late]
    steps = [peers.next_step(), peers.next_step(), peers.next_step()]
    assert [one and one.copies for one in steps] == [[(1, 2)], [(3, 4)], None]


def test_a_runner_without_a_part_has_all_of_each_block() -> None:
    runner = Runner(SimpleNamespace())  # type: ignore[arg-type]
    assert runner._owns(0)
    assert runner._owns(99)
    part = Part(lambda ref: [], False)
    assert part.owns(99)
