"""A thread that dies fails its jobs by name and calls on_fatal; nothing waits for it."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.patience import wait_until
from transport.bulk import copier, sockets_server
from transport.bulk.batch import Batch
from transport.bulk.copier import PIECE_BYTES, Copier
from transport.bulk.courier import Courier
from transport.bulk.jobs import TransferJob
from transport.bulk.lent import LentBuffers
from transport.bulk.one_sided import OneSided
from transport.bulk.socket_path import SocketPath
from transport.bulk.sockets import BytesClient, BytesServer
from transport.errors import PeerLost, TransferError
from transport.membership import Heart, Monitor
from transport.threads import start_thread

pytestmark = pytest.mark.quick

SECRET = bytes(range(32))
LIMIT_S = 20.0
PEER = 1


class Ends:
    """Collects what is told by other threads."""

    def __init__(self) -> None:
        self.fatal: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.jobs: queue.SimpleQueue[tuple[TransferJob, TransferError | None, bool]] = queue.SimpleQueue()

    def on_fatal(self, name: str, reason: str) -> None:
        self.fatal.put((name, reason))

    def ended(self, job: TransferJob, error: TransferError | None, safe: bool) -> None:
        self.jobs.put((job, error, safe))

    def died(self) -> tuple[str, str]:
        return self.fatal.get(timeout=LIMIT_S)

    def job(self) -> tuple[TransferJob, TransferError | None, bool]:
        return self.jobs.get(timeout=LIMIT_S)


@pytest.fixture
def ends() -> Ends:
    return Ends()


def boom(*_: object, **__: object) -> Any:
    raise KeyError("a bug of ours")


def job_of(op: str) -> TransferJob:
    return TransferJob(op, PEER, 0, Batch([], id, id), [0], [np.zeros(9, np.uint8)], [0])


# ---------------------------------------------------------------------- the helper


def test_both_handlers_hear_of_a_death_though_the_first_one_fails_too(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    def on_death(reason: str) -> None:
        told.append(reason)
        boom()

    start_thread("worker", boom, on_death=on_death, on_fatal=ends.on_fatal).join(LIMIT_S)
    assert told == ["thread worker died: KeyError: 'a bug of ours'"]
    assert ends.died() == ("worker", "KeyError: 'a bug of ours'")
    assert "thread worker died" in caplog.text
    assert "a handler of the end of thread worker failed" in caplog.text


def test_a_thread_that_exits_has_died_and_one_that_returns_has_not(ends: Ends) -> None:
    start_thread("quits", lambda: exec("raise SystemExit(3)"), on_fatal=ends.on_fatal).join(LIMIT_S)
    start_thread("returns", lambda given: given, 5, on_death=boom, on_fatal=ends.on_fatal).join(LIMIT_S)
    assert ends.died() == ("quits", "SystemExit: 3")
    assert ends.fatal.empty()


# ---------------------------------------------------------------------- bytes on one node


def test_the_copier_fails_what_it_had_and_what_comes_later(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batch_of(some: Copier) -> Batch:
        batch = Batch([], lambda batch: None, lambda batch: None)
        target = np.zeros(3 * PIECE_BYTES, np.uint8)
        some.plan(batch, [(target, np.ones_like(target), (0, "read"), 0)])
        batch.add_parts(len(batch.copies))
        return batch

    begun = threading.Event()
    broken = SimpleNamespace(copyto=lambda *_: begun.wait(LIMIT_S) and boom())
    monkeypatch.setattr(copier, "np", broken)
    some = Copier(lambda *_: None, ends.on_fatal)
    first, second = batch_of(some), batch_of(some)
    some.queue(first)
    some.queue(second)
    begun.set()
    assert ends.died() == ("copier", "KeyError: 'a bug of ours'")
    for batch in (first, second):
        with pytest.raises(TransferError, match="a bug of ours"):
            batch.wait(LIMIT_S)
        assert batch.may_still_land == set()
    third = batch_of(some)
    some.queue(third)
    with pytest.raises(TransferError, match="thread copier died"):
        third.wait(LIMIT_S)
    some.close()


# ---------------------------------------------------------------------- two-sided MPI


class Receive:
    """A receive for which no bytes come."""

    def Test(self) -> bool:
        return False


@pytest.fixture
def courier(ends: Ends) -> Iterator[Courier]:
    """One of two ranks, the other of which never answers."""
    comm = SimpleNamespace(
        Set_errhandler=id,
        Get_attr=lambda _: 1000,
        Free=lambda: None,
        Irecv=lambda *_: Receive(),
        Iprobe=lambda *_: False,
    )
    world: Any = SimpleNamespace(
        rank=0,
        node_of=[0, 0],
        comm=SimpleNamespace(Dup=lambda: comm),
        mpi=SimpleNamespace(ERRORS_RETURN=0, TAG_UB=1, Exception=MemoryError),
        free_at_finish=id,
        bcast_bytes=lambda data: data,
        allgather_bytes=lambda data: [data, data],
    )
    courier = Courier(world, LentBuffers(), [PEER], LIMIT_S, ends.ended, ends.on_fatal)
    courier._send = lambda rank, message: None  # type: ignore[method-assign]
    yield courier
    courier.close()


def test_the_courier_fails_its_exchanges_and_sends_later_jobs_elsewhere(courier: Courier, ends: Ends) -> None:
    read, write = job_of("read"), job_of("write")
    courier.start(read)
    courier.start(write)
    assert wait_until(lambda: len(courier._exchanges) >= 2)
    courier._progress = boom  # type: ignore[method-assign]
    courier._hub.wake()
    assert ends.died() == ("courier", "KeyError: 'a bug of ours'")
    for job, begun in ((read, True), (write, False)):
        found, error, again = ends.job()
        assert found is job
        assert str(error) == "rank 1: thread courier died: KeyError: 'a bug of ours'"
        assert (job.may_land, again) == (begun, not begun)
    later = job_of("read")
    courier.start(later)
    found, error, again = ends.job()
    assert (found, again, later.may_land) == (later, True, False)
    assert "thread courier died" in str(error)


# ---------------------------------------------------------------------- one-sided MPI


class Done:
    def Test(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("op", "window", "name"),
    [
        ("read", SimpleNamespace(Rget=boom), "one-sided"),
        ("write", SimpleNamespace(Rput=lambda *_: Done(), Flush=boom), "one-sided-flush"),
    ],
)
def test_one_sided_threads_fail_what_is_under_way(ends: Ends, op: str, window: Any, name: str) -> None:
    world: Any = SimpleNamespace(size=2, rank=0, mpi=SimpleNamespace(Exception=MemoryError, BYTE=None))
    path = OneSided(world, LIMIT_S, id, ends.ended, ends.on_fatal)
    path._windows[0] = window
    path.start(job_of(op))
    assert ends.died() == (name, "KeyError: 'a bug of ours'")
    job, error, _ = ends.job()
    assert str(error) == f"rank 1: thread {name} died: KeyError: 'a bug of ours'"
    assert job.may_land == (op == "write")
    assert not path.reaches(PEER, 0, True)
    path.start(job_of("write"))
    _, error, again = ends.job()
    assert f"thread {name} died" in str(error)
    assert again
    path.close()
    path._leaving.set()


# ---------------------------------------------------------------------- sockets


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_lane_fails_the_piece_in_hand_and_serves_the_next_job(ends: Ends, op: str) -> None:
    world: Any = SimpleNamespace(
        rank=0,
        size=2,
        node_of=[0, 0],
        hostnames=["here", "here"],
        bcast_bytes=lambda data: data,
        allgather_bytes=lambda data: [data, data],
    )
    lent = LentBuffers()
    lent.expose(0, bytearray(100))
    path = SocketPath(world, lent, LIMIT_S, ends.ended, ends.on_fatal)
    lane = path._lane(PEER)
    lane._connected = boom  # type: ignore[method-assign]
    path.start(job_of(op))
    assert ends.died() == ("lane 1", "KeyError: 'a bug of ours'")
    job, error, _ = ends.job()
    assert str(error) == "rank 1: thread lane 1 died: KeyError: 'a bug of ours'"
    assert job.may_land == (op == "write")
    del lane._connected
    path.start(job_of(op))
    assert ends.job()[1] is None
    path.close()


def test_a_thread_of_the_server_ends_its_connection(ends: Ends) -> None:
    server = BytesServer(SECRET, on_fatal=ends.on_fatal)
    client = BytesClient(*server.address, SECRET, timeout_s=LIMIT_S)
    server._answer = boom  # type: ignore[method-assign]
    with pytest.raises(PeerLost):
        client.read(7, [(0, 1)], [bytearray(1)], LIMIT_S)
    assert ends.died() == ("bytes", "KeyError: 'a bug of ours'")
    client.close()
    server.close()


def test_a_server_that_accepts_no_more_does_not_listen(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    server = BytesServer(SECRET, on_fatal=ends.on_fatal)
    monkeypatch.setattr(sockets_server, "Connection", boom)
    with pytest.raises(PeerLost):
        BytesClient(*server.address, SECRET, timeout_s=LIMIT_S)
    assert ends.died() == ("bytes server", "KeyError: 'a bug of ours'")
    with pytest.raises(PeerLost) as caught:
        BytesClient(*server.address, SECRET, timeout_s=LIMIT_S)
    assert caught.value.nobody_listens
    server.close()


# ---------------------------------------------------------------------- who is alive


def test_a_heart_and_a_monitor_that_die_say_so(ends: Ends, tmp_path: Path) -> None:
    monitor = Monitor([f"ipc://{tmp_path}/heart"], ["a"], 0.05, LIMIT_S, on_fatal=ends.on_fatal)
    heart = Heart(monitor.endpoints[0], "a", 0.01, on_fatal=ends.on_fatal)
    assert wait_until(lambda: monitor.counters()["messages_out"])
    monitor._note = boom  # type: ignore[method-assign]
    assert ends.died() == ("monitor", "KeyError: 'a bug of ours'")
    heart._spoke.receive = boom  # type: ignore[method-assign]
    assert ends.died() == ("heart a", "KeyError: 'a bug of ours'")
    heart.stop()
    monitor.stop()
