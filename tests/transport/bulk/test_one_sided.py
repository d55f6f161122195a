"""One-sided transfers without MPI: windows made of plain memory show what the threads do with each other."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.patience import wait_until
from transport.bulk.batch import Batch
from transport.bulk.flight import Flight
from transport.bulk.jobs import TransferJob
from transport.bulk.one_sided import OneSided
from transport.errors import EngineClosed, TransferCancelled, TransferError

pytestmark = pytest.mark.quick

LIMIT_S = 20.0


class MpiError(Exception):
    pass


class Done:
    """A request that has ended."""

    def Test(self) -> bool:
        return True


class Window:
    """Moves nothing, and at once."""

    def Rput(self, *_: object) -> Done:
        return Done()

    Rget = Rput

    def Flush(self, rank: int) -> None:
        pass


Ends = list[tuple[TransferError | None, bool]]


@pytest.fixture
def ends() -> Ends:
    """(error, safe) of each job that has ended."""
    return []


@pytest.fixture
def one_sided(ends: Ends) -> Iterator[OneSided]:
    world: Any = SimpleNamespace(size=2, rank=0, mpi=SimpleNamespace(Exception=MpiError, BYTE=None))
    path = OneSided(world, LIMIT_S, lambda rank: None, lambda job, error, safe: ends.append((error, safe)))
    path._windows[0] = Window()
    yield path
    path.close()
    path._leaving.set()
    for flusher in path._flushers.values():
        flusher.put(None)


def job_of(op: str, view: np.ndarray) -> TransferJob:
    return TransferJob(op, 1, 0, Batch([], id, id), [0], [view], [0])


@pytest.mark.parametrize("op", ["read", "write"])
def test_what_has_ended_keeps_no_buffer(one_sided: OneSided, ends: Ends, op: str) -> None:
    buffer = bytearray(100)
    one_sided.start(job_of(op, np.frombuffer(buffer, np.uint8)))
    assert wait_until(lambda: ends)

    def is_free() -> bool:
        try:
            buffer.append(0)  # Python refuses while anybody has a view of it
        except BufferError:
            return False
        return True

    assert wait_until(is_free)
    assert ends == [(None, True)]


def test_what_is_started_after_the_end_ends_too(one_sided: OneSided, ends: Ends) -> None:
    one_sided.close()
    one_sided.start(job_of("read", np.zeros(9, np.uint8)))
    assert wait_until(lambda: ends)
    assert [(type(error), safe) for error, safe in ends] == [(EngineClosed, True)]


def test_a_write_that_fails_at_the_moment_of_its_flush_has_ended(one_sided: OneSided) -> None:
    """Its failure is noted on one thread, the end of its Flush on another."""
    queued: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()

    class Meanwhile:
        rank, nbytes, cancelled = 1, 9, True

        @property
        def op(self) -> str:
            queued.put(flight)
            queued.put(None)
            one_sided._flush(1, queued)
            return "write"

    now = time.monotonic()
    flight = Flight(
        Meanwhile(),
        Window(),
        iter(()),
        now,
        now,
        now,
        more=False,
        begun=True,
        putting=True,
        flushing=True,  # type: ignore[arg-type]
    )
    with one_sided._lock:
        ((_, error, safe),) = one_sided._step(flight, now)
    assert isinstance(error, TransferCancelled)
    assert safe
