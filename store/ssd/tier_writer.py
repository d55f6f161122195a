"""The write-behind thread of a store rank: takes visible blocks from DRAM to the SSD tier.

Called by the store rank, which hands over ranges of its segment and keeps them unchanged until their key
is reported. Knows no messages: it reports through callbacks, called from its own thread. Explained
in docs/reference/hdf5-tier.md:

    submit -> queue (bounded) -> checksums -> open file  -> on_written    the DRAM copy may go
                                    |           `-> seal -> on_durable    survives anything; served
                                    |   full disk, no time left -> on_dropped    stays in DRAM alone
                                    `-- differ           -> on_bad        the DRAM copy is not what was put
    remove ------> log                                   -> on_removed    no restart brings it back
                    `-- nothing can be written           -> on_kept       the next start does
    nothing else to do: files of which half is dead are rewritten, at a limited rate
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from store.errors import StoreError, TierPaused, TierWriteError
from store.ssd.tier import HDF5Tier
from store.ssd.tier_health import TierHealth
from transport.threads import OnFatal, start_thread

Report = Callable[[list[int]], None]

REPORT_BLOCKS = 16
"""Written blocks are reported in groups of at most this many: one message, not one per block."""

COMPACT_NBYTES = 4 << 20
COMPACT_BYTES_PER_S = 64 << 20
"""Limit of what compaction reads each second; it writes at most as much.

