"""Tracing of a rank, whatever its role: its messages, its transfers and the part that it writes.

Made by `assemble.py` under --trace; without it none of this exists. `computing_rank/traced.py`,
`traced_store.py` and `traced_conductor.py` add what a role does. See docs/how-to/trace.md.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from mooncake_lite.config import ServeConfig
from mooncake_lite.launch.run_dir import ENVIRONMENT
from mooncake_lite.messages import Message, RankStats, Stopped, TraceLines
from mooncake_lite.rank.process import RankProcess
from mooncake_lite.tracing.clocks import Offset, offset_to_rank_0
from mooncake_lite.tracing.lanes import Spans, Timeline
from mooncake_lite.tracing.merge import merged_line
from mooncake_lite.tracing.tracer import PartFile, Tracer, part_path, share_nbytes
from transport.channel import Spoke
from transport.engine import Batch, Transfer, TransferEngine
from transport.threads import OnFatal
from transport.world import World

STEPS, MESSAGES, REQUESTS, TRANSFERS = "steps", "messages", "requests", "transfers"
"""Names of lanes; docs/how-to/trace.md says what each of them shows."""

WAIT_FOR_MESSAGES = "wait for messages"
MOST_NAMED = 8
"""Requests that one event names; its number of jobs says how many there are."""


class Listener(Protocol):
    """What a traced spoke tells of."""

    def received(self, messages: Sequence[Message], wait_s: float, began_ns: int) -> None:
        """Messages have come, or none within wait_s, since began_ns."""

    def sent(self, message: Message) -> None:
        """A message is being sent to the conductor."""

    def close(self) -> None:
        """The rank has stopped."""


class TracedSpoke(Spoke):
    """A rank's connection to the conductor. listener: None until a role is traced."""

    listener: Listener | None = None
    tracer: Tracer

    def receive(self, timeout_s: float) -> list[Any]:
        """As Spoke.receive."""
        if self.listener is None:
            return super().receive(timeout_s)
        began_ns = self.tracer.now_ns()
        messages = super().receive(timeout_s)
        self.listener.received(messages, timeout_s, began_ns)
        self.tracer.flush_when_due()
        return messages

    def send(self, message: Any) -> bool:
        """As Spoke.send."""
        if self.listener is not None and isinstance(message, Stopped):
            self.listener.close()  # before rank 0 hears that this rank is done
        elif self.listener is not None and not isinstance(message, TraceLines | RankStats):
            self.listener.sent(message)
        return super().send(message)


class TracedTransfers(TransferEngine):
    """Transfers of a rank; each batch is a span. on_submit: None until a role is traced."""

    on_submit: Callable[[Batch, int], None] | None = None
    tracer: Tracer

    def submit(self, transfers: Sequence[Transfer]) -> Batch:
        """As TransferEngine.submit."""
        if self.on_submit is None:
            return super().submit(transfers)
        began_ns = self.tracer.now_ns()
        batch = super().submit(transfers)
        if transfers:
            self.on_submit(batch, began_ns)
        return batch


