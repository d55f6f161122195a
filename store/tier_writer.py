"""The write-behind thread of a store rank: takes visible blocks from DRAM to the SSD tier.

Called by the store rank, which hands over ranges of its segment and keeps them unchanged until their key
is reported written or dropped. Knows nothing of messages: it reports through four callbacks, called
from its own thread. Explained in docs/reference/hdf5-tier.md:

    submit -> queue (bounded) -> checksums -> open file  -> on_written    the DRAM copy may go
                                                `-> seal -> on_durable    survives anything; served
                    bad bytes, full disk, no time left   -> on_dropped    stays in DRAM alone
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from store.errors import StoreError, TierWriteError
from store.tier import HDF5Tier

Report = Callable[[list[int]], None]

REPORT_BLOCKS = 16
"""Written blocks are reported in groups of at most this many: one message, not one per block."""

STOP_FILE_NBYTES = 16 << 20
"""When stopping, files are sealed this small: what a limit cuts off is then at most one of them."""


class _Item(NamedTuple):
    key: int
    digest: int
    checksums: Sequence[int]
    block: memoryview


class TierWriter:
    """Owns the writing side of a tier. All public methods may be called from any thread.

        max_blocks   limit of the queue; one more is refused (submit returns False)
        failure      what ended the thread before its time; None while all is well

    Invariant: every key for which submit returned True is reported exactly once as written or dropped,
    and a written one exactly once more as durable or dropped.
    """

    def __init__(
        self,
        tier: HDF5Tier,
        *,
        on_written: Report,
        on_durable: Report,
        on_dropped: Report,
        on_evicted: Report,
        max_blocks: int = 1024,
    ):
        self.tier = tier
        self.max_blocks = max_blocks
        self.failure: BaseException | None = None
        self._on_written, self._on_durable = on_written, on_durable
        self._on_dropped, self._on_evicted = on_dropped, on_evicted
        self._counts = dict.fromkeys(("refused", "dropped", "dropped_stopping"), 0)
        self._changed = threading.Condition()
        self._queue: dict[int, _Item] = {}  # oldest first; what was touched last, last
        self._unsealed: set[int] = set()  # reported written, or about to be; not durable yet
        self._seal_wanted = False
        self._stop_at: float | None = None
        self._done = False
        self._thread = threading.Thread(target=self._run, name="tier-writer", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------- any thread

    def submit(self, key: int, digest: int, checksums: Sequence[int], block: object) -> bool:
        """Queue one block; it must not change until its key is reported. False: refused, and counted.

        block   exactly layout.nbytes, e.g. a range of the segment; it is read, never copied
        """
        item = _Item(key, digest, list(checksums), memoryview(block))  # type: ignore[arg-type]
        with self._changed:
            refused = len(self._queue) >= self.max_blocks or key in self._queue
            if refused or self._stop_at is not None or self._done:
                self._counts["refused"] += 1
                return False
            self._queue[key] = item
            self._changed.notify_all()
        return True

    def touch(self, keys: Iterable[int]) -> None:
        """These were used: when there is no time for all, they are written before others."""
        with self._changed:
            for key in keys:
                if key in self._queue:
                    self._queue[key] = self._queue.pop(key)

    def seal_now(self, limit_s: float) -> bool:
        """Make durable what is in the open file, before anything else; True when done within limit_s."""
        with self._changed:
            self._seal_wanted = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._done or not self._seal_wanted, limit_s)

    def stop(self, limit_s: float) -> int:
        """Write the queue, hottest first, seal, end the thread; returns how many blocks were not saved.

        Takes at most limit_s, unless the disk blocks; it is then left behind (what it was doing is either
        sealed or deleted at the next start). The tier is the caller's to close, after this.
        """
        with self._changed:
            self._stop_at = time.monotonic() + limit_s
            self._changed.notify_all()
        self._thread.join(limit_s)
        with self._changed:
            return self._counts["dropped_stopping"] + len(self._queue) + len(self._unsealed)

    @property
    def ended(self) -> bool:
        """Whether the thread has ended: only then may the tier be closed."""
        return not self._thread.is_alive()

    def stats(self) -> dict[str, int]:
        """Counters: refused, dropped (bad bytes, full disk), dropped_stopping; gauges: queued, unsealed."""
        with self._changed:
            return self._counts | {"queued": len(self._queue), "unsealed": len(self._unsealed)}

    # ------------------------------------------------------------------------ its own thread

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:
            self.failure = error
        with self._changed:
            self._done = True
            left = [*self._queue, *self._unsealed]
            self._counts["dropped"] += len(left)
            self._queue.clear()
            self._unsealed.clear()
            self._changed.notify_all()
        if left:
            self._on_dropped(left)

    def _step(self) -> bool:
        """Wait for something to do, do it; False at the end."""
        with self._changed:
            self._changed.wait_for(self._has_work, self._seconds_to_seal())
            sealing, stopping = self._seal_wanted, self._stop_at is not None
        if sealing or self._seconds_to_seal() == 0:
            self._seal()
        elif self._queue and not (stopping and self._out_of_time()):
            self._write_some()
        elif stopping:
            self._drop_rest()
            self._seal()
            return False
        return True

    def _has_work(self) -> bool:
        return bool(self._queue) or self._seal_wanted or self._stop_at is not None

    def _seconds_to_seal(self) -> float | None:
        """Until the open file is due; None without one."""
        if self.tier.seal_at is None:
            return None
        if self._stop_at is not None and self.tier.open_bytes >= STOP_FILE_NBYTES:
            return 0.0
        return max(self.tier.seal_at - time.monotonic(), 0.0)

    def _out_of_time(self) -> bool:
        """Whether what is left until the limit is needed for sealing (twice, if the disk has slowed)."""
        assert self._stop_at is not None
        return time.monotonic() + 2 * self.tier.seal_estimate_s + 0.05 >= self._stop_at

    def _write_some(self) -> None:
        """Write up to REPORT_BLOCKS blocks, as long as nothing is more urgent; report them."""
        written: list[int] = []
        durable: list[int] = []
        dropped: list[int] = []
        for _ in range(REPORT_BLOCKS):
            with self._changed:
                if not self._queue or self._seal_wanted:
                    break
                # Oldest first, so that none waits for ever; when stopping, hottest first.
                key = next(iter(self._queue) if self._stop_at is None else reversed(self._queue))
                item = self._queue.pop(key)
                self._unsealed.add(key)
            self._write(item, written, durable, dropped)
            if self._seconds_to_seal() == 0 or (self._stop_at is not None and self._out_of_time()):
                break
        self._report(written, durable, dropped)

    def _write(self, item: _Item, written: list[int], durable: list[int], dropped: list[int]) -> None:
        try:
            is_open = self.tier.append(*item, now=time.monotonic())
        except TierWriteError as error:
            dropped += [item.key, *error.lost]
            written[:] = [key for key in written if key not in error.lost]
            return
        except StoreError:  # the bytes are not what put_end said, or not a block at all
            dropped.append(item.key)
            return
        written.append(item.key)
        if not is_open:
            durable.append(item.key)

    def _seal(self) -> None:
        durable: list[int] = []
        dropped: list[int] = []
        try:
            durable = self.tier.seal()
        except TierWriteError as error:
            dropped = list(error.lost)
        self._report([], durable, dropped)
        with self._changed:
            self._seal_wanted = False
            self._changed.notify_all()

    def _drop_rest(self) -> None:
        with self._changed:
            left = list(self._queue)
            self._queue.clear()
            self._counts["dropped_stopping"] += len(left)
        if left:
            self._on_dropped(left)

    def _report(self, written: list[int], durable: list[int], dropped: list[int]) -> None:
        with self._changed:
            self._unsealed.difference_update(durable, dropped)
            self._counts["dropped"] += len(dropped)
        for keys, report in (
            (written, self._on_written),
            (durable, self._on_durable),
            (dropped, self._on_dropped),
            (self.tier.take_evicted(), self._on_evicted),
        ):
            if keys:
                report(keys)
