"""One-sided MPI: reads and writes of segments of other nodes, where the network needs no help for it.

Made by `remote` only where a dead rank ends the whole job, because a window needs all of its ranks. Each rank
has one thread, and one more for each rank that it writes to. Short reads begin on the main thread where the
network needs no help. Knows windows, no messages. Explained in docs/explain/transport.md.

Open MPI 5.0 gives every thread that enters a window UCX endpoints of its own, and frees them when the thread
ends. If another thread is in Unlock_all then, that call never ends. And while a rank waits for the other side
to release an endpoint, it does not release those that the other side waits for (_tlocal_ctx_rec_cleanup in
opal/mca/common/ucx/common_ucx_wpool.c). So no other thread enters a window, and before a window is freed, the
ranks end their threads in turn.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from transport.bulk.flight import Flight
from transport.bulk.jobs import Ended, TransferJob
from transport.bulk.slices import Part, plan
from transport.errors import PeerLost, TransferCancelled, TransferError, TransferTimeout, WorldError, why_over
from transport.threads import OnFatal, start_thread
from transport.world import World, wait_for_end

PIECE_BYTES = 4 * 2**20
"""Most bytes of one operation; shorter ranges share one, as a derived datatype. 3,000 x 12 KiB over UCX, on
one node: 2.4 GB/s with a Get for each, 3.7 to 4.5 with derived datatypes."""

WINDOW = 4
"""Operations of one job under way at once: several, so that the network never waits; few, because none can be
cancelled."""

INLINE_BYTES = 1 * 2**20
INLINE_S = 100e-6
"""A read up to INLINE_BYTES begins on the main thread if no job is under way. The thread tests it for this
long: to wake another thread and to be woken takes 200 us, and RDMA a few."""

TASK_S = 1.0
"""Longest wait for a read by work that runs on the path's own thread: the measurement of `links`."""

SPIN_S = 0.002
PAUSE_S = 0.0001
"""MPI is tested without a pause this long after the last progress; then with this pause between two tests."""

HELP_S = 0.001
"""The target is asked to enter MPI when nothing has moved for this long, and then again and again."""

SMALL_BYTES = 64 * 1024
MOST_HELP = 8
"""Most jobs of up to SMALL_BYTES, one after the other, that may need a rank's help. RDMA needs help only to
connect. If more jobs need it, the measurement was wrong, and this path to the rank is left. Any value works
that is above the few jobs of connecting and soon reached."""

TURNS = 32
"""Most turns in which ranks end their threads, since each costs a barrier. More ranks share the turns."""

THREAD_END_S = 5.0
"""A thread that has not ended by then is left alone: it waits in MPI for a rank that is gone."""


Result = TypeVar("Result")

_End = tuple[TransferJob, TransferError | None, bool]


