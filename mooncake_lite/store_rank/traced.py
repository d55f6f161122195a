"""Tracing of a store rank: the orders it carries out, and what the threads of its tier do.

Made by `assemble.py` under --trace. It watches messages at the spoke and calls of the tier; the store role
knows nothing of it. See docs/how-to/trace.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from mooncake_lite.messages import (
    BlockRef,
    BlocksChecked,
    BlocksCopied,
    BlocksLoaded,
    BlocksSaved,
    CheckBlocks,
    CopyBlocks,
    LoadBlocks,
    Message,
    SaveBlocks,
)
from mooncake_lite.rank.traced import RankTrace, TracedTransfers
from mooncake_lite.tracing.lanes import Spans
from mooncake_lite.tracing.tracer import Tracer
from store.tier import HDF5Tier
from transport.channel import Spoke
from transport.engine import TransferEngine

ORDERS = "orders"


class StoreTrace(RankTrace):
    """The lanes of a store rank. A turn of its loop is a step; each order is a span."""

    def __init__(self, tracer: Tracer, roles: Sequence[str]) -> None:
        super().__init__(tracer, roles)
        self._orders = Spans(tracer, ORDERS)
        self._saving: dict[int, tuple[int, set[int]]] = {}  # key: (number of its order, keys left of it)
        self._num_saves = 0
        self._turn = ""
        self._turn_began_ns = 0

    def received(self, messages: Sequence[Message], wait_s: float, began_ns: int) -> None:
        """End the turn that this call follows, note messages, and open the span of each order."""
        if self._turn:
            self.steps.work(self._turn, self._turn_began_ns, ended_ns=began_ns)
        super().received(messages, wait_s, began_ns)
        for message in messages:
            self._begin(message)
        kinds = dict.fromkeys(type(message).__name__ for message in messages)
        self._turn, self._turn_began_ns = ", ".join(kinds), self.tracer.now_ns()

    def _begin(self, message: Message) -> None:
        if isinstance(message, LoadBlocks):
            self._open(("load", message.number), "load from SSD", message.refs)
        elif isinstance(message, CopyBlocks):
            self._open(("copy", message.number), "copy hot blocks", message.targets)
        elif isinstance(message, CheckBlocks):
            self._open(("check", message.number), "check blocks", message.refs)
        elif isinstance(message, SaveBlocks):
            self._num_saves += 1
            left = set(message.keys)
            self._saving.update((key, (self._num_saves, left)) for key in message.keys)
            self._open(("save", self._num_saves), "save to SSD", message.refs)

    def _open(self, key: tuple[str, int], name: str, refs: Sequence[BlockRef]) -> None:
        args = {"blocks": len(refs), "bytes": sum(ref.nbytes for ref in refs)}
        self._orders.open(key, name, args=args)

    def sent(self, message: Message) -> None:
        """Note an answer, and close the span of its order."""
        super().sent(message)
        if isinstance(message, BlocksLoaded):
            self._orders.close(("load", message.number), {"missing": message.ok.count(False)})
        elif isinstance(message, BlocksCopied):
            self._orders.close(("copy", message.number))
        elif isinstance(message, BlocksChecked):
            self._orders.close(("check", message.number), {"bad": message.good.count(False)})
        elif isinstance(message, BlocksSaved):
            self._saved(message)

    def _saved(self, message: BlocksSaved) -> None:
        """Close orders of which every block is written, dropped or bad."""
        for key in message.keys:
            if key in self._saving:
                number, left = self._saving.pop(key)
                left.discard(key)
                if not left:
                    self._orders.close(("save", number))


class TracedTier(HDF5Tier):
    """A tier whose reads and writes are slices, on a lane for each thread, once `trace` was called."""

    _tracer: Tracer | None = None
    _lanes: dict[int, int]

    def trace(self, tracer: Tracer) -> None:
        """Begin to write slices."""
        self._lanes, self._tracer = {}, tracer

    def load(self, key: int, out: object, digest: int | None = None) -> list[int]:
        """As HDF5Tier.load."""
        began_ns = self._now_ns()
        try:
            return super().load(key, out, digest)
        finally:
            self._note("read block", began_ns, {"bytes": memoryview(out).nbytes})  # type: ignore[arg-type]

    def append(self, key: int, digest: int, checksums: Sequence[int], block: object, now: float) -> bool:
        """As HDF5Tier.append."""
        began_ns = self._now_ns()
        try:
            return super().append(key, digest, checksums, block, now)
        finally:
            self._note("write block", began_ns, {"bytes": memoryview(block).nbytes})  # type: ignore[arg-type]

    def seal(self) -> list[int]:
        """As HDF5Tier.seal."""
        began_ns = self._now_ns()
        try:
            return super().seal()
        finally:
            self._note("seal file", began_ns, {})

    def remove(self, keys: Iterable[int]) -> list[int]:
        """As HDF5Tier.remove."""
        began_ns = self._now_ns()
        try:
            return super().remove(keys)
        finally:
            self._note("remove blocks", began_ns, {})

    def compact(self, nbytes: int, *, merge_small: bool = False) -> int:
        """As HDF5Tier.compact. A call that copies nothing is left out."""
        began_ns = self._now_ns()
        copied = super().compact(nbytes, merge_small=merge_small)
        if copied:
            self._note("compact", began_ns, {"bytes": copied})
        return copied

    def _now_ns(self) -> int:
        return self._tracer.now_ns() if self._tracer is not None else 0

    def _note(self, name: str, began_ns: int, args: dict[str, Any]) -> None:
        if self._tracer is None or not began_ns:
            return
        thread = threading.get_ident()
        if thread not in self._lanes:
            self._lanes[thread] = self._tracer.lane(f"SSD, {threading.current_thread().name}")
        self._tracer.slice(self._lanes[thread], name, began_ns, self._tracer.now_ns(), args)


def trace_store(
    conductor: Spoke, transfers: TransferEngine, tier: HDF5Tier | None, roles: Sequence[str]
) -> None:
    """Begin to trace a store rank, under --trace."""
    if isinstance(transfers, TracedTransfers):
        StoreTrace(transfers.tracer, roles).watch(conductor, transfers)
        if isinstance(tier, TracedTier):
            tier.trace(transfers.tracer)
