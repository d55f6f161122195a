"""Our MooncakeDistributedStore beside Mooncake's own: gets and puts of one client, and of four together.

Both run the same program (`peer_program`), each with a master and a lender of its own, on loopback, and take
turns. Without an installed peer its figures are missing, and the rows say why.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from mooncake_lite.errors import ClusterError
from mooncake_lite.launch.serve_child import wait_for_end
from mooncake_lite.tools.bench.peers import STOP_S, StorePeer, Worker, find_store_peer, store_peer_master
from mooncake_lite.tools.bench.result import Other, Row, in_turns, medians

KIB, MIB = 2**10, 2**20
SEGMENT_BYTES = 768 * MIB
LIMIT_S = 60.0
ROUNDS = 5
PEER = "Mooncake Store, TCP loopback"

TOGETHER, TOGETHER_BYTES, PROCESSES = 64, 256 * KIB, 4
"""Gets that are under way at once, their size, and who makes them."""


Clients = list[Worker]
"""PROCESSES of one store; the first works alone in most rows."""


def run(quick: bool) -> list[Row]:
    """Measure both. Raises ClusterError."""
    peer = find_store_peer()
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(_clients(sys.executable, "store", dict(os.environ), _our_master()))]
        if isinstance(peer, StorePeer):
            master = store_peer_master(peer, 10_000)
            sides.append(
                stack.enter_context(_clients(peer.python, "mooncake.store", peer.environment, master))
            )
        note = "" if isinstance(peer, StorePeer) else peer
        rows = []
        for name, nbytes, puts in (("4 KiB", 4 * KIB, 60), ("1 MiB", MIB, 20)):
            rows += _alone(sides, name, nbytes, puts, 200 if quick else 1000, note)
        return [*rows, _four(sides, 10 if quick else 40, note)]


@contextlib.contextmanager
def _clients(
    python: str, module: str, environment: dict[str, str], master: AbstractContextManager[str]
) -> Iterator[Clients]:
    """A master, a process that lends memory, and clients that lend none."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(master)
        workers = []
        for segment in (SEGMENT_BYTES, *[0] * PROCESSES):
            worker = Worker([module, address, str(segment)], python, environment, LIMIT_S)
            stack.callback(worker.close)
            workers.append(worker)
        for worker in workers:
            worker.answer()
        yield workers[1:]


@contextlib.contextmanager
def _our_master() -> Iterator[str]:
    line = [sys.executable, "-m", "mooncake_lite", "store", "master", "--rpc-port", "0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            words = process.stdout.readline().replace(",", "").split()
            if len(words) < 4:
                raise ClusterError("our master does not start")
            yield words[3]
        finally:
            process.terminate()
            wait_for_end(process, STOP_S)


def _alone(sides: list[Clients], name: str, nbytes: int, puts: int, gets: int, note: str) -> list[Row]:
    """One client: puts of new objects, then gets that go round 16 of them; both sides in turns."""
    put: list[list[float]] = [[] for _ in sides]
    got: list[list[float]] = [[] for _ in sides]
    for turn in range(ROUNDS):
        for at, clients in enumerate(sides):
            prefix = f"{name}-{turn}-"
            put[at] += clients[0].ask("put", prefix=prefix, count=puts, nbytes=nbytes)
            got[at] += clients[0].ask("get", prefix=prefix, count=16, runs=gets // ROUNDS, nbytes=nbytes)
    rows = []
    for verb, times in (("get", got), ("put", put)):
        for words, figure in ((f"{verb} {name}", statistics.median), (f"{verb} {name}, p99", _p99)):
            mine, *other = [figure(seconds) * 1e6 for seconds in times]
            beside = Other(PEER, other[0]) if other else None
            limit = Other("one memory copy", _copy_us(nbytes)) if words == f"get {name}" else None
            rows.append(Row(words, "us", mine, beside, limit, len(times[0]), note))
    return rows


def _copy_us(nbytes: int) -> float:
    """The fastest of many copies of memory that is there already."""
    source, target = os.urandom(nbytes), memoryview(bytearray(nbytes))

    def copy() -> None:
        target[:] = source

    return min(timeit.repeat(copy, number=1, repeat=200)) * 1e6


def _p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100, method="inclusive")[98]


def _four(sides: list[Clients], runs: int, note: str) -> Row:
    """All clients at once, each with its share of the objects; the limit copies the same bytes."""
    fd = os.memfd_create("mooncake-lite-bench")
    try:
        os.pwrite(fd, os.urandom(TOGETHER * TOGETHER_BYTES), 0)
        for clients in sides:
            clients[0].ask("put", prefix="four-", count=TOGETHER, nbytes=TOGETHER_BYTES)
        gets = [partial(_rate, clients, "together", runs, prefix="four-") for clients in sides]
        copies = partial(_rate, sides[0], "copy", runs, path=f"/proc/{os.getpid()}/fd/{fd}")
        in_turns(1, *gets, copies)  # touches pages
        mine, *other, bound = medians(ROUNDS, *gets, copies)
    finally:
        os.close(fd)
    beside = Other(PEER, other[0]) if other else None
    name = f"{TOGETHER} gets of {TOGETHER_BYTES // KIB} KiB by {PROCESSES} processes"
    limit = Other(f"{PROCESSES} processes that copy the same bytes", bound)
    return Row(name, "GB/s", mine, beside, limit, ROUNDS * runs, note)


def _rate(clients: Clients, do: str, runs: int, **values: Any) -> float:
    """GB/s of all clients together, from the first one's start to the last one's end."""
    share = TOGETHER // PROCESSES
    start = time.monotonic() + 0.05
    each = {"count": share, "runs": runs, "nbytes": TOGETHER_BYTES, "start": start, **values}
    for at, client in enumerate(clients):
        client.tell(do, first=at * share, **each)
    spans = [client.answer() for client in clients]
    seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return TOGETHER * TOGETHER_BYTES * runs / seconds / 1e9
