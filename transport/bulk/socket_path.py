"""Jobs over TCP sockets: a lane of threads for each rank, each with a connection of its own.

Made by `engine`. Long jobs are cut into pieces, so that a lane's threads share them and short jobs get in
between. A lane starts threads when it has work, and they end after a while without any.
Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from transport import errors
from transport.bulk.jobs import Ended, TransferJob
from transport.bulk.lent import LentBuffers
from transport.bulk.sockets import BytesClient, BytesServer
from transport.bulk.sockets_server import SLOWEST_BYTES_PER_S
from transport.messaging.address import reachable_address
from transport.threads import OnFatal, start_thread
from transport.world import World

LEAST_PIECE_BYTES = 2 * 2**20
MOST_PIECE_BYTES = 16 * 2**20
"""Least and most bytes of a piece. A round trip takes a tenth of the time of the smallest; other jobs wait
for the largest."""

STREAMS = (1, 2, 4)
"""Numbers of connections to one rank that one transfer may use; the best is measured (`links`)."""

IDLE_S = 20.0
"""A lane's thread ends after so long without work; its connection stays for the next one."""

CONNECT_S = 5.0

DIAGNOSIS_S = 0.5
"""Longest search for the cause of a lost connection."""


@dataclass(slots=True, eq=False)
class _Running:
    """A job, and the number of its pieces that have not ended; error: the first one."""

    job: TransferJob
    pieces: int
    error: errors.TransferError | None = None


@dataclass(slots=True, eq=False)
class _Piece:
    running: _Running
    ranges: list[tuple[int, int]]
    views: list[np.ndarray]


