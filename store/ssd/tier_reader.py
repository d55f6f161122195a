"""The reading threads of a store rank: blocks go from SSD into DRAM while the rank does other things.

Called by the store rank, which names ranges of its segment and reserves them until the order is reported
done. Knows no messages: it reports through one callback, from its own threads. Explained in
docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from store.errors import BadBlock, StoreError
from store.ssd.tier import HDF5Tier
from store.ssd.tier_health import TierHealth
from transport.threads import OnFatal, start_thread

IDLE_WAIT_S = 1.0


class Read(NamedTuple):
    """One block to read: into `out`, writable and exactly layout.nbytes."""

    key: int
    digest: int
    out: object


class _Order:
    """Reads that are reported together."""

    def __init__(self, number: int, count: int):
        self.number = number
        self.sums: list[list[int] | None] = [None] * count
        self.left = count
        self.began = time.perf_counter()


OnDone = Callable[[int, list[list[int] | None], float], None]
"""(number, checksums per block, None for a miss or a bad one; seconds since the order)"""


class TierReader:
    """A bounded queue in front of a few threads. All public methods may be called from any thread.

        max_blocks   limit of the queue; an order that does not fit is refused whole
        health       what is wrong with the tier, as far as its readers can tell
        failure      the last exception that ended a thread or that a callback raised; None without one

    Invariant: every accepted order is reported exactly once, at the latest by stop() or when a thread dies.
    Blocks that were not read then count as misses. From then on orders are refused.
    """

    def __init__(
        self,
        tier: HDF5Tier,
        on_done: OnDone,
        *,
        on_fatal: OnFatal | None = None,
        health: TierHealth | None = None,
        threads: int = 2,
        max_blocks: int = 4096,
    ):
        """Start the threads. on_fatal: called with (thread, reason) when one dies, after all reports."""
        self.tier = tier
        self.max_blocks = max_blocks
        self.health = health or TierHealth()
        self.failure: BaseException | None = None
        self._on_done = on_done
        self._refused = 0
        self._changed = threading.Condition()
        self._queue: deque[tuple[_Order, int, Read]] = deque()
        self._stopping = False
        self._threads = [
            start_thread(
                f"tier-reader-{i}", self._run, on_death=lambda _: self._refuse_rest(), on_fatal=on_fatal
            )
            for i in range(threads)
        ]

    def submit(self, number: int, reads: Sequence[Read]) -> bool:
        """Queue one order; orders are read as they come. False: refused and counted, and nothing is read."""
        order = _Order(number, len(reads))
        with self._changed:
            if self._stopping or not reads or len(self._queue) + len(reads) > self.max_blocks:
                self._refused += 1
                return False
            self._queue.extend((order, index, read) for index, read in enumerate(reads))
            self._changed.notify_all()
        return True

    def read_now(self, reads: Sequence[Read]) -> list[list[int] | None]:
        """Read in the caller's thread; return checksums per block, None for a miss or a bad one."""
        return [self._load(read) for read in reads]

    def stop(self, limit_s: float) -> None:
        """Report queued orders as not read, and end the threads, within limit_s unless the disk blocks."""
        self._refuse_rest()
        until = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))

    @property
    def ended(self) -> bool:
        """Tell whether no thread reads any more: only then may the buffers be freed."""
        return not any(thread.is_alive() for thread in self._threads)

    def stats(self) -> dict[str, int]:
        """Return the counter refused and the gauge queued."""
        with self._changed:
            return {"refused": self._refused, "queued": len(self._queue)}

    def _refuse_rest(self) -> None:
        """Accept no more orders, and report the queued ones as not read."""
        with self._changed:
            self._stopping = True
            left = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for order, _, _ in left:
            self._settle(order)

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.failure = error
            raise

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping, IDLE_WAIT_S)
                if self._stopping:
                    return
                if not self._queue:
                    continue
                order, index, read = self._queue.popleft()
            try:
                order.sums[index] = self._load(read)
            finally:
                self._settle(order)

    def _load(self, read: Read) -> list[int] | None:
        try:
            return self.tier.load(read.key, read.out, read.digest)
        except BadBlock:
            self.health.bad_block(time.monotonic())
        except StoreError:  # missing
            pass
        return None  # a miss; the tier has counted it

    def _settle(self, order: _Order) -> None:
        """Note that one more block of an order was read, or never will be."""
        with self._changed:
            order.left -= 1
            done = not order.left
        if not done:
            return
        try:
            self._on_done(order.number, order.sums, time.perf_counter() - order.began)
        except Exception as error:
            self.failure = error
