"""A master and the stores of tests: our own processes, the peer's where there is one."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from store import MooncakeDistributedStore
from store.mooncake_store import messages as say
from store.mooncake_store.master.master import Master
from transport.messaging.curve import CurveKeys

MIB = 2**20
LIMIT_S = 20.0
ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def master_thread(lease_ms: int = 10_000, curve: CurveKeys | None = None) -> Iterator[Master]:
    """A master in this process: its books can be looked at (when nothing goes on)."""
    master = Master("tcp://127.0.0.1:*", lease_ms, curve)
    thread = threading.Thread(target=master.run)
    thread.start()
    try:
        yield master
    finally:
        master.stop()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def rest(*stores: MooncakeDistributedStore) -> None:
    """Return when the master has nothing more to do for these: it answers what nobody waits for, too."""
    for store in stores:
        store._client._link.ask(say.Drain)


def address(master: Master) -> str:
    return master.endpoint.removeprefix("tcp://")


@contextlib.contextmanager
def master_process(
    lease_ms: int = 10_000, *options: str, port: str = "0"
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`mooncake-lite store master` on a free port, or on this one: (HOST:PORT, process)."""
    line = [sys.executable, "-m", "mooncake_lite", "store", "master", "--rpc-port", port]
    line += ["--default-kv-lease-ttl", str(lease_ms), *options]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=ENVIRONMENT)
    try:
        ready, _, _ = select.select([process.stdout], [], [], LIMIT_S)
        assert ready, "the master does not say that it listens"
        found = re.search(r"at (\S+),", process.stdout.readline())
        yield found[1], process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)
        process.stdout.close()  # type: ignore[union-attr]


def new_store(master: str, segment: Any = 64 * MIB, host: str = "127.0.0.1") -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    assert store.setup(host, "P2PHANDSHAKE", segment, 16 * MIB, "tcp", "", master) == 0
    return store


@contextlib.contextmanager
def stores(master: str, count: int = 1, segment: int = 64 * MIB) -> Iterator[list[MooncakeDistributedStore]]:
    made = [new_store(master, segment) for _ in range(count)]
    try:
        yield made
    finally:
        for store in made:
            store.close()


@contextlib.contextmanager
def program(text: str, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program of its own that is spoken to through its pipes."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", text, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**ENVIRONMENT, **variables},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(LIMIT_S)
        for pipe in (process.stdin, process.stdout):
            pipe.close()  # type: ignore[union-attr]


def heard(process: subprocess.Popen[str]) -> str:
    """The next line of a program, within LIMIT_S."""
    ready, _, _ = select.select([process.stdout], [], [], LIMIT_S)
    assert ready, "the program says nothing"
    return process.stdout.readline().strip()