def cut(job: TransferJob, streams: int) -> list[tuple[list[tuple[int, int]], list[np.ndarray]]]:
    """Cut a job into pieces; return (ranges, views) of each in order. An empty job is one piece."""
    even = -(-job.nbytes // streams)
    size = min(max(even, LEAST_PIECE_BYTES), MOST_PIECE_BYTES)
    pieces: list[tuple[list[tuple[int, int]], list[np.ndarray]]] = [([], [])]
    room = size
    for offset, view in zip(job.offsets, job.views, strict=True):
        start = 0
        while start < view.nbytes:
            if not room:
                pieces.append(([], []))
                room = size
            some = min(room, view.nbytes - start)
            ranges, views = pieces[-1]
            ranges.append((offset + start, some))
            views.append(view[start : start + some])
            start += some
            room -= some
    return pieces


class _Lane:
    """The threads and the client of one rank."""

    def __init__(self, path: SocketPath, rank: int):
        self._path, self._rank = path, rank
        self._work: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        self._in_hand: dict[int, _Piece] = {}
        self._client: BytesClient | None = None

    def put(self, pieces: Sequence[_Piece], streams: int) -> None:
        """Queue pieces, and start threads for them, up to `streams` in all."""
        with self._lock:
            for piece in pieces:
                self._work.put(piece)
            wanted = min(streams, self._threads + max(0, self._work.qsize() - self._idle))
            while self._threads < wanted:
                self._threads += 1
                name = f"lane {self._rank}"
                start_thread(name, self._run, on_death=self._die, on_fatal=self._path.on_fatal)

    def close(self) -> None:
        """Cut off the moving pieces; the waiting ones then fail by themselves."""
        with self._lock:
            client = self._client
        if client is not None:
            client.close()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            try:
                piece = self._work.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    self._idle -= 1
                    if self._work.empty():
                        self._threads -= 1
                        return
                continue
            with self._lock:
                self._idle -= 1
                self._in_hand[threading.get_ident()] = piece
            error = self._moved(piece)
            with self._lock:
                del self._in_hand[threading.get_ident()]
            self._path.end_piece(piece, error)
            del piece  # a waiting thread must keep no buffer alive

    def _die(self, reason: str) -> None:
        """Fail the piece of this thread and, when no thread is left, those that wait.

        The next job starts a thread again.
        """
        with self._lock:
            self._threads -= 1
            mine = self._in_hand.pop(threading.get_ident(), None)
            pieces = [] if mine is None else [mine]
            while not self._threads and not self._work.empty():
                pieces.append(self._work.get())
        for piece in pieces:
            error = errors.TransferError(f"rank {self._rank}: {reason}", self._rank)
            error.may_land = piece is mine and piece.running.job.op == "write"
            self._path.end_piece(piece, error)

    def _moved(self, piece: _Piece) -> errors.TransferError | None:
        job = piece.running.job
        if job.cancelled:
            return errors.TransferCancelled("the batch was cancelled", job.rank)
        if (gone := self._path.gone(job.rank)) is not None:
            return gone
        if piece.running.error is not None:
            return piece.running.error
        nbytes = sum(view.nbytes for view in piece.views)
        limit_s = self._path.stall_s + nbytes / SLOWEST_BYTES_PER_S
        try:
            client = self._connected()
            move = client.read if job.op == "read" else client.write
            move(job.segment, piece.ranges, piece.views, limit_s)
        except errors.TransferError as error:
            found = self._path.gone(job.rank) or _about(job.rank, self._diagnosed(error))
            found.may_land = error.may_land
            return found
        return None

    def _diagnosed(self, error: errors.TransferError) -> errors.TransferError:
        """Return the error of a lost connection, or one that says that no process listens there any more."""
        deadline = time.monotonic() + DIAGNOSIS_S
        while isinstance(error, errors.PeerLost) and not error.nobody_listens and time.monotonic() < deadline:
            try:
                BytesClient(*self._path.addresses[self._rank], self._path.secret, timeout_s=0.2).close()
                return error
            except errors.PeerLost as second:  # one that is dying may still accept connections, and end them
                if second.nobody_listens:
                    return second
                time.sleep(0.01)
            except errors.TransferError:
                return error
        return error

    def _connected(self) -> BytesClient:
        """Return the client, which connects when it is used: put() must not wait for that."""
        with self._lock:
            if self._client is None:
                host, port = self._path.addresses[self._rank]
                self._client = BytesClient(
                    host,
                    port,
                    self._path.secret,
                    timeout_s=CONNECT_S,
                    connections=max(STREAMS),
                    at_once=False,
                )
                if self._path.gone(self._rank) is not None:  # close() came before there was one
                    self._client.close()
            return self._client


def _about(rank: int, error: errors.TransferError) -> errors.TransferError:
    """Return the same error, but with the rank instead of an address."""
    if isinstance(error, errors.PeerLost):
        found = errors.PeerLost(rank, error.reason)
        found.nobody_listens = error.nobody_listens
        return found
    named = isinstance(error, errors.TransferRefused | errors.TransferTimeout | errors.EngineClosed)
    return (type(error) if named else errors.TransferError)(f"rank {rank}: {error}", rank)


class SocketPath:
    """The TCP side of one rank's engine. Collective: every rank makes one at the same time.

    lent        the buffers that other ranks may ask for
    stall_s     a piece takes no longer than this, plus its time at SLOWEST_BYTES_PER_S
    ended       called on a lane's thread with each job and how it ended
    on_fatal    called when a thread of this path dies, after its jobs have failed

    streams     (rank -> connections to use at once); 1 unless set
    """

    def __init__(
        self,
        world: World,
        lent: LentBuffers,
        stall_s: float,
        ended: Ended,
        on_fatal: OnFatal | None = None,
    ):
        self.stall_s = stall_s
        self.on_fatal = on_fatal
        self._ended = ended
        node = world.node_of[world.rank]
        away = [world.hostnames[rank] for rank in range(world.size) if world.node_of[rank] != node]
        here = reachable_address(away) if away else "127.0.0.1"
        self.secret = world.bcast_bytes(secrets.token_bytes(32) if world.rank == 0 else None)
        self.server = BytesServer(self.secret, here, lent=lent, on_fatal=on_fatal)
        cards = world.allgather_bytes(msgspec.msgpack.encode(self.server.address))
        self.addresses = [msgspec.msgpack.decode(card, type=tuple[str, int]) for card in cards]
        self.streams: dict[int, int] = {}
        self._lanes: dict[int, _Lane] = {}
        self._lost: dict[int, str] = {}
        self._lock = threading.Lock()
        self._closed = False

    def start(self, job: TransferJob) -> None:
        """Begin a job. `ended` is called at its end."""
        streams = self.streams.get(job.rank, 1)
        pieces = cut(job, streams)
        running = _Running(job, len(pieces))
        self._lane(job.rank).put([_Piece(running, *piece) for piece in pieces], streams)

    def cancel(self, job: TransferJob) -> None:
        """Begin no more pieces of a job. The engine has set job.cancelled."""

    def mark_lost(self, rank: int, reason: str) -> None:
        """Cut off jobs with this rank: they fail with PeerLost, and so do later ones."""
        self._lost.setdefault(rank, reason)
        with self._lock:
            lane = self._lanes.get(rank)
        if lane is not None:
            lane.close()

    def gone(self, rank: int) -> errors.TransferError | None:
        """Return why no request may be sent to this rank any more; None if it may."""
        if rank in self._lost:
            return errors.PeerLost(rank, self._lost[rank])
        return errors.EngineClosed("the engine was closed", rank) if self._closed else None

    def close(self) -> None:
        """Fail the own jobs with EngineClosed; serve requests of other ranks for a moment more."""
        self._closed = True
        with self._lock:
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.close()
        self.server.close()

    def end_piece(self, piece: _Piece, error: errors.TransferError | None) -> None:
        """Note the end of a piece. The lanes call it, in any order."""
        running = piece.running
        with self._lock:
            running.pieces -= 1
            running.error = running.error or error
            running.job.may_land |= error is not None and error.may_land
            last = not running.pieces
        if last:
            # A connection on which something failed is closed: nothing of this try can land here any more.
            # What the server's kernel holds of a write are the bytes that a second try puts there too.
            self._ended(running.job, running.error, True)

    def _lane(self, rank: int) -> _Lane:
        with self._lock:
            if rank not in self._lanes:
                self._lanes[rank] = _Lane(self, rank)
            return self._lanes[rank]
