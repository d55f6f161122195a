"""How a client writes: room from the master, bytes to every replica, and publishing without a message.

Used by `client`. A large object is written to room that the client was given in advance, while the master
makes its slot in the table: the put takes as long as the slower of the two. Any thread may call it.
Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from store.distributed import messages as say
from store.distributed.codes import EXISTS, OK, TRANSFER_FAILED, CodeError
from store.distributed.link import Link
from store.distributed.segments import BULK_BYTES, Segments, Warmer
from store.distributed.shared_table import OFFSET_BITS, OFFSET_MASK, TableReader
from store.errors import StoreError
from transport.errors import TransportError

SPARES = 2
"""Rooms in advance that are asked for."""

Parts = Sequence[memoryview]


class Tables(Protocol):
    """Where the current table is."""

    table: TableReader | None


class Writer:
    """The puts of one client.

    _spares    rooms in advance, all of one size and one wish (_kind)
    _ended     puts that readers see and the master has not been told of
    """

    def __init__(self, link: Link, segments: Segments, tables: Tables, warmer: Warmer):
        self._link = link
        self._segments = segments
        self._tables = tables
        self._warmer = warmer
        self._ended: deque[int] = deque()
        self._lock = threading.Lock()
        self._spares: list[say.Grant] = []
        self._kind: tuple[int, say.Wish] | None = None
        self._is_idle = True

    def take_ended(self) -> list[int]:
        """Puts to tell the master of."""
        ended: list[int] = []
        while len(ended) < say.MAX_KEYS:
            try:
                ended.append(self._ended.popleft())
            except IndexError:
                break
        return ended

    def rest(self) -> None:
        """Give rooms in advance back when no put has come since the last call. Raises CodeError."""
        with self._lock:
            was_idle, self._is_idle = self._is_idle, True
            unused = self._spares if was_idle else []
            if was_idle:
                self._spares = []
        if unused:
            self._link.ask(say.PutEnd, [spare.put for spare in unused], False)

    # --------------------------------------------------------------------------- many puts

    def put_many(
        self, names: Sequence[str], values: Sequence[Parts], wish: say.Wish, upsert: bool
    ) -> list[int]:
        """Store objects that are new, one question to the master for all; a code for each."""
        if len(names) == 1 and self._tables.table is not None:
            nbytes = sum(map(len, values[0]))
            if nbytes >= BULK_BYTES:
                return [self._put_bulk(names[0], values[0], nbytes, wish, upsert)]
        codes: list[int] = []
        for first in range(0, len(names), say.MAX_KEYS):
            some, parts = list(names[first : first + say.MAX_KEYS]), values[first : first + say.MAX_KEYS]
            sizes = [sum(map(len, value)) for value in parts]
            try:
                grants = self._link.ask(say.PutStart, some, sizes, wish, upsert, self.take_ended()).grants
            except CodeError as error:
                grants = [error.code] * len(some)
            codes += [self._finish(grant, value) for grant, value in zip(grants, parts)]
        return codes

    def _finish(self, grant: say.Grant | int, parts: Parts, *, written: bool = False) -> int:
        """Write to granted room and publish; the code when there is none."""
        if not isinstance(grant, say.Grant):
            return OK if grant == EXISTS else grant
        try:
            if not written:
                self._write(grant, parts)
            if self._published(grant):
                self._ended.append(grant.put)
                return OK
            (code,) = self._link.ask(say.PutEnd, [grant.put], True).codes
            return int(code)
        except (StoreError, TransportError, ValueError, OSError) as error:
            self._revoke([grant.put])
            return error.code if isinstance(error, CodeError) else TRANSFER_FAILED

    def _write(self, grant: say.Grant, parts: Parts) -> None:
        """Copy the bytes to every replica."""
        nbytes = sum(map(len, parts))
        for location in grant.locations:
            segment = self._segments.get(location >> OFFSET_BITS)
            if segment is None:
                raise CodeError(TRANSFER_FAILED, "a segment is gone")
            segment.write(location & OFFSET_MASK, parts)
            if nbytes >= BULK_BYTES:
                self._warmer.settle(segment, location & OFFSET_MASK, nbytes)

    def _published(self, grant: say.Grant) -> bool:
        """Whether every reader of this machine sees it now, by one store into the table."""
        table = self._tables.table
        if not grant.word or table is None or table.generation != grant.generation:
            return False
        return table.publish(grant.word, grant.version)

    def _revoke(self, puts: list[int]) -> None:
        with contextlib.suppress(CodeError):  # the master revokes them when their time is over, or with us
            self._link.ask(say.PutEnd, puts, False)

    # ------------------------------------------------------------------------- large objects

    def _put_bulk(self, name: str, parts: Parts, nbytes: int, wish: say.Wish, upsert: bool) -> int:
        """One large object: its bytes are on their way while the master works."""
        spare = self._take_spare(nbytes, wish)
        failed: list[Exception] = []

        def write() -> None:
            try:
                if spare is not None:
                    self._write(spare, parts)
            except (StoreError, TransportError, ValueError, OSError) as error:
                failed.append(error)

        try:
            reply: Any = self._link.ask(
                say.PutStart,
                [name],
                [nbytes],
                wish,
                upsert,
                self.take_ended(),
                spare.put if spare else 0,
                SPARES,
                meanwhile=write,
            )
        except CodeError as error:
            return error.code
        (grant,) = reply.grants
        used = spare is not None and isinstance(grant, say.Grant) and grant.put == spare.put
        if spare is not None and not used and not failed:
            reply.spares.append(spare)
        if failed and used:
            self._revoke([grant.put])
            return TRANSFER_FAILED
        code = self._finish(grant, parts, written=used)
        self._keep_spares(reply.spares, nbytes, wish)
        return code

    def _take_spare(self, nbytes: int, wish: say.Wish) -> say.Grant | None:
        with self._lock:
            self._is_idle = False
            if self._kind == (nbytes, wish) and self._spares:
                return self._spares.pop(0)
            unused, self._spares = self._spares, []
            self._kind = (nbytes, wish)
        if unused:
            self._revoke([spare.put for spare in unused])
        return None

    def _keep_spares(self, spares: Sequence[say.Grant], nbytes: int, wish: say.Wish) -> None:
        if not spares:
            return
        with self._lock:
            fits = self._kind == (nbytes, wish)
            if fits:
                self._spares += spares
        if not fits:
            self._revoke([spare.put for spare in spares])
            return
        for spare in spares:
            for location in spare.locations:
                segment = self._segments.get(location >> OFFSET_BITS)
                self._warmer.settle(segment, location & OFFSET_MASK, nbytes)
