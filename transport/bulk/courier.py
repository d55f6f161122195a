"""Moves bytes to and from ranks of other nodes: small requests over ZeroMQ, bytes over two-sided MPI.

Made by `engine` where the world has more than one node; one thread per rank, which waits on its socket
and enters MPI only while something is in flight, so that waiting costs no core.
The conversation is in `requests`. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from transport import errors
from transport.bulk import requests as say
from transport.bulk.exchange import Exchange, Key
from transport.bulk.jobs import MAX_RANGES, Ended, TransferJob
from transport.bulk.lent import LentBuffers
from transport.bulk.slices import Stream
from transport.channel import CurveKeys, Hub, Spoke
from transport.messaging.address import reachable_address, tcp_endpoint
from transport.threads import OnFatal, start_thread
from transport.wire import Decoder

if TYPE_CHECKING:
    from transport.world import World

SPIN_S = 0.002
"""Time after the last progress in which MPI is tested without a pause; then once in a millisecond.

Any value of this order works: a pause adds latency, and testing without one takes a core.
"""

TESTS = 4
"""Advances of each exchange between two looks at the socket, which cost ten times as much."""

HELPING_S = 0.01
"""Time for which this rank enters MPI for a rank that has asked for help. That rank may ask again."""

LINGER_S = 0.5
"""Time in which close() still serves requests of other ranks that are under way."""


class Courier:
    """The cross-node side of one rank's engine. Collective: all ranks make theirs at the same time.

    lent        the buffers that other ranks may ask for
    others      the ranks that it serves and asks
    stall_s     an exchange in which nothing moves for this long has failed
    ended       called on this thread with each job and how it ended
    on_fatal    called when this thread dies, after its jobs have failed
    """

    def __init__(
        self,
        world: World,
        lent: LentBuffers,
        others: Collection[int],
        stall_s: float,
        ended: Ended,
        on_fatal: OnFatal | None = None,
    ):
        self._world, self._lent, self._stall_s, self._ended = world, lent, stall_s, ended
        self._comm = world.comm.Dup()
        self._comm.Set_errhandler(world.mpi.ERRORS_RETURN)
        world.free_at_finish(self._comm.Free)
        self._tags = int(self._comm.Get_attr(world.mpi.TAG_UB)) // 2
        self._exchanges: dict[Key, Exchange] = {}
        self._lost: dict[int, str] = {}
        self._kept: list[Any] = []
        self._number = 0
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = self._over = False
        self._dead = ""
        self._moved_s = 0.0
        self._closed_s = 0.0
        self._helping_until_s = 0.0
        self._connect(others)
        self._thread = start_thread("courier", self._run, on_death=self._die, on_fatal=on_fatal)

    def _connect(self, others: Collection[int]) -> None:
        """Bind, and exchange endpoints and keys over MPI."""
        world = self._world
        first = CurveKeys.generate().to_bytes() if world.rank == 0 else None
        curve = CurveKeys.generate(client=CurveKeys.from_bytes(world.bcast_bytes(first)))
        names = {str(rank) for rank in others}
        decoder = Decoder(say.ANY_MESSAGE, say.MESSAGE_BYTES)
        away = [world.hostnames[rank] for rank in others if world.node_of[rank] != world.node_of[world.rank]]
        bind = tcp_endpoint(reachable_address(away) if away else "127.0.0.1", "*")
        self._hub = Hub([bind], decoder, curve, may_join=names.__contains__)
        mine = msgspec.msgpack.encode([self._hub.endpoints[0], curve.server_public])
        cards = [msgspec.msgpack.decode(card, type=tuple[str, str]) for card in world.allgather_bytes(mine)]
        self._spokes = {
            rank: Spoke(
                cards[rank][0],
                str(world.rank),
                decoder,
                curve.for_server(cards[rank][1]),
                context=self._hub.context,
            )
            for rank in others
        }

    # ------------------------------------------------------------------ called by other threads

    def start(self, job: TransferJob) -> None:
        """Begin a job of at most MAX_RANGES ranges. `ended` is called at its end."""
        self._tell(lambda: self._ask(job, time.monotonic()))

    def cancel(self, job: TransferJob) -> None:
        """Abandon a job of this courier. A job that has ended is left as it is."""
        self._tell(lambda: self._give_up(job))

    def help_from(self, rank: int) -> None:
        """Ask this rank to enter MPI for a moment."""
        self._tell(lambda: self._send(rank, say.Help()))

    def mark_lost(self, rank: int, reason: str) -> None:
        """Fail requests to this rank, those under way and later ones."""
        self._tell(lambda: self._lose(rank, reason))

    def control(self) -> dict[str, int]:
        """Return the counters of the ZeroMQ side, summed over the sockets."""
        totals = self._hub.counters.as_dict()
        for spoke in self._spokes.values():
            for name, value in spoke.counters.as_dict().items():
                totals[name] += value
        return totals

    def close(self) -> None:
        """Fail this rank's own requests with EngineClosed, and end the thread.

        Requests of other ranks are served for up to LINGER_S more.
        """
        self._closing = True
        self._hub.wake()
        self._thread.join(timeout=5)

    def _tell(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._hub.wake()
        if self._over:  # the thread may have looked for the last time
            self._obey()

    def _obey(self) -> None:
        """Carry out the commands of other threads."""
        while True:
            try:
                command = self._commands.popleft()
            except IndexError:
                return
            command()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closing or self._still_serving(last):
            patience_s = self._patience(last)
            received = self._hub.receive(patience_s)
            now = time.monotonic()
            self._forgive(now - last - patience_s)
            last = now
            for peer, message in received:
                self._on_message(int(peer), message, now)
            self._obey()
            self._progress(now)
        self._shut()

    def _still_serving(self, now: float) -> bool:
        """Tell whether to continue after close(): requests of other ranks are under way, within LINGER_S."""
        self._closed_s = self._closed_s or now
        serving = any(exchange.job is None for exchange in self._exchanges.values())
        return bool(serving or self._commands) and now - self._closed_s < LINGER_S

    def _patience(self, now: float) -> float:
        if now < self._helping_until_s:
            return 0.0
        if not self._exchanges:
            return 1.0
        return 0.0 if now - self._moved_s < SPIN_S else 0.001

    def _forgive(self, late_s: float) -> None:
        """Add the time for which this process did not run to the limits of all exchanges."""
        if late_s > self._stall_s / 4:
            for exchange in self._exchanges.values():
                exchange.touched_s += late_s

    def _progress(self, now: float) -> None:
        for _ in range(TESTS):
            if now < self._helping_until_s:
                self._comm.Iprobe(self._world.rank, 0)  # only to let MPI serve its windows
            for key, exchange in list(self._exchanges.items()):
                if key in self._exchanges:
                    self._advance(key, exchange, now)
        for key, exchange in list(self._exchanges.items()):
            if now - exchange.touched_s > self._stall_s and exchange.error is None:
                self._fail(key, errors.TransferTimeout(self._stalled(exchange), exchange.rank))
        self._kept = [entry for entry in self._kept if not self._is_over(entry[0])]

    def _advance(self, key: Key, exchange: Exchange, now: float) -> None:
        stream = exchange.stream
        if exchange.error is not None:
            self._let_go(key, exchange, now)
            return
        if stream is None:
            return
        try:
            if stream.finished:
                self._comm.Iprobe(exchange.rank, 0)  # only to let MPI move what it has taken over
            elif stream.advance():
                exchange.touched_s = self._moved_s = now
        except self._world.mpi.Exception as error:
            self._on_mpi_error(key, exchange.rank, error)
            return
        if stream.finished and (exchange.receiving or exchange.confirmed):
            if exchange.receiving:
                self._send(exchange.rank, say.Done(exchange.number, mine=exchange.job is not None))
            del self._exchanges[key]
            if exchange.job is not None:
                self._ended(exchange.job, None, True)
            elif exchange.loan is not None:
                self._lent.give_back(exchange.loan, True)

    def _on_mpi_error(self, key: Key, rank: int, error: Any) -> None:
        if error.Get_error_class() == getattr(self._world.mpi, "ERR_PROC_FAILED", None):
            self._lose(rank, "MPI reports that its process failed")
        else:
            self._fail(key, errors.TransferError(f"MPI with rank {rank}: {error.Get_error_string()}", rank))

    def _stalled(self, exchange: Exchange) -> str:
        return f"{exchange.op} with rank {exchange.rank}: nothing moved for {self._stall_s:g} s"

    # ------------------------------------------------------------------ the side that asks

    def _ask(self, job: TransferJob, now: float) -> None:
        if self._over:
            self._ended(job, errors.why_over(job.rank, self._dead), True)
            return
        if job.rank in self._lost:
            self._ended(job, errors.PeerLost(job.rank, self._lost[job.rank]), False)
            return
        if job.cancelled:
            self._ended(job, errors.TransferCancelled("the batch was cancelled", job.rank), True)
            return
        self._number += 1
        number = self._number
        exchange = Exchange(job.op, job.rank, number, now, None, job)
        key = (True, job.rank, number)
        self._exchanges[key] = exchange
        self._moved_s = now
        lengths = [view.nbytes for view in job.views]
        if job.op == "read":
            exchange.stream = self._stream(exchange, job.views)
            self._advance(key, exchange, now)  # the receives are there before the bytes
            self._send(job.rank, say.ReadRequest(number, job.segment, job.offsets, lengths))
        else:
            self._send(job.rank, say.WriteRequest(number, job.segment, job.offsets, lengths))

    def _stream(self, exchange: Exchange, views: list[np.ndarray]) -> Stream:
        """Make the stream of an exchange.

        Both sides choose numbers, so the lowest bit of a tag separates reads and writes.
        """
        tag = 2 * (exchange.number % (self._tags - 1)) + (exchange.op == "write")
        return Stream(self._comm, exchange.rank, tag, views, sending=not exchange.receiving)

    def _fail(self, key: Key, error: errors.TransferError, told: bool = False) -> None:
        """Fail an exchange. told: the other side knows, and no longer touches the bytes."""
        exchange = self._exchanges[key]
        if exchange.error is not None:
            return
        exchange.error, exchange.touched_s = error, time.monotonic()
        if exchange.stream is not None:
            exchange.kept = exchange.stream.abandon()
        if exchange.job is not None and not told and exchange.rank not in self._lost:
            self._send(exchange.rank, say.Cancel(exchange.number))
            # A write that has no stream was never accepted: none of its bytes have left.
            exchange.unconfirmed = exchange.op == "write" and exchange.stream is not None
        self._let_go(key, exchange, exchange.touched_s)

    def _let_go(self, key: Key, exchange: Exchange, now: float) -> None:
        """End a failed exchange once none of its bytes can land any more, on either side.

        Until then its buffers are in use, and late bytes could overwrite those of a second try.
        """
        exchange.kept = [entry for entry in exchange.kept if not self._is_over(entry[0])]
        safe = not exchange.unconfirmed and not (exchange.receiving and exchange.kept)
        if not safe and exchange.rank not in self._lost and now - exchange.touched_s < self._stall_s:
            return
        del self._exchanges[key]
        self._kept += exchange.kept
        if exchange.job is not None:
            assert exchange.error is not None
            exchange.job.may_land |= not safe
            self._ended(exchange.job, exchange.error, safe)
        elif exchange.loan is not None:
            self._lent.give_back(exchange.loan, False)
            if exchange.rank not in self._lost:
                self._send(exchange.rank, say.Cancelled(exchange.number))

    def _is_over(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self._world.mpi.Exception:
            return True

    def _give_up(self, job: TransferJob) -> None:
        for key, exchange in list(self._exchanges.items()):
            if exchange.job is job:
                self._fail(key, errors.TransferCancelled("the batch was cancelled", job.rank))

    def _cut(self, key: Key) -> None:
        """Cut off an exchange that is served, because its segment is withdrawn."""
        if key in self._exchanges:
            self._send(key[1], say.Refuse(key[2], "the segment was withdrawn"))
            self._fail(key, errors.TransferError("the segment was withdrawn", key[1]))

    def _lose(self, rank: int, reason: str) -> None:
        self._lost.setdefault(rank, reason)
        for key in [key for key in self._exchanges if key[1] == rank]:
            self._fail(key, errors.PeerLost(rank, self._lost[rank]), told=True)
            if key in self._exchanges:  # it had failed before, and waited for this rank
                self._let_go(key, self._exchanges[key], time.monotonic())

    # ------------------------------------------------------------------ the side that serves

    def _on_message(self, peer: int, message: Any, now: float) -> None:
        self._moved_s = now
        if isinstance(message, say.ReadRequest | say.WriteRequest):
            self._serve(peer, message, now)
            return
        if isinstance(message, say.Help):
            self._helping_until_s = now + HELPING_S
            return
        # A Done names whose number it is as its sender sees it; all others speak of the asker's.
        ours = not message.mine if isinstance(message, say.Done) else not isinstance(message, say.Cancel)
        key = (ours, peer, message.number)
        exchange = self._exchanges.get(key)
        if exchange is None:  # it was given up, or has ended
            if isinstance(message, say.Cancel):
                self._send(peer, say.Cancelled(message.number))
            return
        exchange.touched_s = now
        if isinstance(message, say.Accept) and exchange.job is not None and exchange.stream is None:
            exchange.stream = self._stream(exchange, exchange.job.views)
        elif isinstance(message, say.Done):
            exchange.confirmed = True
        elif isinstance(message, say.Refuse):
            reason = f"rank {peer} refused: {message.reason}"
            self._fail(key, errors.TransferRefused(reason, peer), told=exchange.stream is None)
        elif isinstance(message, say.Cancelled):
            exchange.unconfirmed = False
        elif isinstance(message, say.Cancel):
            self._fail(key, errors.TransferError("cancelled", peer))

    def _serve(self, peer: int, request: say.Request, now: float) -> None:
        op = "read" if isinstance(request, say.ReadRequest) else "write"
        key = (False, peer, request.number)
        if key in self._exchanges:  # another one's loan would never be given back
            return

        def cut() -> None:
            self._tell(lambda: self._cut(key))

        try:
            loan = self._lent.borrow(
                request.segment, request.offsets, request.lengths, op == "read", MAX_RANGES, cut
            )
        except errors.TransferRefused as refusal:
            self._send(peer, say.Refuse(request.number, str(refusal)))
            return
        exchange = Exchange(op, peer, request.number, now, None, loan=loan)
        exchange.stream = self._stream(exchange, loan.views)
        self._exchanges[key] = exchange
        if op == "write":
            self._send(peer, say.Accept(request.number))
        self._advance(key, exchange, now)

    def _send(self, rank: int, message: msgspec.Struct) -> None:
        """Send a message. One that cannot be queued counts as lost, and the time limit ends its exchange."""
        if not self._over:
            self._spokes[rank].send(message)

    def _shut(self) -> None:
        self._obey()
        for key in list(self._exchanges):
            self._fail(key, errors.why_over(key[1], self._dead))
            if (exchange := self._exchanges.get(key)) is not None:
                self._let_go(key, exchange, exchange.touched_s + self._stall_s)
        self._over = True
        self._close_sockets()
        self._obey()

    def _close_sockets(self) -> None:
        for spoke in self._spokes.values():
            spoke.close()
        self._hub.close()

    def _die(self, reason: str) -> None:
        """Fail all requests, those under way and later ones, without entering MPI.

        When another thread enters MPI, it may still move bytes of requests that had begun. So the loans of
        served writes are not given back.
        """
        self._dead, self._over = reason, True
        exchanges, self._exchanges = self._exchanges, {}
        self._kept.append(exchanges)  # with the buffers
        for exchange in exchanges.values():
            if exchange.job is not None:
                exchange.job.may_land |= exchange.stream is not None
                error = exchange.error or errors.why_over(exchange.rank, self._dead)
                self._ended(exchange.job, error, exchange.stream is None)
            elif exchange.loan is not None and not exchange.receiving:
                self._lent.give_back(exchange.loan, False)
        self._obey()
        self._close_sockets()
