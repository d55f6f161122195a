"""Choosing and cutting, without MPI: which nodes are measured, which path wins, what a job becomes."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from transport.bulk import links
from transport.bulk.batch import Batch, Transfer
from transport.bulk.copier import Copier
from transport.bulk.jobs import MAX_BYTES, MAX_RANGES, TransferJob, jobs_of
from transport.bulk.lent import LentBuffers
from transport.bulk.links import Link, Links, measure_link, ring
from transport.bulk.socket_path import LEAST_PIECE_BYTES, MOST_PIECE_BYTES, cut
from transport.errors import TransferCancelled, TransferRefused, TransferTimeout

pytestmark = pytest.mark.quick

MIB = 2**20


def batch_of(parts: int, stop: Any = lambda batch: None) -> Batch:
    batch = Batch([], lambda batch: None, stop)
    batch.add_parts(parts)
    return batch


@pytest.mark.parametrize("nodes", range(1, 12))
def test_each_pair_of_nodes_is_measured_once_and_by_everybody_alike(nodes: int) -> None:
    pairs = [frozenset((node, other)) for node in range(nodes) for other in ring(node, nodes)]
    assert len(pairs) == len(set(pairs)) == nodes * (nodes - 1) // 2
    counts = [len(ring(node, nodes)) for node in range(nodes)]
    assert max(counts) - min(counts) <= 1


def test_small_transfers_go_where_latency_is_low_and_large_ones_where_bandwidth_is_high() -> None:
    quick, wide = Link("two_sided", 1e-5, 1e9), Link("sockets", 1e-4, 4e9, streams=2)
    known = Links({1: [wide, quick]})
    assert [link.path for link in known.ranked(1, 4096)] == ["two_sided", "sockets"]
    assert [link.path for link in known.ranked(1, MIB)] == ["sockets", "two_sided"]
    assert known.ranked(7, MIB) == []


def test_more_connections_are_used_only_where_they_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(links.time, "perf_counter", lambda: now)
    per_mib_s = {1: 0.0010, 2: 0.0009, 4: 0.0005}

    def read(path: str, rank: int, buffer: np.ndarray, streams: int, limit_s: float) -> None:
        nonlocal now
        now += per_mib_s[streams] * buffer.nbytes / MIB

    assert (link := measure_link(read, "sockets", 1, (1, 2))) is not None
    assert (link.path, link.streams) == ("sockets", 1)
    assert (link := measure_link(read, "sockets", 1, (1, 2, 4))) is not None
    assert link.streams == 4
    assert link.bytes_per_s == pytest.approx(MIB / 0.0005)


def test_a_path_that_fails_is_no_link() -> None:
    def read(*_: object) -> None:
        raise TransferRefused("no")

    assert measure_link(read, "sockets", 1) is None


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_the_pieces_of_a_job_are_the_job(streams: int) -> None:
    rng = np.random.default_rng(3)
    sizes = [0, 1, 5 * MIB, 0, 17, 40 * MIB, 3 * MIB, 0]
    views = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    job = TransferJob("read", 1, 0, batch_of(1), list(range(8)), views, [100 * MIB * at for at in range(8)])
    pieces = cut(job, streams)
    there = {offset + at: view for (offset, view) in zip(job.offsets, views) for at in (0,)}
    assert sum(nbytes for ranges, _ in pieces for _, nbytes in ranges) == job.nbytes
    for ranges, parts in pieces:
        assert sum(nbytes for _, nbytes in ranges) <= MOST_PIECE_BYTES
        for (offset, nbytes), part in zip(ranges, parts, strict=True):
            start = max(begin for begin in there if begin <= offset)
            assert np.array_equal(part, there[start][offset - start : offset - start + nbytes])
    assert all(sum(n for _, n in ranges) >= LEAST_PIECE_BYTES for ranges, _ in pieces[:-1])
    empty = cut(TransferJob("read", 1, 0, batch_of(1), [0], [np.zeros(0, np.uint8)], [0]), streams)
    assert empty == [([], [])]


def test_a_batch_of_many_ranges_becomes_jobs_of_bounded_length() -> None:
    count = MAX_RANGES + 5
    transfers = [Transfer("read", None, 2, 0, at, 1) for at in range(count)]
    batch = Batch(transfers, lambda batch: None, lambda batch: None)
    jobs = jobs_of(batch, {(2, "read", 0): [(at, np.zeros(1, np.uint8)) for at in range(count)]})
    assert [len(job.views) for job in jobs] == [MAX_RANGES, 5]
    assert jobs[1].offsets == jobs[1].indices == list(range(MAX_RANGES, count))
    long = Batch([Transfer("read", None, 2, 0, 7, 0)], lambda batch: None, lambda batch: None)
    jobs = jobs_of(long, {(2, "read", 0): [(0, np.zeros(2 * MAX_BYTES + 1, np.uint8))]})
    assert [(job.indices, job.offsets, job.nbytes) for job in jobs] == [
        ([0], [7], MAX_BYTES),
        ([0], [7 + MAX_BYTES], MAX_BYTES),
        ([0], [7 + 2 * MAX_BYTES], 1),
    ]


def test_a_callback_comes_once_and_a_failing_one_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    batch = batch_of(2)
    called: list[Batch] = []
    batch.add_done_callback(lambda batch: 1 / 0)
    batch.add_done_callback(called.append)
    batch.end_parts(1)
    assert called == []
    batch.end_parts(1)
    assert called == [batch]
    assert "a callback of a batch of 0 transfers failed" in caplog.text
    batch.add_done_callback(called.append)
    assert called == [batch, batch]


def test_a_batch_can_be_awaited_beside_other_tasks() -> None:
    async def main() -> None:
        good, bad, late = batch_of(1), batch_of(1), batch_of(1)
        threading.Timer(0.01, good.end_parts, (1,)).start()
        threading.Timer(0.01, bad.end_parts, (1, {0: TransferRefused("no")})).start()
        await good.done(5)
        with pytest.raises(TransferRefused):
            await bad.done(5)
        with pytest.raises(TransferTimeout, match="1 parts of the batch are not done"):
            await late.done(0.01)
        late.end_parts(1)
        await late.done(0)

    asyncio.run(main())


def test_copies_that_nobody_has_begun_are_cancelled_and_the_others_end() -> None:
    copier = Copier(lambda *_: None)
    batch = batch_of(0, copier.cancel)
    targets = [np.zeros(9, np.uint8) for _ in range(3)]
    copier.plan(batch, [(target, np.ones(9, np.uint8), (0, "read"), at) for at, target in enumerate(targets)])
    batch.add_parts(len(batch.copies))
    batch.cancel()
    with pytest.raises(TransferCancelled):
        batch.wait(1)
    assert sorted(batch.failures) == [0, 1, 2]
    assert not any(target.any() for target in targets)
    copier.close()


def test_a_loan_that_does_not_end_is_cut_when_its_segment_is_withdrawn() -> None:
    lent = LentBuffers()
    lent.expose(4, bytearray(100))
    cuts: list[int] = []

    def stop() -> None:
        cuts.append(1)
        lent.give_back(loan, False)

    loan = lent.borrow(4, [10], [20], True, 9, stop)
    assert lent.queued_bytes == 20
    lent.withdraw(4, 0.01)
    lent.give_back(loan, False)
    assert (cuts, lent.queued_bytes, lent.served) == ([1], 0, {"read": 0, "written": 0})
    lent.check()
