"""The runner without a model: which bytes it moves, and that it never waits for a transfer inside a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from mooncake_lite.engine import flights
from mooncake_lite.engine.runner import Runner
from mooncake_lite.engine.staging import StagingBlocks
from mooncake_lite.messages import BlockRef
from scheduler.instance import Step, TransferEnded
from scheduler.instance.step import Admission, Chunk, LandGroup, ReadGroup, SaveBlock, WriteGroup, WritePut
from store.layout import check_of
from transport.bulk.batch import Transfer
from transport.errors import BadTransfer, TransferError

pytestmark = pytest.mark.quick

NBYTES = 16
BLOCKS = 10


class FakeBatch:
    """A batch that a test ends; `waited` counts the calls that could have blocked."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self.transfers = transfers
        self.over = False
        self.failure: TransferError | None = None
        self.may_still_land: set[int] = set()
        self.waited = 0
        self.cancelled = False

    def poll(self) -> bool:
        return self.over

    def wait(self, timeout_s: float) -> None:
        assert timeout_s <= 0.0002, "a step that waits"
        self.waited += 1
        if self.failure is not None and self.over:
            raise self.failure

    def cancel(self) -> None:
        self.cancelled = True


class FakeTransfers:
    def __init__(self) -> None:
        self.batches: list[FakeBatch] = []
        self.refuses = False

    def submit(self, transfers: Sequence[Transfer], label: object) -> FakeBatch:
        if self.refuses:
            raise BadTransfer("offset 7 is outside the segment")
        self.batches.append(FakeBatch(transfers))
        return self.batches[-1]


