"""Reading ahead: every order is answered once, with what was read, whatever happens."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from store.ssd.tier import HDF5Tier
from store.ssd.tier_reader import Read, TierReader
from tests.store.samples import SMALL, block_of, digest_of, fill

LIMIT_S = 30.0


class Answers:
    """number -> checksums, as the reader reports them."""

    def __init__(self):
        self.of: dict[int, list[list[int] | None]] = {}
        self._changed = threading.Condition()

    def __call__(self, number: int, sums: list[list[int] | None], seconds: float) -> None:
        with self._changed:
            assert number not in self.of
            assert seconds >= 0
            self.of[number] = sums
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.of) == count, LIMIT_S)


@pytest.fixture
def tier(tier: HDF5Tier) -> HDF5Tier:
    fill(tier, range(40))
    return tier


def reads(keys: list[int]) -> list[Read]:
    return [Read(key, digest_of(key), np.zeros(SMALL.nbytes, np.uint8)) for key in keys]


def hold(tier: HDF5Tier, monkeypatch) -> tuple[threading.Semaphore, threading.Event]:
    """(entered, go): loads wait until told to go on."""
    entered, go, load = threading.Semaphore(0), threading.Event(), tier.load

    def held(*args: object) -> list[int]:
        entered.release()
        assert go.wait(LIMIT_S)
        return load(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(tier, "load", held)
    return entered, go


def test_orders_are_read_into_their_buffers_and_reported_with_their_checksums(tier) -> None:
    answers = Answers()
    reader = TierReader(tier, answers)
    orders = [reads(list(range(start, start + 10))) for start in (0, 10, 20, 30)]
    for number, order in enumerate(orders):
        assert reader.submit(number, order)
    answers.wait_for(4)
    for number, order in enumerate(orders):
        assert answers.of[number] == [SMALL.checksums(block_of(read.key)) for read in order]
        assert all((read.out == block_of(read.key)).all() for read in order)
    reader.stop(LIMIT_S)
    assert reader.ended
    assert reader.failure is None


def test_a_missing_block_is_a_miss_and_the_rest_of_its_order_is_read(tier) -> None:
    answers = Answers()
    reader = TierReader(tier, answers)
    assert reader.submit(1, [*reads([1, 99]), Read(2, 5, np.zeros(SMALL.nbytes, np.uint8)), *reads([3])])
    answers.wait_for(1)
    assert [sums is None for sums in answers.of[1]] == [False, True, True, False]
    reader.stop(LIMIT_S)


def test_the_queue_is_bounded_and_an_order_that_does_not_fit_is_refused_whole(tier, monkeypatch) -> None:
    answers = Answers()
    reader = TierReader(tier, answers, threads=1, max_blocks=3)
    assert not reader.submit(0, reads([1, 2, 3, 4]))
    entered, go = hold(tier, monkeypatch)
    assert reader.submit(1, reads([1]))
    assert entered.acquire(timeout=LIMIT_S)
    assert reader.submit(2, reads([2, 3]))
    assert not reader.submit(3, reads([4, 5]))
    assert reader.stats() == {"refused": 2, "queued": 2}
    go.set()
    answers.wait_for(2)
    assert sorted(answers.of) == [1, 2]
    assert [sums is not None for sums in reader.read_now(reads([4, 99]))] == [True, False]
    reader.stop(LIMIT_S)


def test_stopping_answers_what_was_not_read_as_a_miss(tier, monkeypatch) -> None:
    answers = Answers()
    reader = TierReader(tier, answers, threads=1)
    entered, go = hold(tier, monkeypatch)
    assert reader.submit(1, reads([1, 2]))
    assert reader.submit(2, reads([3]))
    assert entered.acquire(timeout=LIMIT_S)
    reader.stop(0.0)
    assert not reader.ended
    assert answers.of == {2: [None]}
    assert not reader.submit(3, reads([4]))
    go.set()
    answers.wait_for(2)
    assert [sums is None for sums in answers.of[1]] == [False, True]
    reader.stop(LIMIT_S)
    assert reader.ended


def test_a_callback_that_fails_is_noted_and_reading_goes_on(tier) -> None:
    failed = threading.Event()

    def fail(number: int, sums: list[list[int] | None], seconds: float) -> None:
        failed.set()
        raise RuntimeError("the channel is closed")

    reader = TierReader(tier, fail, threads=1)
    reader.submit(1, reads([1]))
    assert failed.wait(LIMIT_S)
    failed.clear()
    reader.submit(2, reads([2]))
    assert failed.wait(LIMIT_S)
    reader.stop(LIMIT_S)
    assert str(reader.failure) == "the channel is closed"
