"""The store role: DRAM that others read and write over MPI, and an HDF5 tier on SSD below it.

The segment is passive: the conductor's directory says what lies where. This rank's own work is to write
blocks behind to the tier, and to read them back on demand; its own, and those of ranks that only lend
(`lent_blocks.py`). Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from mooncake_lite import messages as m
from mooncake_lite.errors import ThreadDied
from mooncake_lite.model.sizes import LOAD_SLOTS, SAVE_SLOTS
from mooncake_lite.ranks.conductor_link import ConductorLink
from mooncake_lite.ranks.store.holdings import Holdings
from mooncake_lite.ranks.store.lent_blocks import LentCheck, LentLoads, LentSaves
from store.errors import StoreError
from store.layout import BlockLayout
from store.ssd.tier_health import OVER, TierHealth
from store.ssd.tier_reader import Read, TierReader
from store.ssd.tier_writer import TierWriter
from store.tier import HDF5Tier
from transport.engine import Batch, Transfer, TransferEngine

IDLE_WAIT_S = 0.2
COPY_WAIT_S = 0.002
"""Longest wait for a message: without transfers under way, and while they must be polled."""

TIER_GAUGES = {"blocks", "bytes", "open_bytes", "capacity_bytes"}
INDEX_CHUNK = 4096
"""Keys in one TierIndexed message: 100 kB, well under the limit of a message."""

READ_LIMIT_S = 0.1
"""For reading what the threads have begun, when stopping: one block each."""

WRITE_LIMIT_S = 0.5
"""When stopping: least time of the tier's writer for lent blocks that came to it last."""

SEAL_LIMIT_S = 0.15
"""A user's own mpirun kills a quarter of a second after its signal."""