It is about a twentieth of the disk's rate in docs/reference/hdf5-tier.md. Compaction works in pieces of
COMPACT_NBYTES, and only while no block or removal waits.
"""

COMPACT_CHECK_S = 1.0
"""Time until compaction is tried again after it found nothing to rewrite, or failed."""

STOP_FILE_NBYTES = 16 << 20
"""When stopping, files are sealed at this size, so that a time limit loses at most one such file."""


class _Item(NamedTuple):
    key: int
    digest: int
    checksums: Sequence[int]
    block: memoryview


class TierWriter:
    """Owns the writing side of a tier. All public methods may be called from any thread.

        max_blocks   limit of the queue; one more is refused (submit returns False)
        health       what is wrong with the tier, as far as the writer can tell
        failure      what ended the thread before its time; None while all is well

    Invariant: every key for which submit returned True is reported exactly once as written, bad or dropped,
    and a written one exactly once more as durable or dropped. Every key given to remove is reported removed,
    or kept when the disk allows neither a record nor a deletion. All this also holds when the thread dies.
    """

    def __init__(
        self,
        tier: HDF5Tier,
        *,
        on_written: Report,
        on_durable: Report,
        on_dropped: Report,
        on_bad: Report,
        on_evicted: Report,
        on_removed: Report,
        on_kept: Report,
        on_fatal: OnFatal | None = None,
        health: TierHealth | None = None,
        max_blocks: int = 1024,
    ):
        """Start the thread. on_fatal: called with (thread, reason) when it dies, after all reports."""
        self.tier = tier
        self.max_blocks = max_blocks
        self.health = health or TierHealth()
        self.failure: BaseException | None = None
        self._on_written, self._on_durable = on_written, on_durable
        self._on_dropped, self._on_bad = on_dropped, on_bad
        self._on_evicted, self._on_removed, self._on_kept = on_evicted, on_removed, on_kept
        self._counts = dict.fromkeys(("refused", "dropped", "bad", "removals_failed", "dropped_stopping"), 0)
        self._changed = threading.Condition()
        self._queue: dict[int, _Item] = {}  # oldest first; what was touched last, last
        self._unsealed: set[int] = set()  # reported written, or about to be; not durable yet
        self._removing: dict[int, None] = {}
        self._in_removal: list[int] = []  # not reported yet
        self._compact_at = time.monotonic() + COMPACT_CHECK_S
        self._merge_small = False
        self._seal_wanted = False
        self._stop_at: float | None = None
        self._done = False
        self._thread = start_thread(
            "tier-writer", self._run, on_death=lambda _: self._end(), on_fatal=on_fatal
        )

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

    def remove(self, keys: Iterable[int]) -> bool:
        """Remove keys for good, before anything else is written; unknown ones are reported as well.

        Queued blocks of these keys are dropped. False when the thread ends or has ended.
        """
        with self._changed:
            if self._stop_at is not None or self._done:
                return False
            self._removing.update(dict.fromkeys(keys))
            self._changed.notify_all()
        return True

    def compact(self) -> None:
        """Rewrite files that are half dead, and merge small ones, when the thread has nothing else to do."""
        with self._changed:
            self._merge_small, self._compact_at = True, 0.0
            self._changed.notify_all()

    def seal_now(self, limit_s: float) -> bool:
        """Seal the open file before all other work; tell whether that was done within limit_s."""
        with self._changed:
            self._seal_wanted = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._done or not self._seal_wanted, limit_s)

    def stop(self, limit_s: float) -> int:
        """Write the queue, newest first, seal, end the thread; return how many blocks were not saved.

        Takes at most limit_s. If the disk blocks, the thread is left behind; the next start finds its file
        sealed, or deletes it. The caller closes the tier after this.
        """
        with self._changed:
            self._stop_at = time.monotonic() + limit_s
            self._changed.notify_all()
        self._thread.join(limit_s)
        with self._changed:
            return self._counts["dropped_stopping"] + len(self._queue) + len(self._unsealed)

    @property
    def ended(self) -> bool:
        """Tell whether the thread has ended: only then may the tier be closed."""
        return not self._thread.is_alive()

    def stats(self) -> dict[str, int]:
        """Return counters and gauges.

        Counters: refused, dropped (full disk), bad (bytes), removals_failed, dropped_stopping. Gauges:
        queued, unsealed.
        """
        with self._changed:
            return self._counts | {"queued": len(self._queue), "unsealed": len(self._unsealed)}

    # ------------------------------------------------------------------------ its own thread

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:
            self.failure = error
            raise
        self._end()

    def _end(self) -> None:
        """Report the remaining keys: nothing is written or removed any more."""
        with self._changed:
            self._done = True
            left, kept = [*self._queue, *self._unsealed], [*self._in_removal, *self._removing]
            self._counts["dropped"] += len(left)
            self._queue.clear()
            self._unsealed.clear()
            self._removing, self._in_removal = {}, []
            self._changed.notify_all()
        if left:
            self._on_dropped(left)
        if kept:
            self._on_kept(kept)

    def _step(self) -> bool:
        """Wait for work and do one piece of it; return False at the end."""
        with self._changed:
            self._changed.wait_for(self._has_work, self._seconds_to_wait())
            sealing, stopping = self._seal_wanted, self._stop_at is not None
        if self._removing:
            self._remove()
        elif sealing or self._seconds_to_seal() == 0:
            self._seal()
        elif self._queue and not (stopping and self._out_of_time()):
            self._write_some()
        elif stopping:
            self._drop_rest()
            self._seal()
            return False
        elif time.monotonic() >= self._compact_at:
            self._compact()
        return True

    def _has_work(self) -> bool:
        return bool(self._queue or self._removing) or self._seal_wanted or self._stop_at is not None

    def _seconds_to_wait(self) -> float:
        """Return the seconds until the open file is to be sealed, or compaction may continue."""
        rest = max(self._compact_at - time.monotonic(), 0.0)
        sealing = self._seconds_to_seal()
        return rest if sealing is None else min(rest, sealing)

    def _seconds_to_seal(self) -> float | None:
        """Return the seconds until the open file is to be sealed; None without one."""
        if self.tier.seal_at is None:
            return None
        if self._stop_at is not None and self.tier.open_bytes >= STOP_FILE_NBYTES:
            return 0.0
        return max(self.tier.seal_at - time.monotonic(), 0.0)

    def _out_of_time(self) -> bool:
        """Tell whether the rest of the time limit is needed for sealing (twice, if the disk has slowed)."""
        assert self._stop_at is not None
        return time.monotonic() + 2 * self.tier.seal_estimate_s + 0.05 >= self._stop_at

    def _write_some(self) -> None:
        """Write up to REPORT_BLOCKS blocks, as long as nothing is more urgent; report them."""
        fates: dict[str, list[int]] = {"written": [], "durable": [], "dropped": [], "bad": []}
        for _ in range(REPORT_BLOCKS):
            with self._changed:
                if not self._queue or self._seal_wanted or self._removing:
                    break
                # Oldest first, so that no block waits forever; when stopping, newest first.
                key = next(iter(self._queue) if self._stop_at is None else reversed(self._queue))
                item = self._queue.pop(key)
                self._unsealed.add(key)
            for fate in self._write(item):
                fates[fate].append(item.key)
            if self._seconds_to_seal() == 0 or (self._stop_at is not None and self._out_of_time()):
                break
        self._report(**fates)

    def _write(self, item: _Item) -> tuple[str, ...]:
        """Write a block; return what has become of it, as names of the callbacks."""
        try:
            is_open = self.tier.append(*item, now=time.monotonic())
        except TierPaused:
            self.health.not_written(1)
            return ("dropped",)
        except TierWriteError as error:
            self.health.not_written(1, error.reason)
            return ("dropped",)
        except StoreError:  # the bytes are not what put_end said, or not a block at all
            self.health.bad_block(time.monotonic())
            return ("bad",)
        if not is_open:  # the tier has it already
            return ("written", "durable")
        self.health.written()
        return ("written",)

    def _seal(self) -> None:
        try:
            durable = self.tier.seal()
        except TierWriteError as error:
            self.health.not_written(len(error.lost), error.reason)
            self._report(dropped=error.lost)
        else:
            if durable:
                self.health.sealed()
            self._report(durable=durable)
        with self._changed:
            self._seal_wanted = False
            self._changed.notify_all()

    def _remove(self) -> None:
        with self._changed:
            keys, self._removing = list(self._removing), {}
            self._in_removal = keys
            dropped = [key for key in keys if self._queue.pop(key, None)]
        sure = True
        try:
            self.tier.remove(keys)
        except TierWriteError as error:
            dropped += error.lost
            sure = bool(error.lost)
        with self._changed:
            removed_open = self._unsealed.intersection(keys)
        self._report(dropped=dropped + sorted(removed_open.difference(dropped)))
        self._in_removal = []
        if sure:
            self._on_removed(keys)
        else:
            self._counts["removals_failed"] += len(keys)
            self._on_kept(keys)

    def _compact(self) -> None:
        try:
            copied = self.tier.compact(COMPACT_NBYTES, merge_small=self._merge_small)
        except TierWriteError:
            copied = 0  # counted by the tier
        self._merge_small = self._merge_small and copied > 0
        pause = copied / COMPACT_BYTES_PER_S if copied else COMPACT_CHECK_S
        self._compact_at = time.monotonic() + pause
        self._report()

    def _drop_rest(self) -> None:
        with self._changed:
            left = list(self._queue)
            self._queue.clear()
            self._counts["dropped_stopping"] += len(left)
        if left:
            self._on_dropped(left)

    def _report(
        self,
        written: Sequence[int] = (),
        durable: Sequence[int] = (),
        dropped: Sequence[int] = (),
        bad: Sequence[int] = (),
    ) -> None:
        """In this order: a block that is written and durable at once is both."""
        with self._changed:
            self._unsealed.difference_update(durable, dropped, bad)
            self._counts["dropped"] += len(dropped)
            self._counts["bad"] += len(bad)
        for keys, report in (
            (written, self._on_written),
            (durable, self._on_durable),
            (dropped, self._on_dropped),
            (bad, self._on_bad),
            (self.tier.take_evicted(), self._on_evicted),
        ):
            if keys:
                report(list(keys))