class FakeEngine:
    """Pages that are single numbers: a block is filled with its page's number."""

    block_dtype = np.float32
    block_shape = (NBYTES // 4,)

    def __init__(self) -> None:
        self.loaded: list[tuple[list[int], list[float]]] = []

    def load_blocks(self, pages: Sequence[int], blocks: np.ndarray) -> None:
        self.loaded.append((list(pages), [float(block[0]) for block in blocks]))

    def store_blocks(self, pages: Sequence[int], out: np.ndarray) -> None:
        out[:] = np.array(pages, np.float32)[:, None]

    def compute(self, chunks: Sequence[Any], hook: Any = None) -> tuple[list[int], list[Any]]:
        return [7 for _ in chunks], []


class Rank:
    def __init__(self) -> None:
        self.engine: Any = FakeEngine()
        self.transfers: Any = FakeTransfers()
        layout: Any = SimpleNamespace(nbytes=NBYTES, checksums=lambda block: [int(block.flat[0])])
        segment = np.zeros(BLOCKS * NBYTES + 3, np.uint8)
        self.staging = StagingBlocks(segment, layout, self.engine)
        self.runner = Runner(self.engine, self.staging, self.transfers)

    def first_batch(self) -> Any:
        """Turn the loop until a transfer has begun."""
        deadline = time.monotonic() + 10
        while not self.transfers.batches:
            assert time.monotonic() < deadline
            self.runner.run(Step(0.5))
        return self.transfers.batches[0]


def refs(count: int) -> list[BlockRef]:
    return [BlockRef(n, 3, 100 * n, NBYTES) for n in range(count)]


def read(half: int = 0, count: int = 2) -> ReadGroup:
    return ReadGroup(half, refs(count), ("a", 0), 0)


def test_halves_and_slots_are_all_of_the_staging_and_do_not_overlap() -> None:
    staging = Rank().staging
    assert (staging.half_blocks, staging.num_slots) == (3, 4)
    for number in range(2):
        staging.half(number, 3)[:] += 1
    for number in range(4):
        staging.slot(number)[:] += 1
    assert (staging.blocks == 1).all()


def test_a_rank_moves_until_blocks_of_halves_and_puts_are_there() -> None:
    """A rank that follows another one has no other reason to look for the end of a put."""
    rank = Rank()
    assert not rank.runner.is_moving
    save = SaveBlock(("a", 0), 0, (1,), 11, None, (6,), 2)
    put = WritePut(9, (2,), refs(1))
    for begins in (Step(0.0, reads=(read(1),)), Step(0.0, saves=(save,), puts=(put,))):
        rank.runner.run(begins)
        assert rank.runner.is_moving
        rank.transfers.batches[-1].over = True
        assert rank.runner.is_moving, "its end has not been told"
        rank.runner.run(Step(1.0))
        assert not rank.runner.is_moving


def test_a_transfer_begins_in_one_step_and_ends_in_another() -> None:
    rank = Rank()
    assert rank.runner.run(Step(0.0, reads=(read(1),))).halves == []
    (batch,) = rank.transfers.batches
    assert [(move.op, move.rank, move.offset, move.nbytes) for move in batch.transfers] == [
        ("read", 3, 0, NBYTES),
        ("read", 3, 100, NBYTES),
    ]
    assert rank.runner.run(Step(1.0)).halves == []
    batch.over = True
    assert rank.runner.run(Step(2.0)).halves == [TransferEnded(1)]
    assert rank.runner.run(Step(3.0)).halves == []


def test_a_step_that_has_something_to_do_does_not_wait_for_transfers() -> None:
    rank = Rank()
    rank.runner.run(Step(0.0, Admission(("a", 0), ()), reads=(read(),)))
    (batch,) = rank.transfers.batches
    assert batch.waited == 0
    rank.runner.run(Step(1.0))
    assert batch.waited == 1


def test_a_read_lands_in_pages_from_its_half() -> None:
    rank = Rank()
    rank.runner.run(Step(0.0, reads=(read(1),)))
    for number, move in enumerate(rank.transfers.batches[0].transfers):
        move.local[:] = np.full(NBYTES // 4, 5.0 + number, np.float32).view(np.uint8)
    rank.runner.run(Step(1.0, lands=(LandGroup(1, 2, (8, 9), ("a", 0)),)))
    assert rank.engine.loaded == [([8, 9], [5.0, 6.0])]


def test_a_write_takes_its_bytes_from_pages_and_tells_their_checksums() -> None:
    rank = Rank()
    rank.runner.run(Step(0.0, writes=(WriteGroup(0, (4, 6), refs(2), ("a", 0), 0),)))
    batch = rank.first_batch()
    assert [move.local.view(np.float32)[0] for move in batch.transfers] == [4.0, 6.0]
    batch.over = True
    assert rank.runner.run(Step(1.0)).halves == [TransferEnded(0, sums=[[4], [6]])]


def test_a_group_is_copied_beside_the_chunk_of_its_step_and_leaves_in_the_middle_of_it() -> None:
    rank = Rank()
    copies, told = threading.Event(), []
    copied = rank.engine.store_blocks

    def store_blocks(pages: Sequence[int], out: np.ndarray) -> None:
        assert copies.wait(10)
        copied(pages, out)

    def compute(chunks: Sequence[Any], hook: Any = None) -> tuple[list[int], list[Any]]:
        hook.before(0)
        assert rank.transfers.batches == []
        copies.set()
        while not rank.transfers.batches:
            hook.before(0)
        rank.transfers.batches[0].over = True
        hook.before(0)
        return [], []

    rank.engine.store_blocks, rank.engine.compute = store_blocks, compute
    group = WriteGroup(0, (4, 6), refs(2), ("a", 0), 0)
    chunk = Chunk(("a", 0), (1,), 0, (0,), (), True)  # type: ignore[arg-type]
    rank.runner.run(Step(0.0, writes=(group,), chunks=(chunk,)), told.extend)
    assert told == [TransferEnded(0, sums=[[4], [6]])]


def test_a_saved_block_stays_in_its_slot_until_it_is_put() -> None:
    rank = Rank()
    block = SaveBlock(("a", 0), 0, (1,), 11, None, (6,), 2)
    assert rank.runner.run(Step(0.0, saves=(block,))).saved == [[6]]
    rank.runner.run(Step(1.0, puts=(WritePut(9, (2,), refs(1)),)))
    (batch,) = rank.transfers.batches
    assert batch.transfers[0].local.view(np.float32)[0] == 6.0
    batch.over = True
    assert rank.runner.run(Step(2.0)).puts == [TransferEnded(9)]


def test_a_failed_transfer_is_told_with_its_reason_and_whether_bytes_may_still_land() -> None:
    rank = Rank()
    rank.runner.run(Step(0.0, reads=(read(0), read(1))))
    first, second = rank.transfers.batches
    first.over = second.over = True
    first.failure, first.may_still_land = TransferError("cut"), {1}
    second.failure = TransferError("refused")
    assert rank.runner.run(Step(1.0)).halves == [TransferEnded(0, "cut", True), TransferEnded(1, "refused")]


def test_a_transfer_that_the_transport_refuses_has_failed_and_the_rank_lives() -> None:
    rank = Rank()
    rank.transfers.refuses = True
    result = rank.runner.run(Step(0.0, reads=(read(1),)))
    assert result.halves == [TransferEnded(1, "offset 7 is outside the segment")]


def test_a_transfer_that_is_late_is_cancelled_and_one_that_cannot_be_ends_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(flights.time, "monotonic", lambda: clock.now)
    rank = Rank()
    rank.runner.run(Step(0.0, reads=(read(),)))
    (batch,) = rank.transfers.batches
    clock.now += flights.TRANSFER_LIMIT_S - 1
    rank.runner.run(Step(1.0))
    assert not batch.cancelled
    clock.now += 2
    rank.runner.run(Step(2.0))
    assert batch.cancelled
    clock.now += flights.CANCEL_LIMIT_S
    with pytest.raises(
        RuntimeError, match="has not ended 60 s after its start, nor 10 s after it was cancelled"
    ):
        rank.runner.run(Step(3.0))


def test_what_is_read_is_compared_where_a_place_has_a_check() -> None:
    rank = Rank()
    good, bad, unchecked = (replace(ref, check=check) for ref, check in zip(refs(3), (check_of([0]), 1, 0)))
    rank.runner.run(Step(0.0, reads=(ReadGroup(0, (good, bad, unchecked), ("a", 0), 0),)))
    (batch,) = rank.transfers.batches
    for move in batch.transfers:
        move.local[:] = np.full(NBYTES // 4, 5.0, np.float32).view(np.uint8)
    batch.over = True
    (ended,) = rank.runner.run(Step(1.0)).halves
    assert ended.problem
    assert (ended.may_still_land, list(ended.bad)) == (False, [bad])


def test_blocks_move_from_the_begin_of_their_copy_to_the_end_of_their_transfer() -> None:
    rank, copies = Rank(), threading.Event()
    copied = rank.engine.store_blocks
    rank.engine.store_blocks = lambda pages, out: copies.wait(10) and copied(pages, out)
    assert not rank.runner.is_moving
    rank.runner.run(Step(0.0, writes=(WriteGroup(0, (4, 6), refs(2), ("a", 0), 0),)))
    assert rank.runner.is_moving
    copies.set()
    batch = rank.first_batch()
    assert rank.runner.is_moving
    batch.over = True
    rank.runner.run(Step(1.0))
    assert not rank.runner.is_moving
