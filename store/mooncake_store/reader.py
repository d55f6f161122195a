"""A client's reads: it finds objects in the shared table, copies bytes, and asks the master when it must.

Used by `client`, like `writer`. Any thread may call it. The ways to an object:

    on this machine    hash, probe the table, copy out of the mapped segment, look at the slot again
    elsewhere          ask the master (which grants a lease), read over TCP

Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from xxhash import xxh3_128_intdigest

from store.errors import StoreError
from store.mooncake_store import messages as say
from store.mooncake_store.arguments import is_usable
from store.mooncake_store.codes import INTERNAL, LEASE_EXPIRED, NO_MASTER, TRANSFER_FAILED, CodeError
from store.mooncake_store.journal import ClientJournals
from store.mooncake_store.link import Link
from store.mooncake_store.segments import REACH_S, Readable, Segments
from store.mooncake_store.shared_table import OFFSET_BITS, OFFSET_MASK, Busy, Found, Retired, TableReader
from transport.errors import TransportError

READ_TRIES = 50
"""Tries to copy one object that changes while it is read."""

Result = TypeVar("Result")


class Located(NamedTuple):
    """An object that can be read now. found: its slot; None: the master told its place, until until_ns."""

    nbytes: int
    locations: Sequence[int]
    scattered: Sequence[Sequence[tuple[int, int]]]
    found: Found | None
    until_ns: int


def table_at(at: say.Memory) -> TableReader:
    """Open the table that the master has announced. Raises StoreError."""
    return TableReader(at.pid, at.fd, at.inode, at.nbytes)


class Reader:
    """The gets of one client.

    table      None: no memory is shared with the master, so every object takes a request
    journals   show puts that may not be in the table yet; None: every miss takes a request
    closed     set when no segment may be opened any more
    """

    def __init__(self, link: Link, segments: Segments, closed: threading.Event):
        self.table: TableReader | None = None
        self.journals: ClientJournals | None = None
        self._link = link
        self._segments = segments
        self._closed = closed
        self._table_lock = threading.Lock()
        self._lease_ns = link.welcome.lease_ttl_ns

    def get(self, name: str) -> bytes | None:
        """Return a copy of an object, None when there is none. Grants a lease. Raises CodeError."""
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
        """Call take(segment, offset, nbytes) for a replica that can be reached. None: there is no object.

        It is called again if the object has changed meanwhile, so take must be repeatable. Lenders that do
        not answer cost REACH_S in all.

        Raises CodeError: LEASE_EXPIRED, TRANSFER_FAILED, NO_MASTER.
        """
        code = LEASE_EXPIRED
        deadline = time.monotonic() + REACH_S
        for _ in range(READ_TRIES):
            located = self.locate(name)
            if located is None:
                return None
            for number, segment, offset in self._replicas(located, deadline):
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
            if code == TRANSFER_FAILED and time.monotonic() > deadline:
                break
        raise CodeError(code, f"{name!r} could not be read")

    def _replicas(self, located: Located, deadline: float) -> Iterator[tuple[int, Readable | None, int]]:
        """Yield (number of the segment, what to read or None if out of reach, offset) of each replica.

        Those that are left share the time, and the last one still has a moment to be opened in.
        """
        replicas: list[int | Sequence[tuple[int, int]]] = [*located.locations, *located.scattered]
        for at, replica in enumerate(replicas):
            limit_s = max((deadline - time.monotonic()) / (len(replicas) - at), REACH_S / 10)
            if isinstance(replica, int):
                number = replica >> OFFSET_BITS
                yield number, self._segments.get(number, limit_s), replica & OFFSET_MASK
            else:
                yield replica[0][0] >> OFFSET_BITS, self._segments.scattered(replica, limit_s), 0

    def locate(self, name: str, *, lease: bool = True) -> Located | None:
        """Find an object; lease: and lease it. None when there is none. Raises CodeError."""
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
        """Return `locate` of each name, with as few requests as possible. Raises CodeError."""
        if self.table is not None:
            return [self.locate(name, lease=lease) for name in names]
        located: list[Located | None] = []
        for some in say.portions(names):
            asked_ns = time.monotonic_ns()
            places = self._link.ask(say.Find, list(names[some]), lease).places
            located += [self._told(place, asked_ns) for place in places]
        return located

    def _told(self, place: say.Place | None, asked_ns: int) -> Located | None:
        """Return the place that the master has told. It is valid for one lease from the request on."""
        if place is None:
            return None
        return Located(place.nbytes, place.locations, place.scattered, None, asked_ns + self._lease_ns)

    def _look(self, name: str, until_ns: int) -> Found | bool | None:
        """Look into the table: the object, False when there is none, None when the master must be asked."""
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

    def is_known(self, name: str) -> bool:
        """Tell whether a name is in the table.

        Unlike `_look` it may miss an object that was just put. The master then finds that the name is taken,
        as it does when two clients put at once.
        """
        table = self.table
        try:
            return table is not None and table.find(xxh3_128_intdigest(name.encode())) is not None
        except (Retired, Busy, ValueError):
            return False

    def _take_journals(self) -> bool:
        """Have the master publish every put that has returned into the table. Raises CodeError."""
        if self.journals is None or self.journals.is_pending():
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
        """Open the table that the master has published in place of this one. Raises CodeError."""
        with self._table_lock:
            if self.table is not old or self._closed.is_set():
                return
            try:
                self.table = table_at(self._link.ask(say.TableAsk).table)
            except StoreError as error:
                if isinstance(error, CodeError):
                    raise
                raise CodeError(INTERNAL, str(error)) from None
