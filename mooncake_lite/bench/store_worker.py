"""A client process of the store benchmark: does what it is told on stdin and answers with times.

    python -c STORE_WORKER.PY MODULE MASTER_ADDRESS SEGMENT_BYTES

MODULE is `store` or `mooncake.store`: the same program for both, so it needs the standard library alone.
Started by `mooncake_lite.bench.store_objects`, as text: beside its file lie modules named as ours are.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Any

LOCAL_BUFFER_BYTES = 64 * 2**20


def main() -> None:
    """Set up a store; then one JSON order a line, one JSON answer a line, until stdin ends."""
    module, master, segment = sys.argv[1:4]
    store = importlib.import_module(module).MooncakeDistributedStore()
    values = ("127.0.0.1", "P2PHANDSHAKE", int(segment), LOCAL_BUFFER_BYTES, "tcp", "", master)
    answer(store.setup(*values))
    orders: dict[str, Callable[..., Any]] = {"put": put, "get": get, "together": together, "copy": copy}
    for line in sys.stdin:
        order = json.loads(line)
        answer(orders[order.pop("do")](store, **order))
    store.close()
    os._exit(0)  # no destructor of a library of threads may delay or spoil the end


def answer(value: Any) -> None:
    """One line on stdout."""
    sys.stdout.write("ANSWER" + json.dumps(value) + "\n")
    sys.stdout.flush()


def put(store: Any, prefix: str, count: int, nbytes: int) -> list[float]:
    """Seconds of each put of a new object."""
    value = os.urandom(nbytes)
    return [timed(store.put, (f"{prefix}{number}", value), 0) for number in range(count)]


def get(store: Any, prefix: str, count: int, runs: int, nbytes: int) -> list[float]:
    """Seconds of each of `runs` gets, which go round `count` objects."""
    value = b"\0" * nbytes
    return [timed(store.get, (f"{prefix}{number % count}",), value, len) for number in range(runs)]


def timed(act: Callable[..., Any], values: tuple[Any, ...], expected: Any, see: Any = None) -> float:
    """Seconds of one act, which must give what is expected (as `see` sees both)."""
    started = time.perf_counter()
    found = act(*values)
    taken = time.perf_counter() - started
    if (found if see is None else see(found)) != (expected if see is None else see(expected)):
        raise RuntimeError(f"the store answered {found!r:.80}")
    return taken


def together(
    store: Any, prefix: str, first: int, count: int, runs: int, nbytes: int, start: float
) -> tuple[float, float]:
    """(start, end) of `runs` times getting `count` objects, begun at a time on the monotonic clock."""
    keys = [f"{prefix}{number}" for number in range(first, first + count)]
    wait_for(start)
    began = time.monotonic()
    for _ in range(runs):
        if sum(map(len, store.get_batch(keys))) != count * nbytes:
            raise RuntimeError("an object is missing or short")
    return began, time.monotonic()


def copy(
    store: Any, path: str, first: int, count: int, runs: int, nbytes: int, start: float
) -> tuple[float, float]:
    """(start, end) of copying as many bytes out of shared memory: what `together` cannot undercut."""
    with open(path, "r+b") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0))
    ranges = [(number * nbytes, (number + 1) * nbytes) for number in range(first, first + count)]
    wait_for(start)
    began = time.monotonic()
    for _ in range(runs):
        if sum(map(len, [bytes(view[low:high]) for low, high in ranges])) != count * nbytes:
            raise RuntimeError("memory is short")
    return began, time.monotonic()


def wait_for(start: float) -> None:
    """Sleep until then."""
    time.sleep(max(0.0, start - time.monotonic()))


if __name__ == "__main__":
    main()
