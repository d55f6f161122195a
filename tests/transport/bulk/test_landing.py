"""Batch.may_still_land: each row of the table in docs/explain/transport.md that needs no network."""

import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from transport.bulk.batch import Batch, Transfer
from transport.bulk.copier import Copier
from transport.bulk.courier import Courier
from transport.bulk.jobs import TransferJob
from transport.bulk.one_sided import OneSided
from transport.bulk.remote import PathCounters, Remote
from transport.bulk.requests import Accept, Cancel, Cancelled, Refuse
from transport.bulk.socket_io import Connection, welcome
from transport.bulk.sockets import BytesClient, BytesServer
from transport.bulk.sockets_messages import EAGER_BYTES, REQUEST_BYTES, Request
from transport.errors import (
    PeerLost,
    TransferCancelled,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from transport.wire import Decoder

pytestmark = pytest.mark.quick

SECRET = bytes(range(32))
LIMIT_S = 20.0
PEER = 1


def batch_of(parts: int) -> Batch:
    batch = Batch([Transfer("write", None, PEER, 0, 0, 9)], lambda batch: None, lambda batch: None)
    batch.add_parts(parts)
    return batch


def job_of(op: str, nbytes: int = 9) -> TransferJob:
    return TransferJob(op, PEER, 0, batch_of(1), [0], [np.zeros(nbytes, np.uint8)], [0])


def test_only_failures_whose_bytes_may_come_are_named() -> None:
    batch = batch_of(3)
    error = TransferTimeout("late", PEER)
    batch.end_parts(1, {0: error}, may_land=True)
    batch.end_parts(1, {4: error}, may_land=False)
    batch.end_parts(1, None, may_land=True)
    assert batch.poll()
    assert batch.may_still_land == {0}


def test_copies_that_were_cancelled_leave_nothing_to_come() -> None:
    copier = Copier(lambda *_: None)
    batch = batch_of(0)
    copier.plan(batch, [(np.zeros(9, np.uint8), np.ones(9, np.uint8), (PEER, "read"), 0)])
    batch.add_parts(1)
    copier.cancel(batch)
    copier.close()
    assert (sorted(batch.failures), batch.may_still_land) == ([0], set())


# ---------------------------------------------------------------------- two tries


Try = tuple[TransferError | None, bool, bool]
"""(error, whether it may be tried again, whether its bytes may still land)."""


class FakePath:
    """A path that ends each job at once, the next in a list of ends."""

    def __init__(self, remote: Remote, ends: list[Try]):
        self._remote, self._ends = remote, ends

    def start(self, job: TransferJob) -> None:
        error, again, may_land = self._ends.pop(0)
        job.may_land |= may_land
        self._remote._ended(job, error, again)

    def mark_lost(self, rank: int, reason: str) -> None:
        pass


def ended(op: str, *tries: Try) -> tuple[Batch, Remote]:
    """The batch of a job whose tries ended like this, and who counted them."""
    remote = Remote.__new__(Remote)  # one rank's, without the others
    remote.lost, remote._lock, remote._jobs = {}, threading.Lock(), set()
    remote._moved = Counter()
    remote._queued, remote._recent = {PEER: 0}, {}  # type: ignore[assignment]
    remote._paths = {"fake": FakePath(remote, list(tries))}  # type: ignore[dict-item]
    remote._counters = {"fake": PathCounters()}
    job = job_of(op)
    job.ways = ["fake"] * 2
    remote._begin(job)
    assert job.batch.poll()
    return job.batch, remote


def late() -> TransferTimeout:
    return TransferTimeout("nothing moved", PEER)


def dead() -> PeerLost:
    error = PeerLost(PEER, "nobody listens")
    error.nobody_listens = True
    return error


@pytest.mark.parametrize(
    ("op", "tries", "may_land"),
    [
        ("write", [(late(), True, False), (late(), True, False)], False),
        ("write", [(late(), False, True)], True),
        ("write", [(late(), True, True), (late(), True, False)], True),  # the bytes of the first try
        ("write", [(late(), True, True), (TransferRefused("no", PEER), True, False)], True),
        ("write", [(late(), True, True), (None, True, False)], False),  # the second try has succeeded
        ("write", [(late(), True, True), (dead(), True, True)], False),  # with the rank its segment is gone
        ("read", [(dead(), False, True)], True),  # MPI may still hold what the rank had sent
        ("read", [(late(), True, False), (dead(), True, False)], False),
    ],
)
def test_the_two_tries_of_a_job_decide_together(op: str, tries: list[Try], may_land: bool) -> None:
    batch, _ = ended(op, *tries)
    assert bool(batch.may_still_land) == may_land


def test_only_the_try_that_succeeds_moves_bytes() -> None:
    _, remote = ended("write", (late(), True, True), (None, True, False))
    assert remote.moved == {(PEER, "write"): 9}
    _, remote = ended("read", (late(), True, False), (late(), True, False))
    assert remote.moved == {}


# ---------------------------------------------------------------------- sockets


@pytest.fixture
def silent() -> Iterator[Callable[[], BytesClient]]:
    """A client of a server that knows the secret, reads requests, and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                connection = Connection(sock, "client")
                welcome(connection, SECRET, time.monotonic() + LIMIT_S)
                connection.receive_message(Decoder(Request, REQUEST_BYTES), time.monotonic() + LIMIT_S)
                over.wait(LIMIT_S)

        over = threading.Event()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield lambda: BytesClient(*listener.getsockname(), SECRET, timeout_s=LIMIT_S)
        over.set()
        thread.join(LIMIT_S)


@pytest.mark.parametrize(
    ("op", "nbytes", "may_land"),
    [
        ("write", 9, True),  # the bytes followed the request
        ("write", EAGER_BYTES + 1, False),  # they wait for Go
        ("read", 9, False),  # the connection is closed
    ],
)
def test_what_a_silent_server_may_still_put_in_place(
    silent: Callable[[], BytesClient], op: str, nbytes: int, may_land: bool
) -> None:
    client = silent()
    move = client.write if op == "write" else client.read
    with pytest.raises(TransferTimeout) as caught:
        move(7, [(0, nbytes)], [bytearray(nbytes)], 0.2)
    assert caught.value.may_land == may_land
    client.close()


def test_a_server_that_refuses_or_is_not_there_has_put_nothing_in_place() -> None:
    server = BytesServer(SECRET)
    client = BytesClient(*server.address, SECRET, timeout_s=LIMIT_S)
    with pytest.raises(TransferRefused) as refused:
        client.write(7, [(0, 9)], [bytearray(9)], LIMIT_S)
    client.close()
    server.close()
    client = BytesClient(*server.address, SECRET, timeout_s=LIMIT_S, at_once=False)
    with pytest.raises(PeerLost) as lost:
        client.write(7, [(0, 9)], [bytearray(9)], LIMIT_S)
    assert not refused.value.may_land
    assert not lost.value.may_land


# ---------------------------------------------------------------------- two-sided MPI


class MpiRequest:
    """A request that MPI holds for as long as `held` says so."""

    def __init__(self, held: Callable[[], bool]):
        self._held = held

    def Test(self) -> bool:
        return not self._held()

    def Cancel(self) -> None:
        pass


class FakeCourier(Courier):
    """The exchanges of one courier, without its thread; time passes when a test says so."""

    def __init__(self) -> None:
        def post(*_: object) -> MpiRequest:
            return MpiRequest(lambda: self.mpi_holds)

        self.mpi_holds = True
        self.sent: list[Any] = []
        self.over: list[tuple[TransferError | None, bool]] = []
        self._comm = SimpleNamespace(Isend=post, Irecv=post, Iprobe=lambda *_: False)
        self._world = SimpleNamespace(mpi=SimpleNamespace(Exception=KeyError))  # type: ignore[assignment]
        self._tags, self._stall_s, self._number = 1000, 5.0, 0
        self._moved_s = self._helping_until_s = 0.0
        self._exchanges, self._lost, self._kept, self._closing, self._over = {}, {}, [], False, False
        self._spokes = {PEER: SimpleNamespace(send=self.sent.append)}  # type: ignore[dict-item]
        self._ended = lambda job, error, safe: self.over.append((error, safe))

    def begin(self, op: str, accepted: bool = False) -> TransferJob:
        job = job_of(op)
        self._ask(job, time.monotonic())
        if accepted:
            self._on_message(PEER, Accept(self._number), time.monotonic())
            self._progress(time.monotonic())
        return job

    def stall(self, times: int = 1) -> None:
        for _ in range(times):
            self._progress(time.monotonic())  # what can still move has moved
            for exchange in self._exchanges.values():
                exchange.touched_s -= self._stall_s + 1
            self._progress(time.monotonic())


def test_a_write_that_was_never_accepted_has_sent_nothing() -> None:
    courier = FakeCourier()
    job = courier.begin("write")
    courier.stall()
    assert [(type(error), safe) for error, safe in courier.over] == [(TransferTimeout, True)]
    assert not job.may_land


def test_a_refused_write_has_sent_nothing() -> None:
    courier = FakeCourier()
    job = courier.begin("write")
    courier._on_message(PEER, Refuse(1, "no such segment"), time.monotonic())
    assert [(type(error), safe) for error, safe in courier.over] == [(TransferRefused, True)]
    assert not job.may_land


def test_a_write_that_stalls_is_over_once_its_target_has_let_go() -> None:
    courier = FakeCourier()
    job = courier.begin("write", accepted=True)
    courier.mpi_holds = False
    courier.stall()
    assert courier.over == []
    assert isinstance(courier.sent[-1], Cancel)
    courier._on_message(PEER, Cancelled(1), time.monotonic())
    courier._progress(time.monotonic())
    assert [safe for _, safe in courier.over] == [True]
    assert not job.may_land


def test_a_write_whose_target_does_not_answer_may_still_land() -> None:
    courier = FakeCourier()
    job = courier.begin("write", accepted=True)
    courier.mpi_holds = False
    courier.stall(2)
    assert [safe for _, safe in courier.over] == [False]
    assert job.may_land


@pytest.mark.parametrize("holds", [True, False])
def test_a_read_may_land_exactly_while_mpi_holds_its_receives(holds: bool) -> None:
    courier = FakeCourier()
    job = courier.begin("read")
    courier.mpi_holds = holds
    courier._give_up(job)
    courier.stall()
    assert [(type(error), safe) for error, safe in courier.over] == [(TransferCancelled, not holds)]
    assert job.may_land == holds


def test_what_is_cancelled_before_it_begins_leaves_nothing_to_come() -> None:
    courier = FakeCourier()
    job = job_of("write")
    job.cancelled = True
    courier._ask(job, time.monotonic())
    assert [type(error) for error, _ in courier.over] == [TransferCancelled]
    assert not job.may_land


# ---------------------------------------------------------------------- one-sided MPI


class Window:
    """Operations end, or do not; a Flush never does."""

    def __init__(self, ends: bool):
        self._ends, self.left = ends, threading.Event()

    def Rput(self, *_: object) -> MpiRequest:
        return MpiRequest(lambda: not self._ends)

    Rget = Rput

    def Flush(self, rank: int) -> None:
        self.left.wait(LIMIT_S)
        raise KeyError


@pytest.mark.parametrize(
    ("op", "ends", "may_land"),
    [("read", False, True), ("write", False, True), ("write", True, True)],
)
def test_one_sided_operations_cannot_be_taken_back(op: str, ends: bool, may_land: bool) -> None:
    over: queue.SimpleQueue[tuple[TransferJob, TransferError | None, bool]] = queue.SimpleQueue()
    world: Any = SimpleNamespace(size=2, rank=0, mpi=SimpleNamespace(Exception=KeyError, BYTE=None))
    path = OneSided(world, 0.05, lambda rank: None, lambda *end: over.put(end))
    path._windows[0] = window = Window(ends)
    path.start(job_of(op))
    job, error, safe = over.get(timeout=LIMIT_S)
    assert isinstance(error, TransferTimeout)
    assert (job.may_land, safe) == (may_land, False)
    path.start(job_of(op))
    job, error, safe = over.get(timeout=LIMIT_S)
    assert "stuck" in str(error), "nothing more is begun with that rank"
    assert (job.may_land, safe) == (False, True)
    window.left.set()
    path.close()
    path._leaving.set()
    for flusher in path._flushers.values():
        flusher.put(None)
