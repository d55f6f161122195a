"""One client of a store: joins a master, lends memory, reads (`reader`) and writes (`writer`), and leaves.

Used by `api`, which gives it Mooncake's names and codes. Any thread may call it.
Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from store.errors import StoreError
from store.mooncake_store import messages as say
from store.mooncake_store.codes import BAD_PARAMETERS, NO_MASTER, NOT_FOUND, OK, TRANSFER_FAILED, CodeError
from store.mooncake_store.config import Setup
from store.mooncake_store.journal import ClientJournals
from store.mooncake_store.link import Link
from store.mooncake_store.memory import machine_id
from store.mooncake_store.reader import Reader, table_at
from store.mooncake_store.segments import Lending, Readable, Segments, Warmer
from store.mooncake_store.shared_table import OFFSET_BITS, OFFSET_MASK
from store.mooncake_store.writer import Writer
from transport.messaging.address import address_towards
from transport.messaging.curve import CurveKeys
from transport.threads import start_thread

BEAT_S = 1.0
BUSY_BEAT_S = 0.1
"""Time between beats while the own segment is being filled for the first time.

Each says how far it may still grow.
"""

CLOSE_S = 30.0
"""Longest wait for puts under way, before the space that they write to is freed."""

Result = TypeVar("Result")


class Client:
    """Joins a master and lends a segment.

    curve      keys, for a master beyond this machine
    use_tcp    neither map segments nor read the table, as a client on another machine
    on_end     called once, in a thread of its own, when the master has ended or has forgotten us

    Raises CodeError: NO_MASTER, BAD_PARAMETERS when it is refused.
    """

    def __init__(
        self,
        setup: Setup,
        curve: CurveKeys | None = None,
        *,
        use_tcp: bool = False,
        on_end: Callable[[], None] = lambda: None,
    ):
        self._on_end = on_end
        self._link = Link(setup.master_server_addr, curve)
        self._lending: Lending | None = None
        self._keeper: threading.Thread | None = None
        self._close_lock = threading.RLock()
        self._stop = threading.Event()
        self._why_closed = "this store is closed"
        self._writing: list[int] = []  # threads that may write to segments
        machine = machine_id()
        self._segments = Segments(self._ask_segment, "" if use_tcp else machine)
        self._warmer = Warmer()
        self.reader = Reader(self._link, self._segments, self._stop)
        self._writer = Writer(self._link, self._segments, self._warmer)
        self._journals: ClientJournals | None = None
        try:
            self._join(setup, curve, machine, use_tcp)
        except BaseException:
            self.close()
            raise
        self._keeper = start_thread("store client", self._keep, on_death=self._die)

    def _join(self, setup: Setup, curve: CurveKeys | None, machine: str, use_tcp: bool) -> None:
        token = b""
        told = self._link.welcome.table
        if told.machine != machine and curve is None:
            raise CodeError(BAD_PARAMETERS, "a master of another container wants its keys")
        if told.machine == machine:
            try:
                table = table_at(told)
            except StoreError as error:
                if curve is None:
                    raise CodeError(
                        BAD_PARAMETERS, f"{error}; a master of another user wants its keys"
                    ) from None
            else:
                token = table.token
                self._link.watch(told.pid)
                if use_tcp:
                    table.close()
                else:
                    self.reader.table = table
                    self._link.shorten()
        segment = None
        if setup.global_segment_size:
            host = address_towards(setup.master_server_addr.rpartition(":")[0].strip("[]")) or "127.0.0.1"
            lending = self._lending = Lending(setup.global_segment_size, host)
            segment = say.Segment(
                setup.local_hostname,
                lending.memory.nbytes,
                machine,
                os.getpid(),
                lending.memory.fd,
                lending.memory.inode,
                *lending.server.address,
                lending.secret,
            )
        joined = self._link.ask(say.Join, token, machine, os.getpid(), setup.local_hostname, segment)
        if joined.code != OK:
            raise CodeError(joined.code, f"the master refuses {setup.local_hostname}")
        self.hostname: str = joined.hostname
        if self.reader.table is not None and joined.journals is not None:
            where = joined.journals
            with contextlib.suppress(StoreError):  # without, puts and misses take a message each
                at = where.pid, where.fd, where.inode, where.nbytes
                self._journals = ClientJournals(*at, joined.journal)
            self.reader.journals = self._writer.journals = self._journals
        if self._lending is not None:
            self._segments.add_own(joined.segment, self.hostname, self._lending.memory)
            self._warmer.prepare(self._lending.memory)

    def close(self) -> None:
        """Leave; the segment and the objects that only it held are lost. May be called twice.

        Puts and copies under way end first. If one does not, the master sees a connection that ended without
        a word, and reserves the space of that put as long as this process lives.
        """
        with self._close_lock:
            if self._stop.is_set():
                return
            self._stop.set()
        deadline = time.monotonic() + CLOSE_S
        while (others := self._others_writing()) and time.monotonic() < deadline:
            time.sleep(0.001)
        if not others:
            with contextlib.suppress(CodeError):  # the master notices by itself, or is gone
                self._link.ask(say.Leave, limit_s=1.0)
        self._link.close()
        if self._keeper is not None and self._keeper is not threading.current_thread():
            self._keeper.join(timeout=CLOSE_S)
        self._warmer.close()
        self._segments.close()
        if self._lending is not None:
            self._lending.close()
        if self.reader.table is not None:
            self.reader.table.close()
        if self._journals is not None:
            self._journals.close()

    def interrupt(self) -> bool:
        """Tell whether this thread is in a call, below a signal handler, and end the wait of that call."""
        return self._link.interrupt() or threading.get_ident() in self._writing

    def _others_writing(self) -> int:
        """Count the writes of other threads. One of this thread is suspended; its segments will be closed."""
        here = threading.get_ident()
        return sum(thread != here for thread in list(self._writing))

    def is_healthy(self) -> bool:
        """Tell whether the master answers and knows this client."""
        try:
            return bool(self._link.ask(say.Beat).codes[0] == OK)
        except CodeError:
            return False

    def _keep(self) -> None:
        """Beat to the master until it is gone; unmap segments that are no longer lent."""
        turn = itertools.count()
        used_until, used_before, wait_s, tidy_s = 0, 0, BUSY_BEAT_S, 0.0
        while not self._stop.wait(wait_s):
            try:
                growth = None
                if self._lending is not None:
                    used_before, used_until = used_until, self._lending.memory.used_until
                    growth = self._lending.growth()
                self._link.ask(say.Beat, growth)
                wait_s = BEAT_S if used_until == used_before else BUSY_BEAT_S
                if time.monotonic() - tidy_s >= BEAT_S:
                    tidy_s = time.monotonic()
                    self._writer.rest()
                    self._segments.look_after(next(turn))
            except CodeError:
                if self._link.is_over and not self._stop.is_set():
                    self._on_end()
                    return

    def _die(self, reason: str) -> None:
        """Leave the master, because the beating thread has died. Later calls fail with NO_MASTER."""
        self._why_closed = reason
        self.close()

    def _ask_segment(self, number: int) -> say.Segment | None:
        told: say.Segment | None = self._link.ask(say.SegmentAsk, number).segment
        return told

    # ------------------------------------------------------------------------------ writing

    def put(self, name: str, parts: Sequence[memoryview], wish: say.Wish, *, upsert: bool = False) -> int:
        """Store one object; return a code. An existing one stays as it is, with OK, unless upsert."""
        if not upsert and self.reader.is_known(name):
            return OK
        return self._write(self._writer.put, name, parts, wish, upsert)

    def put_many(
        self,
        names: Sequence[str],
        values: Sequence[Sequence[memoryview]],
        wish: say.Wish,
        *,
        upsert: bool = False,
    ) -> list[int]:
        """Store objects, with one request to the master for those that are new; return a code for each."""
        codes = [OK] * len(names)
        new = [at for at, name in enumerate(names) if upsert or not self.reader.is_known(name)]
        some, parts = [names[at] for at in new], [values[at] for at in new]
        for at, code in zip(new, self._write(self._writer.put_many, some, parts, wish, upsert)):
            codes[at] = code
        return codes

    def _write(self, act: Callable[..., Result], *values: Any) -> Result:
        """Run act(*values) while `close` waits for it. Raises CodeError, also when this client is closed."""
        self._writing.append(here := threading.get_ident())
        try:
            self._check_open()
            return act(*values)
        except ValueError:
            self._check_open()  # it was under way for CLOSE_S while another thread closed
            raise
        finally:
            self._writing.remove(here)

    # ------------------------------------------------------------------------------ the rest

    def ask(self, kind: Callable[..., Any], *values: Any) -> Any:
        """Send the master a request and return its answer. Raises CodeError."""
        self._check_open()
        return self._link.ask(kind, *values)

    def _check_open(self) -> None:
        if self._stop.is_set():
            raise CodeError(NO_MASTER, self._why_closed)

    def ask_codes(self, kind: Callable[..., Any], names: Sequence[str], *values: Any) -> list[int]:
        """Send a request about many names, in pieces; return a code for each, NO_MASTER without an answer."""
        codes: list[int] = []
        for some in say.portions(names):
            try:
                codes += self.ask(kind, list(names[some]), *values).codes
            except CodeError as error:
                codes += [error.code] * len(names[some])
        return codes

    def copy(self, name: str, target: int, piece_bytes: int) -> None:
        """Copy an object's bytes to a place that this client was given, in pieces.

        Raises CodeError, TransportError.
        """
        to = self._segments.get(target >> OFFSET_BITS)
        if to is None:
            raise CodeError(TRANSFER_FAILED, "the segment that was to get a copy is gone")

        def take(segment: Readable, offset: int, nbytes: int) -> bool:
            for done in range(0, nbytes, piece_bytes):
                self._check_open()
                some = segment.read_bytes(offset + done, min(piece_bytes, nbytes - done))
                to.write((target & OFFSET_MASK) + done, [memoryview(some)])
            return True

        if self._write(self.reader.read, name, take) is None:
            raise CodeError(NOT_FOUND, f"{name!r} is gone")

    def segment_name(self, location: int) -> str:
        """Return the name of the segment of a location."""
        return self._segments.name(location >> OFFSET_BITS)
