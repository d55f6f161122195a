"""Tracing of a rank, whatever its role: its messages, its transfers and the part that it writes.

Made by `assemble.py` under --trace; without it none of this exists. `computing/traced.py`,
`store/traced.py` and `conductor/traced.py` add what a role does. See docs/how-to/trace.md.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.launch.run_dir import ENVIRONMENT
from mooncake_lite.messages import Message, RankStats, Stopped, TraceLines
from mooncake_lite.ranks.process import RankProcess
from mooncake_lite.tracing.calls import note_calls
from mooncake_lite.tracing.clocks import Offset, offset_to_rank_0
from mooncake_lite.tracing.lanes import Spans, Timeline
from mooncake_lite.tracing.merge import merged_line
from mooncake_lite.tracing.tracer import PartFile, Tracer, part_path, share_nbytes
from transport.channel import Spoke
from transport.engine import Batch, Transfer, TransferEngine
from transport.world import World

STEPS, MESSAGES, REQUESTS, TRANSFERS = "steps", "messages", "requests", "transfers"
"""Names of lanes; docs/how-to/trace.md says what each of them shows."""

WAIT_FOR_MESSAGES = "wait for messages"
MOST_NAMED = 8
"""Requests that one event names; its number of jobs says how many there are."""


class RankTrace:
    """The lanes that every rank has. A role's trace extends `received` and `sent`.

    roles   of all ranks, by number
    """

    def __init__(self, tracer: Tracer, roles: Sequence[str]) -> None:
        self.tracer = tracer
        self.steps = Timeline(tracer, STEPS)
        self._messages = tracer.lane(MESSAGES)
        self.requests = Spans(tracer, REQUESTS)
        self.transfers = Spans(tracer, TRANSFERS)
        self._roles = roles
        self._batches = itertools.count(1)

    def watch(self, conductor: Spoke, transfers: TransferEngine) -> None:
        """Begin to note messages and transfers."""
        note_calls(self.tracer, conductor, "send", before=self.sent)
        note_calls(self.tracer, conductor, "receive", after=self._received)
        note_calls(self.tracer, transfers, "submit", after=self._submitted)

    def _received(self, began_ns: int, messages: Sequence[Message] | None, wait_s: float) -> None:
        self.received(messages or (), wait_s, began_ns)
        self.tracer.flush_when_due()

    def received(self, messages: Sequence[Message], wait_s: float, began_ns: int) -> None:
        """Note messages of the conductor, and the wait for them: it goes on until the next step."""
        if wait_s > 0:
            self.steps.wait(WAIT_FOR_MESSAGES, began_ns)
        for message in messages:
            self.note(message, "from the conductor")

    def sent(self, message: Message) -> None:
        """Note a message to the conductor. The last one closes the trace: rank 0 then joins the parts."""
        if isinstance(message, Stopped):
            self.close()
        elif not isinstance(message, TraceLines | RankStats):
            self.note(message, "to the conductor")

    def note(self, message: Message, way: str) -> None:
        """Add a message as an instant."""
        args = {"way": way}
        inner = getattr(message, "event", None) or getattr(message, "order", None) or message
        if request_id := getattr(inner, "request_id", ""):
            args["request"] = request_id
        self.tracer.instant(self._messages, type(inner).__name__, self.tracer.now_ns(), args)

    def _submitted(
        self,
        began_ns: int,
        batch: Batch | None,
        transfers: Sequence[Transfer],
        label: tuple[str, str] = ("", ""),
    ) -> None:
        if batch is not None and transfers:
            self.submitted(batch, began_ns, *label)

    def submitted(self, batch: Batch, began_ns: int, name: str = "", request_id: str = "") -> None:
        """Open the span of a batch. The thread that ends the batch closes it."""
        number = next(self._batches)
        args = self._moved(batch) | ({"request": request_id} if request_id else {})
        self.transfers.open(number, name or batch.transfers[0].op, began_ns, args)
        batch.add_done_callback(lambda ended: self.transfers.close(number, _failed(ended)))

    def _moved(self, batch: Batch) -> dict[str, Any]:
        own, reads = self.tracer.number, batch.transfers[0].op == "read"
        others = sorted({transfer.rank for transfer in batch.transfers})
        names = ", ".join(f"rank {rank} ({self._roles[rank]})" for rank in others)
        here = f"rank {own} ({self._roles[own]})"
        return {
            "from": names if reads else here,
            "to": here if reads else names,
            "bytes": sum(transfer.nbytes for transfer in batch.transfers),
            "blocks": len(batch.transfers),
        }

    def close(self) -> None:
        """End what is open, and write the rest."""
        self.steps.close()
        self.tracer.close()


def _failed(batch: Batch) -> dict[str, Any]:
    return {"failed": str(batch.failures[min(batch.failures)])} if batch.failures else {}


# ------------------------------------------------------------------------------ parts


def rank_tracer(process: RankProcess, world: World, conductor: Spoke | None) -> Tracer | None:
    """Open the trace of a rank, None without --trace; collective, because hosts compare their clocks.

    Rank 0 (conductor None) has none, because the conductor's own process traces. On rank 0's host a trace is
    a file. A rank on another host sends its lines to the conductor.
    """
    if not process.config.trace:
        return None
    offset = Offset(0, 0) if world.one_node else offset_to_rank_0(world)
    if conductor is None:
        process.before_leaving = partial(_join_parts, process.config.trace)
        return None
    name, limit_nbytes = f"rank {world.rank} {process.role}", share_nbytes(process.config.ranks + 1)
    if world.node_of[world.rank] != world.node_of[0]:
        name += f" (another host; its times are right to {offset.error_ns / 1e6:.2f} ms)"
        send = partial(_send, conductor, world.rank)
        return Tracer(world.rank, name, send, limit_nbytes, ahead_ns=offset.ahead_ns)
    tracer = Tracer(world.rank, name, PartFile(Path(process.config.trace), world.rank), limit_nbytes)
    process.at_end(tracer.close)
    process.before_leaving = tracer.close
    return tracer


def _send(conductor: Spoke, rank: int, lines: bytes) -> None:
    conductor.send(TraceLines(rank, lines))


def _join_parts(trace: str) -> None:
    """Join the parts on rank 0, unless our own launcher does that."""
    if ENVIRONMENT not in os.environ:
        print(f"mooncake-lite: {merged_line(Path(trace))}", flush=True)


def keep_lines(config: ServeConfig, lines: TraceLines) -> None:
    """Append lines of a rank on another host to its part on the conductor's host.

    What a full disk takes only in part is left out, so that the part still ends with a whole line.
    """
    part = part_path(Path(config.trace), lines.rank)
    with contextlib.suppress(OSError), part.open("ab", buffering=0) as file:
        before = file.tell()
        if file.write(lines.lines) != len(lines.lines):
            file.truncate(before)