class StoreRole:
    """The loop of a store rank.

    tier       None when there is no --ssd-dir: then only DRAM holds blocks

    _holds     what it was told to hold
    _reading   numbers of LoadBlocks that the tier's readers work on
    """

    def __init__(
        self,
        transfers: TransferEngine,
        conductor: ConductorLink,
        tier: HDF5Tier | None,
        layout: BlockLayout,
    ) -> None:
        self.number, self._sender = conductor.hello.rank, conductor.sender
        self._holds = Holdings()
        self._reading: set[int] = set()
        self._layout = layout
        self._copies: list[tuple[m.CopyBlocks, Batch]] = []
        self.segment = transfers.local
        self._transfers = transfers
        self._conductor = conductor
        self._tier = tier
        self._outbox: deque[m.Message] = deque()  # these are filled by the writer's and the readers' threads
        self._lent_saved: deque[list[int]] = deque()
        self._lent_read: deque[list[list[int] | None]] = deque()
        self._lent_checks: list[LentCheck] = []
        self._health = TierHealth()
        self._troubles: dict[str, str] = {}  # as told last
        self._died = ""
        self._writer: TierWriter | None = None
        self._reader: TierReader | None = None
        if tier is not None:
            self._writer = self._start_writer(tier)
            self._reader = TierReader(tier, self._loaded, on_fatal=self._thread_died, health=self._health)
        self._lent_saves = LentSaves(transfers, layout, SAVE_SLOTS, self._submit)
        self._lent_loads = LentLoads(self._sender, transfers, layout, LOAD_SLOTS, self._read)
        self._counters = dict.fromkeys(
            ("tier_blocks_bad_total", "tier_load_seconds_total",
             "tier_blocks_saved_total", "tier_blocks_dropped_total", "copied_bytes_total"), 0.0
        )  # fmt: skip

        self._obey: dict[type, Callable[[Any], object]] = {
            m.SaveBlocks: self._save,
            m.LoadBlocks: self._load,
            m.CopyBlocks: self._copy,
            m.CheckBlocks: self._check,
            m.RemoveBlocks: self._remove,
            m.CompactTier: self._compact,
            m.HoldBlocks: lambda order: self._holds.add(order.blocks),
            m.MarkLost: lambda lost: self._holds.lose_rank(lost.rank),
        }

    def _start_writer(self, tier: HDF5Tier) -> TierWriter:
        def tell(message: m.Message) -> None:
            self._outbox.append(message)
            self._conductor.wake()

        def saved(state: Literal["written", "durable", "dropped", "bad"]) -> Callable[[list[int]], None]:
            def report(keys: list[int]) -> None:
                if state != "durable":
                    self._lent_saved.append(keys)
                tell(m.BlocksSaved(*self._sender(), keys, state))

            return report

        return TierWriter(
            tier,
            on_written=saved("written"),
            on_durable=saved("durable"),
            on_dropped=saved("dropped"),
            on_bad=saved("bad"),
            on_evicted=lambda keys: tell(m.TierEvicted(*self._sender(), keys)),
            on_removed=lambda keys: tell(m.BlocksRemoved(*self._sender(), keys, True)),
            on_kept=lambda keys: tell(m.BlocksRemoved(*self._sender(), keys, False)),
            on_fatal=self._thread_died,
            health=self._health,
        )

    def _thread_died(self, name: str, why: str) -> None:
        """From the thread that died: `run` ends the rank."""
        self._died = f"thread {name} died: {why}"
        self._conductor.wake()

    def _loaded(self, number: int, sums: list[list[int] | None], seconds: float) -> None:
        """Report a finished order, on a reader's thread. Orders of `LentLoads` have negative numbers."""
        if number < 0:
            self._lent_read.append(sums)
        else:
            ok, found = [s is not None for s in sums], [s or [] for s in sums]
            self._outbox.append(m.BlocksLoaded(*self._sender(), number, ok, found, seconds))
            self._reading.discard(number)
        self._conductor.wake()

    def announce(self) -> None:
        """Say hello to the conductor, and tell it what the tier holds; a later one, what segments hold."""
        self._conductor.join()
        if self._tier is not None:
            keys, digests = self._tier.blocks()
            for start in range(0, max(1, len(keys)), INDEX_CHUNK):
                end = start + INDEX_CHUNK
                self._conductor.send(
                    m.TierIndexed(*self._sender(), keys[start:end], digests[start:end], end >= len(keys))
                )
        for blocks, last in self._holds.pieces() if self._conductor.epoch else ():
            self._conductor.send(m.Inventory(*self._sender(), blocks, last))

    def _drop_all(self) -> None:
        """Drop all orders, because a new conductor does not know them. Blocks that were given to the tier's
        writer are written all the same."""
        self._lent_saves.drop()
        self._lent_loads.drop()

    def run(self) -> None:
        """Serve until told to stop. Raises ThreadDied when a thread of the tier has died."""
        while not self._conductor.stopping:
            self.turn()

    def turn(self) -> None:
        """Read, begin and advance work, tell. Raises as `run`."""
        if self._died:
            raise ThreadDied(self._died)
        if self._conductor.new_term():
            self._drop_all()
        is_busy = self._moving or self._conductor.may_join
        for message in self._conductor.receive(COPY_WAIT_S if is_busy else IDLE_WAIT_S):
            self._obey[type(message)](message)
        self._finish_copies()
        self._advance_lent()
        self._send_outbox()
        if self._conductor.may_join and not (self._moving or self._reading or self._lent_loads.left):
            self.announce()
        if self._conductor.report_when_due(self._values):
            self._tell_troubles(time.monotonic())

    def close(self, limit_s: float) -> int:
        """Flush blocks, most useful first, for limit_s at most. Returns the number of dropped blocks."""
        if self._writer is None or self._reader is None:
            return 0
        until = time.monotonic() + limit_s
        self._reader.stop(READ_LIMIT_S)
        while self._lent_saves.left and time.monotonic() < until - WRITE_LIMIT_S:
            self._advance_lent(newest_first=True)
            self._send_outbox()
            time.sleep(COPY_WAIT_S)
        dropped = self._writer.stop(max(until - time.monotonic(), 0.0)) + self._lent_saves.left
        if self._tier is not None and self._writer.ended:
            try:
                self._tier.close()
            except StoreError as error:
                print(f"mooncake-lite: {error}", flush=True)
        return dropped

    @property
    def _moving(self) -> bool:
        """Tell whether transfers are under way."""
        return bool(self._copies or self._lent_checks or self._lent_saves.busy or self._lent_loads.busy)

    def still_reading(self) -> bool:
        """Tell, after close, whether a slow disk still uses the segment, which may then not be unmapped."""
        return any(one is not None and not one.ended for one in (self._writer, self._reader))

    def seal_now(self) -> None:
        """Seal the open file at once; safe to call from a signal's thread."""
        if self._writer is not None:
            self._writer.seal_now(SEAL_LIMIT_S)

    # ------------------------------------------------------------------------------ work

    def _save(self, message: m.SaveBlocks) -> None:
        if self._writer is None:
            self._outbox.append(m.BlocksSaved(*self._sender(), message.keys, "dropped"))
            return
        for ref, key, digest, sums in zip(message.refs, message.keys, message.digests, message.checksums):
            if ref.rank != self.number:
                self._lent_saves.add(ref, key, digest, sums)
            elif not self._submit(key, digest, sums, self._bytes(ref.offset, ref.nbytes)):
                self._outbox.append(m.BlocksSaved(*self._sender(), [key], "dropped"))

    def _submit(self, key: int, digest: int, sums: Sequence[int], block: np.ndarray) -> bool:
        return self._writer is not None and self._writer.submit(key, digest, sums, block)

    def _load(self, message: m.LoadBlocks) -> None:
        """Read blocks from the tier into a segment. A bad block is a miss and is never served."""
        if self._reader is None:
            self._loaded(message.number, [None] * len(message.keys), 0.0)
            return
        if message.refs[0].rank != self.number:
            self._lent_loads.add(message)
            return
        reads = [
            Read(key, digest, self._bytes(ref.offset, ref.nbytes))
            for key, digest, ref in zip(message.keys, message.digests, message.refs)
        ]
        self._read(message.number, reads)

    def _read(self, number: int, reads: list[Read]) -> None:
        """Pass blocks to the readers. If their queue is full, read on this thread."""
        assert self._reader is not None
        began = time.perf_counter()
        if number > 0:
            self._reading.add(number)
        if not self._reader.submit(number, reads):
            sums = self._reader.read_now(reads)
            self._loaded(number, sums, time.perf_counter() - began)

    def _copy(self, message: m.CopyBlocks) -> None:
        """Begin to read blocks of other ranks into the own segment."""
        moves = [
            Transfer("read", (0, target.offset), source.rank, 0, source.offset, target.nbytes)
            for source, target in zip(message.sources, message.targets)
        ]
        self._copies.append((message, self._transfers.submit(moves)))

    def _finish_copies(self) -> None:
        for message, batch in [copy for copy in self._copies if copy[1].poll()]:
            self._copies.remove((message, batch))
            sums = [
                [] if index in batch.failures else self._layout.checksums(self._bytes(ref.offset, ref.nbytes))
                for index, ref in enumerate(message.targets)
            ]
            self._counters["copied_bytes_total"] += sum(
                ref.nbytes for ref, good in zip(message.targets, sums) if good
            )
            writing = bool(batch.may_still_land)
            self._conductor.send(m.BlocksCopied(*self._sender(), message.number, sums, writing))

    def _check(self, message: m.CheckBlocks) -> None:
        """Compare blocks with their checksums."""
        if message.refs[0].rank != self.number:
            self._lent_checks.append(LentCheck(self._transfers, self._layout, message))
            return
        blocks = [self._bytes(ref.offset, ref.nbytes) for ref in message.refs]
        good = [self._layout.checksums(block) == sums for block, sums in zip(blocks, message.checksums)]
        self._checked(message, good, blocks[0])

    def _checked(
        self, message: m.CheckBlocks, good: list[bool], block: np.ndarray, problem: str = ""
    ) -> None:
        """Report compared blocks, after writing the bytes of a good block to a file if wanted."""
        if message.path and all(good) and not problem:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                with open(os.open(message.path, flags, 0o600), "wb") as file:
                    file.write(block.data)
            except OSError as error:
                problem = f"rank {self.number} cannot write {message.path}: {error.strerror}"
        self._conductor.send(m.BlocksChecked(*self._sender(), message.number, good, problem))

    def _compact(self, order: m.CompactTier) -> None:
        if self._writer is not None:
            self._writer.compact()

    def _remove(self, message: m.RemoveBlocks) -> None:
        """Remove blocks from the tier. Blocks that cannot be deleted are no longer served."""
        self._holds.remove(message.keys)
        if self._tier is None or self._writer is None:
            self._outbox.append(m.BlocksRemoved(*self._sender(), message.keys, True))
        elif not self._writer.remove(message.keys):
            self._tier.forget(message.keys)
            self._outbox.append(m.BlocksRemoved(*self._sender(), message.keys, False))

    def _advance_lent(self, *, newest_first: bool = False) -> None:
        """Advance the work on lent blocks."""
        while self._lent_saved:
            self._lent_saves.reported(self._lent_saved.popleft())
        if lost := self._lent_saves.advance(newest_first=newest_first):
            self._outbox.append(m.BlocksSaved(*self._sender(), lost, "dropped"))
        answers = [self._lent_loads.advance()]
        while self._lent_read:
            answers.append(self._lent_loads.arrived(self._lent_read.popleft()))
        self._outbox.extend(answer for answer in answers if answer is not None)
        for check in [check for check in self._lent_checks if check.advance()]:
            self._lent_checks.remove(check)
            self._checked(check.message, check.good, check.block, check.problem)

    def _bytes(self, offset: int, nbytes: int) -> np.ndarray:
        return self.segment[offset : offset + nbytes]

    def _send_outbox(self) -> None:
        while self._outbox:
            message = self._outbox.popleft()
            if isinstance(message, m.BlocksSaved) and message.state != "durable":
                name = "saved" if message.state == "written" else "dropped"
                self._counters[f"tier_blocks_{name}_total"] += len(message.keys)
            elif isinstance(message, m.BlocksLoaded):
                self._counters["tier_blocks_bad_total"] += message.ok.count(False)
                self._counters["tier_load_seconds_total"] += message.seconds
            self._conductor.send(message)

    def _tell_troubles(self, now: float) -> None:
        """Tell the conductor what is wrong with the tier, and the terminal when that begins and ends."""
        troubles = self._health.troubles(now)
        for kind, over in OVER.items():
            text, told = troubles.get(kind, ""), self._troubles.get(kind, "")
            if text != told:
                self._conductor.send(m.Degraded(self.number, kind, text))
            if bool(text) != bool(told):
                print(f"mooncake-lite: rank {self.number} (store): {text or over}", flush=True)
        self._troubles = troubles

    def _values(self) -> dict[str, float]:
        """Return the counters of this rank, its tier and the tier's writer."""
        values = dict(self._counters)
        if self._tier is not None and self._writer is not None and self._reader is not None:
            values |= _named("tier_", self._tier.stats(), gauges=TIER_GAUGES)
            values |= _named("tier_writer_", self._writer.stats(), gauges={"queued", "unsealed"})
            values |= _named("tier_reader_", self._reader.stats(), gauges={"queued"})
        return values


def _named(prefix: str, stats: dict[str, int], gauges: set[str]) -> dict[str, float]:
    """Add a prefix to the names of statistics, and `_total` to those that only grow."""
    return {f"{prefix}{name}" if name in gauges else f"{prefix}{name}_total": n for name, n in stats.items()}