class RankTrace:
    """The lanes that every rank has. A role's trace extends `received` and `sent`.

    roles    of all ranks, by number
    purpose  names a batch of transfers: (name, details); ("", {}) for one that is not known
    """

    def __init__(self, tracer: Tracer, roles: Sequence[str]) -> None:
        self.tracer = tracer
        self.steps = Timeline(tracer, STEPS)
        self._messages = tracer.lane(MESSAGES)
        self.requests = Spans(tracer, REQUESTS)
        self.transfers = Spans(tracer, TRANSFERS)
        self._roles = roles
        self._num_batches = 0

    def watch(self, conductor: Spoke, transfers: TracedTransfers) -> None:
        """Begin to hear of messages and transfers."""
        assert isinstance(conductor, TracedSpoke)
        conductor.listener, conductor.tracer = self, self.tracer
        transfers.on_submit = self.submitted

    def received(self, messages: Sequence[Message], wait_s: float, began_ns: int) -> None:
        """Note messages of the conductor, and the wait for them: it goes on until the next step."""
        if wait_s > 0:
            self.steps.wait(WAIT_FOR_MESSAGES, began_ns)
        for message in messages:
            self.note(message, "from the conductor")

    def sent(self, message: Message) -> None:
        """Note a message to the conductor."""
        self.note(message, "to the conductor")

    def note(self, message: Message, way: str) -> None:
        """Add a message as an instant."""
        args = {"way": way}
        inner = getattr(message, "event", None) or getattr(message, "order", None) or message
        if request_id := getattr(inner, "request_id", ""):
            args["request"] = request_id
        self.tracer.instant(self._messages, type(inner).__name__, self.tracer.now_ns(), args)

    def purpose(self, batch: Batch) -> tuple[str, dict[str, Any]]:
        """Say what a batch is for."""
        return "", {}

    def submitted(self, batch: Batch, began_ns: int) -> None:
        """Open the span of a batch. The thread that ends the batch closes it."""
        self._num_batches += 1
        number = self._num_batches
        name, args = self.purpose(batch)
        self.transfers.open(number, name or batch.transfers[0].op, began_ns, self._moved(batch) | args)
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


def spoke_of(config: ServeConfig) -> type[Spoke]:
    """Return what connects a rank to the conductor."""
    return TracedSpoke if config.trace else Spoke


def transfer_engine(
    process: RankProcess, world: World, lent_bytes: int, conductor: Spoke, on_fatal: OnFatal
) -> TransferEngine:
    """Make a rank's transfer engine; under --trace one that carries the rank's tracer. Collective."""
    tracer = rank_tracer(process, world, conductor)
    if tracer is None:
        return TransferEngine(world, lent_bytes, on_fatal=on_fatal)
    transfers = TracedTransfers(world, lent_bytes, on_fatal=on_fatal)
    transfers.tracer = tracer
    return transfers


# ------------------------------------------------------------------------------ parts


def rank_tracer(process: RankProcess, world: World, conductor: Spoke | None) -> Tracer | None:
    """Open the trace of a rank, None without --trace; collective, because hosts compare their clocks.

    On rank 0's host it is a file. A rank on another host sends its lines to the conductor.
    """
    if not process.config.trace:
        return None
    offset = Offset(0, 0) if world.one_node else offset_to_rank_0(world)
    name, limit_nbytes = f"rank {world.rank} {process.role}", share_nbytes(process.config.ranks + 1)
    if conductor is not None and world.node_of[world.rank] != world.node_of[0]:
        name += f" (another host; its times are right to {offset.error_ns / 1e6:.2f} ms)"
        send = partial(_send, conductor, world.rank)
        return Tracer(world.rank, name, send, limit_nbytes, ahead_ns=offset.ahead_ns)
    tracer = Tracer(world.rank, name, PartFile(Path(process.config.trace), world.rank), limit_nbytes)
    process.at_end(tracer.close)
    process.before_leaving = partial(_finish, process, tracer)
    return tracer


def _send(conductor: Spoke, rank: int, lines: bytes) -> None:
    conductor.send(TraceLines(rank, lines))


def _finish(process: RankProcess, tracer: Tracer) -> None:
    """Write the rest. Rank 0 then joins the parts, unless our own launcher does that."""
    tracer.close()
    if process.place.rank == 0 and ENVIRONMENT not in os.environ:
        print(f"mooncake-lite: {merged_line(Path(process.config.trace))}", flush=True)


def keep_lines(config: ServeConfig, lines: TraceLines) -> None:
    """Append lines of a rank on another host to its part on the conductor's host.

    What a full disk takes only in part is left out, so that the part still ends with a whole line.
    """
    part = part_path(Path(config.trace), lines.rank)
    with contextlib.suppress(OSError), part.open("ab", buffering=0) as file:
        before = file.tell()
        if file.write(lines.lines) != len(lines.lines):
            file.truncate(before)