class OneSided:
    """The one-sided side of one rank's engine. Collective: every rank makes one at the same time.

    stall_s     a job has failed if none of its operations ends for this long
    help_from   called with a rank that should enter MPI: without RDMA the bytes move only while it does
    ended       called with each job and how it ended
    at_once     ranks of which the main thread may begin short reads itself: the network reads their memory
                without help
    on_fatal    called when a thread of this path dies, after its jobs have failed

    An operation that has begun cannot be cancelled. So a failed job ends when MPI has released its buffers,
    or after stall_s more. In the second case no more jobs begin with that rank.
    """

    def __init__(
        self,
        world: World,
        stall_s: float,
        help_from: Callable[[int], object],
        ended: Ended,
        on_fatal: OnFatal | None = None,
    ):
        self._world, self._stall_s, self._help_from, self._ended = world, stall_s, help_from, ended
        self._on_fatal = on_fatal
        self._dead = ""
        self._windows: dict[int, Any] = {}
        self._lost: dict[int, str] = {}
        self._stuck: set[int] = set()
        self._helps: Counter[int] = Counter()
        self._kept: list[Flight] = []
        self._closed = False
        self._moved_s = 0.0
        self.at_once: set[int] = set()
        self._tasks: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # of _flights and of whatever enters MPI here
        self._flights: list[Flight] = []
        self._queue: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._begin_threads()

    # ------------------------------------------------------------------ windows

    def expose(self, segment: int, memory: np.ndarray) -> bool:
        """Make a window of a segment of all ranks. False, at every rank, when this MPI cannot. Collective."""
        world, mpi = self._world, self._world.mpi
        world.barrier()
        try:
            window = mpi.Win.Create(memory if memory.nbytes else None, 1, mpi.INFO_NULL, world.comm)
            window.Set_errhandler(mpi.ERRORS_RETURN)
            usable = window.Get_attr(mpi.WIN_MODEL) == mpi.WIN_UNIFIED
            if usable:
                window.Lock_all(mpi.MODE_NOCHECK)
        except mpi.Exception:
            usable = False
        if not all(answer == b"1" for answer in world.allgather_bytes(b"1" if usable else b"0")):
            return False  # some may have one: it is left alone, because freeing it would take all
        self._windows[segment] = window
        world.free_at_finish(lambda: self._finish(segment))
        return True

    def withdraw(self, segment: int) -> None:
        """Free the window of a segment. Collective."""
        self._world.barrier()
        self._give_up_threads()
        self._free(segment)
        self._begin_threads()

    def reaches(self, rank: int, segment: int, helped: bool) -> bool:
        """Tell whether a segment of a rank has a window and, unless helped, needs no help of that rank."""
        return segment in self._windows and not self._dead and (helped or self._helps[rank] <= MOST_HELP)

    def _finish(self, segment: int) -> None:
        self.close()
        self._give_up_threads()
        self._free(segment)

    def _free(self, segment: int) -> None:
        with self._lock:
            window = self._windows.pop(segment, None)
            if window is not None:
                window.Unlock_all()
                window.Free()

    def _begin_threads(self) -> None:
        """Begin the first thread; _make_sure() adds others."""
        self._leaving, self._settled = threading.Event(), threading.Event()
        self._flushers: dict[int, queue.SimpleQueue[Flight | None]] = {}
        self._begin_thread(self._run, "one-sided")

    def _begin_thread(self, run: Callable[..., None], name: str, *args: object) -> None:
        thread = start_thread(name, run, *args, on_death=self._die, on_fatal=self._on_fatal)
        self._threads.append(thread)

    def _give_up_threads(self) -> None:
        """End the threads, each rank in its turn, while the others make progress for MPI. Collective."""
        if not self._threads:
            return
        for turn in range(min(self._world.size, TURNS)):
            if self._world.rank % TURNS == turn:
                self._leaving.set()
                for awaited in (self._queue, *self._flushers.values()):
                    awaited.put(None)
                wait_for_end(self._threads, THREAD_END_S)
                self._threads = []
            self._world.barrier()

    # ------------------------------------------------------------------ called by other threads

    def start(self, job: TransferJob) -> None:
        """Begin a job with a segment that reaches() accepts. `ended` is called at its end."""
        if self._closed or self._dead:
            self._ended(job, why_over(job.rank, self._dead), True)
            return
        now = time.monotonic()
        parts = plan([view.nbytes for view in job.views], PIECE_BYTES, PIECE_BYTES)
        flight = Flight(job, self._windows[job.segment], parts, now, now, now)
        ends: list[_End] = []
        if (limit_s := self._may_take_here(job)) and self._lock.acquire(blocking=False):
            try:
                if not self._flights and not self._closed:
                    ends = self._try_now(flight, now, limit_s)
                if not ends:
                    self._queue.put(flight)  # under the lock, so that its next holder knows of all flights
            finally:
                self._lock.release()
        else:
            self._queue.put(flight)
        self._tell(ends)
        if self._closed or self._dead:  # the thread may have looked for the last time
            self._end_all()

    def run(self, work: Callable[[], Result]) -> Result:
        """Run work() on the thread and return its result. It may read from any rank, one job at a time.

        Raises WorldError after twice the limit of one of its collective steps.
        """
        outcome: Future[Result] = Future()

        def task() -> None:
            try:
                outcome.set_result(work())
            except BaseException as error:
                outcome.set_exception(error)

        self._tasks.append(task)
        self._queue.put(None)
        try:
            return outcome.result(2 * self._world.limit_s)
        except TimeoutError:
            raise WorldError("the paths between the nodes could not be measured in time") from None

    def _may_take_here(self, job: TransferJob) -> float:
        """Return how long the calling thread may begin a job and wait for it; 0.0: not at all."""
        thread = threading.current_thread()
        if thread in self._threads:
            return TASK_S if job.op == "read" else 0.0
        short = job.op == "read" and job.nbytes <= INLINE_BYTES and job.rank in self.at_once
        return INLINE_S if short and thread is threading.main_thread() else 0.0

    def _try_now(self, flight: Flight, now: float, limit_s: float) -> list[_End]:
        while not (ends := self._step(flight, now)) and now - flight.began_s < limit_s:
            now = time.monotonic()
            if now - flight.touched_s > SPIN_S:
                time.sleep(PAUSE_S)
        return ends

    def cancel(self, job: TransferJob) -> None:
        """Do nothing: the thread sees job.cancelled."""

    def mark_lost(self, rank: int, reason: str) -> None:
        """Fail jobs with this rank, those under way and later ones."""
        self._lost.setdefault(rank, reason)

    def close(self) -> None:
        """Fail jobs under way with EngineClosed. Windows stay until MPI ends: others may still read them."""
        self._closed = True
        self._queue.put(None)
        self._settled.wait(THREAD_END_S)
        if not self._windows:
            self._leaving.set()

    def _tell(self, ends: list[_End]) -> None:
        for job, error, safe in ends:
            self._ended(job, error, safe)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        last = time.monotonic()
        while not (self._closed or self._dead or self._leaving.is_set()):
            if not self._flights:
                self._take(wait=True)
                while self._tasks:
                    self._tasks.popleft()()
                last = time.monotonic()
            now = time.monotonic()
            with self._lock:
                self._take(wait=False)
                self._forgive(now - last)
                ends = [end for flight in list(self._flights) for end in self._step(flight, now)]
            last = now
            self._tell(ends)
            del ends  # a waiting thread must keep no buffer alive
            if now - self._moved_s > SPIN_S or not any(flight.flying for flight in self._flights):
                time.sleep(PAUSE_S)  # also where only Flush is awaited: it needs the interpreter to begin
        if self._closed or self._dead:
            self._end_all()
            self._settled.set()
        self._leaving.wait()

    def _forgive(self, since_s: float) -> None:
        """Add the time for which this process did not run to the limits of all jobs."""
        if since_s > self._stall_s / 4:
            for flight in self._flights:
                flight.touched_s += since_s

    def _take(self, wait: bool) -> None:
        """Move the flights that start() has queued to _flights. A None in the queue only wakes the thread."""
        try:
            while (flight := self._queue.get(wait and not self._flights)) is not None or not wait:
                if flight is not None:
                    self._flights.append(flight)
        except queue.Empty:
            return

    def _step(self, flight: Flight, now: float) -> list[_End]:
        """Collect ended operations and begin further ones; return how the job ended, if it has."""
        rank = flight.job.rank
        if (error := self._obstacle(flight.job)) is not None:
            self._fail(flight, error, now)
        try:
            self._advance(flight, now)
        except self._world.mpi.Exception as failure:
            self._fail(
                flight, TransferError(f"MPI with rank {rank}: {failure.Get_error_string()}", rank), now
            )
        if not (flight.flying or flight.more or flight.unsure):
            return self._end(flight, True)
        idle_s = now - flight.touched_s
        if flight.error is not None and (rank in self._lost or idle_s > self._stall_s):
            return self._drop(flight)
        if idle_s > self._stall_s:
            what = f"{flight.job.op} with rank {rank}: nothing moved for {self._stall_s:g} s"
            self._fail(flight, TransferTimeout(what, rank), now)
        elif idle_s > HELP_S and now - flight.asked_s > HELP_S:
            self._helps[rank] += flight.asked_s == flight.began_s and flight.job.nbytes <= SMALL_BYTES
            flight.asked_s = now
            self._help_from(rank)
        return []

    def _obstacle(self, job: TransferJob) -> TransferError | None:
        """Return why no more of this job may begin; None if it may."""
        if job.rank in self._lost:
            return PeerLost(job.rank, self._lost[job.rank])
        if job.cancelled:
            return TransferCancelled("the batch was cancelled", job.rank)
        if job.rank in self._stuck:
            return TransferError(f"one-sided MPI with rank {job.rank} is stuck", job.rank)
        return None

    def _fail(self, flight: Flight, error: TransferError, now: float) -> None:
        """Begin no more operations. Those under way must still end; a write must end at the target too."""
        if flight.error is None:
            flight.putting |= flight.job.op == "write" and flight.begun and not flight.flushing
            flight.error, flight.more, flight.touched_s = error, False, now

    def _advance(self, flight: Flight, now: float) -> None:
        """Collect ended operations, begin further ones, and hand a finished write to the flush thread."""
        while flight.flying and flight.flying[0].Test():
            flight.flying.popleft()
            flight.touched_s = self._moved_s = now
        while flight.more and len(flight.flying) < WINDOW:
            parts = next(flight.parts, [])
            if parts:
                flight.begun = True
                flight.flying.append(self._request(flight, parts))
                flight.touched_s = self._moved_s = now
            else:
                flight.more, flight.putting = False, flight.job.op == "write" and flight.begun
        if flight.putting and not flight.flying and not flight.flushing:
            self._make_sure(flight)

    def _make_sure(self, flight: Flight) -> None:
        """Hand a write to the flush thread of its rank.

        The requests of a write end when the bytes have left. Flush ends when they are in place. It has no
        time limit and may need the target's help, so a thread calls it, for all writes to a rank.
        """
        flight.flushing = True
        rank = flight.job.rank
        if rank not in self._flushers:
            self._flushers[rank] = queue.SimpleQueue()
            self._begin_thread(self._flush, "one-sided-flush", rank, self._flushers[rank])
        self._flushers[rank].put(flight)

    def _flush(self, rank: int, unflushed: queue.SimpleQueue[Flight | None]) -> None:
        """Flush writes until the windows are freed. If MPI fails, the time limit of the writes ends them."""
        while self._flush_some(rank, unflushed):
            pass  # a waiting thread must keep no buffer alive

    def _flush_some(self, rank: int, unflushed: queue.SimpleQueue[Flight | None]) -> bool:
        """Wait for flights and flush their windows; False when it is time to end."""
        batch = [unflushed.get()]
        while not unflushed.empty():
            batch.append(unflushed.get())
        flights = [flight for flight in batch if flight is not None]
        for window in {id(flight.window): flight.window for flight in flights}.values():
            with contextlib.suppress(self._world.mpi.Exception):
                window.Flush(rank)
                for flight in flights:
                    flight.flushed |= flight.window is window
        return len(flights) == len(batch)

    def _request(self, flight: Flight, parts: list[Part]) -> Any:
        job, mpi = flight.job, self._world.mpi
        begin = flight.window.Rget if job.op == "read" else flight.window.Rput
        if len(parts) == 1:
            index, start, end = parts[0]
            return begin([job.views[index][start:end], mpi.BYTE], job.rank, job.offsets[index] + start)
        lengths = [end - start for _, start, end in parts]
        here = [job.views[index].__array_interface__["data"][0] + start for index, start, _ in parts]
        there = [job.offsets[index] + start for index, start, _ in parts]
        types = [mpi.BYTE.Create_hindexed(lengths, places).Commit() for places in (here, there)]
        request = begin([mpi.BOTTOM, 1, types[0]], job.rank, (0, 1, types[1]))
        for made in types:
            made.Free()
        return request

    def _end_all(self) -> None:
        with self._lock:
            self._take(wait=False)
            for flight in self._flights:
                self._fail(flight, why_over(flight.job.rank, self._dead), flight.touched_s)
            ends = [end for flight in list(self._flights) for end in self._drop(flight)]
        self._tell(ends)

    def _die(self, reason: str) -> None:
        """Fail all jobs, those under way and later ones: the threads need each other."""
        self._dead = reason
        self._queue.put(None)
        self._end_all()
        self._settled.set()

    def _drop(self, flight: Flight) -> list[_End]:
        """End a job although MPI may still hold its buffers, which stay alive."""
        safe = not flight.flying and not flight.unsure
        if not safe:
            flight.job.may_land = True
            self._kept.append(flight)
            self._stuck.add(flight.job.rank)
        return self._end(flight, safe)

    def _end(self, flight: Flight, safe: bool) -> list[_End]:
        if flight in self._flights:
            self._flights.remove(flight)
        if flight.asked_s == flight.began_s and flight.error is None:
            self._helps[flight.job.rank] = 0
        return [(flight.job, flight.error, safe)]
