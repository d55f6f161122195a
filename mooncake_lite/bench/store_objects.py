"""Our MooncakeDistributedStore beside Mooncake's own: gets and puts of one client, and of four together.

Both run the same worker program (`store_worker`), each with a master and a lender of its own, on loopback,
and take turns. Without an installed peer its figures are missing, and the rows say why.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mooncake_lite.bench.result import Other, Row
from mooncake_lite.bench.store_peer import Peer, find_peer, peer_master
from mooncake_lite.bench.worker import Worker
from mooncake_lite.errors import ClusterError

KIB, MIB = 2**10, 2**20
SEGMENT_BYTES = 768 * MIB
LIMIT_S = 60.0
ROUNDS = 5
PEER = "Mooncake Store, TCP loopback"

TOGETHER, TOGETHER_BYTES, PROCESSES = 64, 256 * KIB, 4
"""Gets that are under way at once, their size, and who makes them."""


@dataclass(frozen=True, slots=True)
class Side:
    """A store under measurement. clients: PROCESSES of them; the first works alone in most rows."""

    clients: list[Worker]


def run(quick: bool) -> list[Row]:
    """Measure both. Raises ClusterError."""
    peer = find_peer()
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(_side(sys.executable, "store", dict(os.environ), None))
        theirs = None
        if isinstance(peer, Peer):
            theirs = stack.enter_context(_side(peer.python, "mooncake.store", peer.environment, peer))
        note = "" if isinstance(peer, Peer) else peer
        rows = []
        for name, nbytes, puts in (("4 KiB", 4 * KIB, 60), ("1 MiB", MIB, 20)):
            rows += _alone(ours, theirs, name, nbytes, puts, 200 if quick else 1000, note)
        return [*rows, _four(ours, theirs, 10 if quick else 40, note)]


@contextlib.contextmanager
def _side(python: str, module: str, environment: dict[str, str], peer: Peer | None) -> Iterator[Side]:
    """A master, a process that lends memory, and clients that lend none."""
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(_our_master() if peer is None else peer_master(peer, 10_000))
        workers = []
        for segment in (SEGMENT_BYTES, *[0] * PROCESSES):
            arguments = [module, master, str(segment)]
            worker = Worker("store_worker.py", arguments, python, environment, LIMIT_S)
            stack.callback(worker.close)
            workers.append(worker)
        if [worker.answer() for worker in workers] != [0] * len(workers):
            raise ClusterError(f"a client of {module} could not be set up")
        yield Side(workers[1:])


@contextlib.contextmanager
def _our_master() -> Iterator[str]:
    line = [sys.executable, "-m", "mooncake_lite", "store", "master", "--rpc-port", "0"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        words = process.stdout.readline().replace(",", "").split()
        if len(words) < 4:
            raise ClusterError("our master does not start")
        yield words[3]
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()  # type: ignore[union-attr]


def _alone(
    ours: Side, theirs: Side | None, name: str, nbytes: int, puts: int, gets: int, note: str
) -> list[Row]:
    """One client: puts of new objects, then gets that go round 16 of them; both sides in turns."""
    sides = [ours] if theirs is None else [ours, theirs]
    put: list[list[float]] = [[] for _ in sides]
    got: list[list[float]] = [[] for _ in sides]
    for turn in range(ROUNDS):
        for at, side in enumerate(sides):
            prefix = f"{name}-{turn}-"
            put[at] += side.clients[0].ask("put", prefix=prefix, count=puts, nbytes=nbytes)
            got[at] += side.clients[0].ask("get", prefix=prefix, count=16, runs=gets // ROUNDS, nbytes=nbytes)
    rows = []
    for verb, times in (("get", got), ("put", put)):
        for words, figure in ((f"{verb} {name}", statistics.median), (f"{verb} {name}, p99", _p99)):
            mine, *other = [figure(seconds) * 1e6 for seconds in times]
            beside = Other(PEER, other[0]) if other else None
            rows.append(Row(words, "us", mine, beside, None, len(times[0]), note))
    return rows


def _p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100, method="inclusive")[98]


def _four(ours: Side, theirs: Side | None, runs: int, note: str) -> Row:
    """All clients at once, each with its share of the objects; the limit copies the same bytes."""
    sides = [ours] if theirs is None else [ours, theirs]
    fd = os.memfd_create("mooncake-lite-bench")
    try:
        os.pwrite(fd, os.urandom(TOGETHER * TOGETHER_BYTES), 0)
        for side in sides:
            side.clients[0].ask("put", prefix="four-", count=TOGETHER, nbytes=TOGETHER_BYTES)
        path = f"/proc/{os.getpid()}/fd/{fd}"
        figures: list[list[float]] = [[] for _ in range(len(sides) + 1)]
        for _ in range(ROUNDS + 1):  # the first touches pages
            for at, side in enumerate(sides):
                figures[at].append(_rate(side, "together", runs, prefix="four-"))
            figures[-1].append(_rate(ours, "copy", runs, path=path))
    finally:
        os.close(fd)
    mine, *other = [statistics.median(rates[1:]) for rates in figures[:-1]]
    beside = Other(PEER, other[0]) if other else None
    name = f"{TOGETHER} gets of {TOGETHER_BYTES // KIB} KiB by {PROCESSES} processes"
    limit = Other(f"{PROCESSES} processes that copy the same bytes", statistics.median(figures[-1][1:]))
    return Row(name, "GB/s", mine, beside, limit, ROUNDS * runs, note)


def _rate(side: Side, do: str, runs: int, **values: Any) -> float:
    """GB/s of all clients together, from the first one's start to the last one's end."""
    share = TOGETHER // PROCESSES
    start = time.monotonic() + 0.05
    for at, client in enumerate(side.clients):
        client.tell(
            do, first=at * share, count=share, runs=runs, nbytes=TOGETHER_BYTES, start=start, **values
        )
    spans = [client.answer() for client in side.clients]
    seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return TOGETHER * TOGETHER_BYTES * runs / seconds / 1e9
