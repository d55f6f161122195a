"""One client of a store: finds objects in the shared table, copies bytes, asks the master when it must.

Used by `api`, which gives it Mooncake's names and codes. Any thread may call it. The ways to an object:

    on this machine    hash, probe the table, copy out of the mapped segment, look at the slot again
    elsewhere          ask the master (which grants a lease), read over TCP

Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from xxhash import xxh3_128_intdigest

from store.distributed import messages as say
from store.distributed.arguments import is_usable
from store.distributed.codes import (
    BAD_PARAMETERS,
    INTERNAL,
    LEASE_EXPIRED,
    NO_MASTER,
    NOT_FOUND,
    OK,
    TRANSFER_FAILED,
    CodeError,
)
from store.distributed.config import Setup
from store.distributed.journal import ClientJournals
from store.distributed.link import Link
from store.distributed.memory import machine_id
from store.distributed.segments import Lending, Readable, Segments, Warmer
from store.distributed.shared_table import OFFSET_BITS, OFFSET_MASK, Busy, Found, Retired, TableReader
from store.distributed.writer import Writer
from store.errors import StoreError
from transport.address import address_towards
from transport.curve import CurveKeys
from transport.errors import TransportError

BEAT_S = 1.0
BUSY_BEAT_S = 0.1
"""While the own segment is being filled for the first time: its pages are prepared a little ahead."""

CLOSE_S = 30.0
"""Within it puts under way end, before the room that they write to is given away."""

READ_TRIES = 50
"""Copies of one object that moved under the reader's hands."""

Result = TypeVar("Result")


class Located(NamedTuple):
    """An object that can be read now. found: its slot, or None when the master told us, until until_ns."""

    nbytes: int
    locations: Sequence[int]
    scattered: Sequence[Sequence[tuple[int, int]]]
    found: Found | None
    until_ns: int


def _table_at(at: say.Memory) -> TableReader:
    return TableReader(at.pid, at.fd, at.inode, at.nbytes)


