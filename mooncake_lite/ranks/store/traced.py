"""Tracing of a store rank: its orders, and the work of its tier's threads.

Made by `assemble.py` under --trace. It watches messages at the spoke and calls of the tier; the store role
does not know about it. See docs/how-to/trace.md.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from mooncake_lite import messages as m
from mooncake_lite.ranks.traced import RankTrace
from mooncake_lite.tracing.calls import note_calls
from mooncake_lite.tracing.lanes import Spans
from mooncake_lite.tracing.tracer import Tracer
from store.tier import HDF5Tier

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

    def received(self, messages: Sequence[m.Message], wait_s: float, began_ns: int) -> None:
        """End the turn that this call follows, note messages, and open the span of each order."""
        if self._turn:
            self.steps.work(self._turn, self._turn_began_ns, ended_ns=began_ns)
        super().received(messages, wait_s, began_ns)
        for message in messages:
            self._begin(message)
        kinds = dict.fromkeys(type(message).__name__ for message in messages)
        self._turn, self._turn_began_ns = ", ".join(kinds), self.tracer.now_ns()

    def _begin(self, message: m.Message) -> None:
        if isinstance(message, m.LoadBlocks):
            self._open(("load", message.number), "load from SSD", message.refs)
        elif isinstance(message, m.CopyBlocks):
            self._open(("copy", message.number), "copy hot blocks", message.targets)
        elif isinstance(message, m.CheckBlocks):
            self._open(("check", message.number), "check blocks", message.refs)
        elif isinstance(message, m.SaveBlocks):
            self._num_saves += 1
            left = set(message.keys)
            self._saving.update((key, (self._num_saves, left)) for key in message.keys)
            self._open(("save", self._num_saves), "save to SSD", message.refs)

    def _open(self, key: tuple[str, int], name: str, refs: Sequence[m.BlockRef]) -> None:
        args = {"blocks": len(refs), "bytes": sum(ref.nbytes for ref in refs)}
        self._orders.open(key, name, args=args)

    def sent(self, message: m.Message) -> None:
        """Note an answer, and close the span of its order."""
        super().sent(message)
        if isinstance(message, m.BlocksLoaded):
            self._orders.close(("load", message.number), {"missing": message.ok.count(False)})
        elif isinstance(message, m.BlocksCopied):
            self._orders.close(("copy", message.number))
        elif isinstance(message, m.BlocksChecked):
            self._orders.close(("check", message.number), {"bad": message.good.count(False)})
        elif isinstance(message, m.BlocksSaved):
            self._saved(message)

    def _saved(self, message: m.BlocksSaved) -> None:
        """Close orders of which every block is written, dropped or bad."""
        for key in message.keys:
            if key in self._saving:
                number, left = self._saving.pop(key)
                left.discard(key)
                if not left:
                    self._orders.close(("save", number))


SLICES = {
    "load": "read block",
    "append": "write block",
    "seal": "seal file",
    "remove": "remove blocks",
    "compact": "compact",
}
"""Methods of a tier -> names of their slices. docs/how-to/trace.md lists them."""

BLOCK_AT = {"load": 1, "append": 3}
"""{method of a tier: index of the argument that is the block}."""


def trace_tier(tracer: Tracer, tier: HDF5Tier) -> None:
    """Note reads and writes of a tier, on a lane for each thread."""
    lanes: dict[int, int] = {}

    def note(method: str, began_ns: int, result: Any, *arguments: Any, **named: Any) -> None:
        if method == "compact" and not result:
            return  # it has copied nothing
        thread = threading.get_ident()
        if thread not in lanes:
            lanes[thread] = tracer.lane(f"SSD, {threading.current_thread().name}")
        moved = {"bytes": result} if method == "compact" else {}
        if method in BLOCK_AT:
            moved = {"bytes": memoryview(arguments[BLOCK_AT[method]]).nbytes}
        tracer.slice(lanes[thread], SLICES[method], began_ns, tracer.now_ns(), moved)

    for method in SLICES:
        note_calls(tracer, tier, method, after=partial(note, method))