class Client:
    """Joins a master and lends a segment.

    curve      keys, for a master beyond this machine
    use_tcp    neither map segments nor read the table: what another machine would do
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
        self.table: TableReader | None = None
        self._table_lock = threading.Lock()
        self._lending: Lending | None = None
        self._lease_ns = self._link.welcome.lease_ttl_ns
        self._keeper: threading.Thread | None = None
        self._close_lock = threading.RLock()
        self._stop = threading.Event()
        self._writing: list[int] = []  # threads that may write to segments
        machine = machine_id()
        self._segments = Segments(self._ask_segment, "" if use_tcp else machine)
        self._warmer = Warmer()
        self._writer = Writer(self._link, self._segments, self._warmer)
        self._journals: ClientJournals | None = None
        try:
            self._join(setup, curve, machine, use_tcp)
        except BaseException:
            self.close()
            raise
        self._keeper = threading.Thread(target=self._keep, name="store client", daemon=True)
        self._keeper.start()

    def _join(self, setup: Setup, curve: CurveKeys | None, machine: str, use_tcp: bool) -> None:
        token = b""
        told = self._link.welcome.table
        if told.machine == machine:
            try:
                table = _table_at(told)
            except StoreError as error:
                if curve is None:
                    raise CodeError(
                        BAD_PARAMETERS, f"{error}; a master of another user or container wants its keys"
                    ) from None
            else:
                token = table.token
                self._link.watch(told.pid)
                if use_tcp:
                    table.close()
                else:
                    self.table = table
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
        if self.table is not None and joined.journals is not None:
            where = joined.journals
            with contextlib.suppress(StoreError):  # without, puts and misses take a message each
                at = where.pid, where.fd, where.inode, where.nbytes
                self._journals = ClientJournals(*at, joined.journal)
            self._writer.journals = self._journals
        if self._lending is not None:
            self._segments.add_own(joined.segment, self.hostname, self._lending.memory)
            self._warmer.prepare(self._lending.memory, 0)

    def close(self) -> None:
        """Leave; the segment and what only it held are gone. May be called twice.

        Puts and copies under way end first. The room of one that does not is kept from others by the master
        as long as this process lives, for it sees a connection that ended without a word.
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
        if self.table is not None:
            self.table.close()
        if self._journals is not None:
            self._journals.close()

    def _others_writing(self) -> int:
        """Writes of other threads. One of this thread stands still below a signal handler, and finds its
        segments closed when it goes on."""
        here = threading.get_ident()
        return sum(thread != here for thread in list(self._writing))

    def is_healthy(self) -> bool:
        """Whether the master answers and knows us."""
        try:
            return bool(self._link.ask(say.Beat).codes[0] == OK)
        except CodeError:
            return False

    def _keep(self) -> None:
        """Tell the master that we live, until it is gone; unmap what is lent no longer."""
        turn = itertools.count()
        used_before, wait_s, tidy_s = 0, BEAT_S, 0.0
        while not self._stop.wait(wait_s):
            try:
                _, used_until = self._link.ask(say.Beat).codes
                wait_s = BEAT_S if used_until == used_before else BUSY_BEAT_S
                used_before = used_until
                if self._lending is not None:
                    self._warmer.prepare(self._lending.memory, used_until)
                if time.monotonic() - tidy_s >= BEAT_S:
                    tidy_s = time.monotonic()
                    self._writer.rest()
                    self._segments.look_after(next(turn))
            except CodeError:
                if self._link.is_over and not self._stop.is_set():
                    self._on_end()
                    return

    def _ask_segment(self, number: int) -> say.Segment | None:
        told: say.Segment | None = self._link.ask(say.SegmentAsk, number).segment
        return told

    # ------------------------------------------------------------------------------ reading

    def get(self, name: str) -> bytes | None:
        """A copy of an object, None when there is none. Grants a lease. Raises CodeError."""
        table = self.table
        if table is not None:
            try:
                found = table.find(xxh3_128_intdigest(name.encode()))
                if found is not None and found.locations:
                    location = found.locations[0]
                    view = self._segments.views.get(location >> OFFSET_BITS)
                    if view is not None and table.extend_lease(found, time.monotonic_ns() + self._lease_ns):
                        start = location & OFFSET_MASK
                        data = bytes(view[start : start + found.nbytes])
                        if table.words[found.word] == found.version and len(data) == found.nbytes:
                            return data
            except (Retired, Busy, ValueError):  # ValueError: a view or table that was just closed
                pass
        return self.read(name, lambda segment, offset, nbytes: segment.read_bytes(offset, nbytes))

    def read(self, name: str, take: Callable[[Readable, int, int], Result]) -> Result | None:
        """take(segment, offset, nbytes), from a replica that can be reached; again when the object moved
        meanwhile, so take must bear repetition. None when there is no object.

        Raises CodeError: LEASE_EXPIRED, TRANSFER_FAILED, NO_MASTER.
        """
        code = LEASE_EXPIRED
        for _ in range(READ_TRIES):
            located = self.locate(name)
            if located is None:
                return None
            for number, segment, offset in self._replicas(located):
                if segment is None:
                    code = TRANSFER_FAILED
                    continue
                try:
                    result = take(segment, offset, located.nbytes)
                except (TransportError, ValueError):
                    self._segments.forget(number)
                    code = TRANSFER_FAILED
                    continue
                if self._is_still(located):
                    return result
                code = LEASE_EXPIRED
                break
        raise CodeError(code, f"{name!r} could not be read in {READ_TRIES} tries")

    def _replicas(self, located: Located) -> Iterator[tuple[int, Readable | None, int]]:
        """(number of the segment, what to read, offset of the first byte) of each; None: it is gone."""
        for location in located.locations:
            number = location >> OFFSET_BITS
            yield number, self._segments.get(number), location & OFFSET_MASK
        for replica in located.scattered:
            yield replica[0][0] >> OFFSET_BITS, self._segments.scattered(replica), 0

    def locate(self, name: str, *, lease: bool = True) -> Located | None:
        """Where an object is; lease: and keep it there. None when there is none. Raises CodeError."""
        if not is_usable(name):
            return None
        asked_ns = time.monotonic_ns()
        found = self._look(name, asked_ns + self._lease_ns if lease else 0)
        if found is False:
            return None
        if not isinstance(found, Found):
            return self._told(self._link.ask(say.Find, [name], lease).places[0], asked_ns)
        if found.locations:
            return Located(found.nbytes, found.locations, (), found, 0)
        (place,) = self._link.ask(say.Find, [name], False).places  # its lease stands in the table
        return place and Located(place.nbytes, (), place.scattered, found, 0)

    def locate_many(self, names: Sequence[str], *, lease: bool = True) -> list[Located | None]:
        """`locate` of each, with as few questions as there can be. Raises CodeError."""
        if self.table is not None:
            return [self.locate(name, lease=lease) for name in names]
        located: list[Located | None] = []
        for some in say.portions(names):
            asked_ns = time.monotonic_ns()
            places = self._link.ask(say.Find, list(names[some]), lease).places
            located += [self._told(place, asked_ns) for place in places]
        return located

    def _told(self, place: say.Place | None, asked_ns: int) -> Located | None:
        """As the master has told: it holds for one lease from the moment of the question."""
        if place is None:
            return None
        return Located(place.nbytes, place.locations, place.scattered, None, asked_ns + self._lease_ns)

    def _look(self, name: str, until_ns: int) -> Found | bool | None:
        """In the table: the object, False when there is none, None when the master must be asked."""
        whole = xxh3_128_intdigest(name.encode())
        all_taken = False
        for _ in range(READ_TRIES):
            table = self.table
            if table is None:
                return None
            try:
                found = table.find(whole)
                if found is None and all_taken:
                    return False
                if found is None:
                    all_taken = self._take_journals()
                elif not until_ns or table.extend_lease(found, until_ns):
                    return found
            except Retired:
                self._renew_table(table)
            except (Busy, ValueError):
                return None
        return None

    def _is_known(self, name: str) -> bool:
        """Whether it is in the table. Unlike `_look` it may miss what has just been put: the master then
        finds that the name is taken, as it does when two clients put at once."""
        table = self.table
        try:
            return table is not None and table.find(xxh3_128_intdigest(name.encode())) is not None
        except (Retired, Busy, ValueError):
            return False

    def _take_journals(self) -> bool:
        """Every put that has returned by now is in the table from here on. Raises CodeError."""
        if self._journals is None or self._journals.is_pending():
            self._link.ask(say.Drain)
        return True

    def _is_still(self, located: Located) -> bool:
        if located.found is None:
            return time.monotonic_ns() < located.until_ns
        table = self.table
        try:
            return table is not None and table.is_still(located.found)
        except ValueError:  # just closed
            raise CodeError(NO_MASTER, "this store is closed") from None

    def _renew_table(self, old: TableReader) -> None:
        """The master has published another table. Raises CodeError."""
        with self._table_lock:
            if self.table is not old or self._stop.is_set():
                return
            try:
                self.table = _table_at(self._link.ask(say.TableAsk).table)
            except StoreError as error:
                if isinstance(error, CodeError):
                    raise
                raise CodeError(INTERNAL, str(error)) from None

    # ------------------------------------------------------------------------------ writing

    def put(self, name: str, parts: Sequence[memoryview], wish: say.Wish, *, upsert: bool = False) -> int:
        """Store one object; a code. An existing one stays as it is, with OK, unless upsert."""
        return self.put_many([name], [parts], wish, upsert=upsert)[0]

    def put_many(
        self,
        names: Sequence[str],
        values: Sequence[Sequence[memoryview]],
        wish: say.Wish,
        *,
        upsert: bool = False,
    ) -> list[int]:
        """Store objects, with one question to the master for those that are new. A code for each."""
        codes = [OK] * len(names)
        new = [at for at, name in enumerate(names) if upsert or not self._is_known(name)]
        some, parts = [names[at] for at in new], [values[at] for at in new]
        self._writing.append(here := threading.get_ident())
        try:
            self._check_open()
            written = self._writer.put_many(some, parts, wish, upsert)
        except ValueError:
            self._check_open()  # this put was under way for CLOSE_S while another thread closed
            raise
        finally:
            self._writing.remove(here)
        for at, code in zip(new, written):
            codes[at] = code
        return codes

    # ------------------------------------------------------------------------------ the rest

    def ask(self, kind: Callable[..., Any], *values: Any) -> Any:
        """A question to the master. Raises CodeError."""
        self._check_open()
        return self._link.ask(kind, *values)

    def _check_open(self) -> None:
        if self._stop.is_set():
            raise CodeError(NO_MASTER, "this store is closed")

    def ask_codes(self, kind: Callable[..., Any], names: Sequence[str], *values: Any) -> list[int]:
        """A question about many names, in pieces; a code for each, NO_MASTER where none came."""
        codes: list[int] = []
        for some in say.portions(names):
            try:
                codes += self.ask(kind, list(names[some]), *values).codes
            except CodeError as error:
                codes += [error.code] * len(names[some])
        return codes

    def copy(self, name: str, target: int, piece_bytes: int) -> None:
        """Copy an object's bytes to a place that this client has been given, so many at once.

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

        self._writing.append(here := threading.get_ident())
        try:
            self._check_open()
            if self.read(name, take) is None:
                raise CodeError(NOT_FOUND, f"{name!r} is gone")
        finally:
            self._writing.remove(here)

    def segment_name(self, location: int) -> str:
        """Name of the segment of a location."""
        return self._segments.name(location >> OFFSET_BITS)
