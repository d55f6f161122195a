"""A client's puts: get space from the master, copy bytes to every replica, publish by the journal.

Used by `client`. A client that puts objects of one size gets space in advance, and asks for more without
waiting. Such a put is a copy and a record in shared memory, without a round trip. Any thread may call it.
Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from store.errors import StoreError
from store.mooncake_store import messages as say
from store.mooncake_store.codes import EXISTS, INTERNAL, OK, TRANSFER_FAILED, CodeError
from store.mooncake_store.journal import MAX_NAME_BYTES, ClientJournals
from store.mooncake_store.link import Link
from store.mooncake_store.segments import BULK_BYTES, Segments, Warmer
from store.mooncake_store.shared_table import OFFSET_BITS, OFFSET_MASK
from transport.errors import TransportError

SPARE_BYTES = 16 * 2**20
MIN_SPARES, MAX_SPARES = 2, 16
"""Space in advance: SPARE_BYTES, but at least and at most so many puts.

It must last until the master has answered and the pages are prepared; more would only be lost to others.
"""

ASK_AGAIN_S = 1.0
"""Pause after an answer without space in advance."""

DRAINS = 100
"""Tries to get a place in a full journal, each after the master has taken its records."""

SURE_S = 10.0
"""A put that has taken longer asks whether it has been revoked (`catalogue.PUT_LIMIT_NS`)."""

Parts = Sequence[memoryview]
Kind = tuple[int, say.Wish]


class Writer:
    """The puts of one client.

    journals    None: the master shares no memory with this client, so every put ends with a message
    _spares     space in advance, all of one size and one wish (_kind)
    _back       space in advance that goes back with the next request
    _last       size and wish of the last put
    _losses     of the journals, when the first of the spares were asked for
    """

    def __init__(self, link: Link, segments: Segments, warmer: Warmer):
        self._link = link
        self._segments = segments
        self._warmer = warmer
        self.journals: ClientJournals | None = None
        self._lock = threading.Lock()
        self._spares: deque[say.Grant] = deque()
        self._kind: Kind | None = None
        self._back: list[int] = []
        self._last: Kind | None = None
        self._losses = 0
        self._ask_after_s = 0.0
        self._is_idle = True
        link.late = self._give_back

    def rest(self) -> None:
        """Return space in advance if no put has come since the last call. Raises CodeError."""
        with self._lock:
            was_idle, self._is_idle = self._is_idle, True
            if was_idle:
                self._discard()
            unused, self._back = self._back[: say.MAX_KEYS], self._back[say.MAX_KEYS :]
        if unused:
            self._link.ask(say.PutEnd, unused, False)

    def _give_back(self, reply: Any) -> None:
        """Return space whose answer came too late, or whose put was interrupted by a signal."""
        puts = [grant.put for grant in getattr(reply, "grants", ()) if isinstance(grant, say.Grant)]
        with self._lock:
            self._back += puts

    # --------------------------------------------------------------------------- puts

    def put(self, name: str, parts: Parts, wish: say.Wish, upsert: bool) -> int:
        """Store one object that is new, or upsert; return a code. Raises CodeError."""
        if upsert or self.journals is None:
            return self._put_asked([name], [parts], wish, upsert)[0]
        return self._put_one(self.journals, name, parts, wish)

    def put_many(
        self, names: Sequence[str], values: Sequence[Parts], wish: say.Wish, upsert: bool
    ) -> list[int]:
        """Store objects like `put`, with one request to the master for all; return a code for each.

        Of several upserts of a name only the last is stored: it would replace the others.
        """
        if upsert and len(last := dict(zip(names, values))) < len(names):
            codes = dict(zip(last, self.put_many(list(last), list(last.values()), wish, upsert)))
            return [codes[name] for name in names]
        told: list[int] = []
        for some in say.portions(names):
            told += self._put_asked(list(names[some]), values[some], wish, upsert)
        return told

    def _put_asked(
        self, names: list[str], values: Sequence[Parts], wish: say.Wish, upsert: bool
    ) -> list[int]:
        """Store objects in space that the master gives now."""
        asked_s = time.monotonic()
        sizes = [sum(map(len, value)) for value in values]
        try:
            reply = self._link.ask(say.PutStart, names, sizes, wish, upsert)
        except CodeError as error:
            return [error.code] * len(names)
        try:
            return self._put_granted(reply.grants, values, not upsert, asked_s)
        except BaseException:
            self._give_back(reply)
            raise

    def _put_granted(
        self, grants: Sequence[say.Grant | int], values: Sequence[Parts], may_note: bool, asked_s: float
    ) -> list[int]:
        """Write to granted space and publish. may_note: by a record in the journal."""
        codes = [self._filled(grant, parts) for grant, parts in zip(grants, values)]
        written = [at for at, code in enumerate(codes) if code == OK]
        is_sure = may_note and time.monotonic() - asked_s < SURE_S
        puts = {at: grant.put for at in written if isinstance(grant := grants[at], say.Grant)}
        left = [at for at, put in puts.items() if not (is_sure and self._noted(put))]
        if left:
            for at, code in zip(left, self._end([puts[at] for at in left])):
                codes[at] = code
        return codes

    def _filled(self, grant: say.Grant | int, parts: Parts) -> int:
        """Write to granted space; return the code if there is none."""
        if not isinstance(grant, say.Grant):
            return OK if grant == EXISTS else grant
        try:
            self._write(grant, parts)
            return OK
        except (StoreError, TransportError, ValueError, OSError) as error:
            self._revoke([grant.put])
            return error.code if isinstance(error, CodeError) else TRANSFER_FAILED

    def _noted(self, put: int) -> bool:
        """Publish by a record in the journal; False when that is impossible now."""
        return self.journals is not None and self.journals.append(put)

    def _end(self, puts: list[int]) -> list[int]:
        """Publish by a message; return a code for each put."""
        try:
            return list(self._link.ask(say.PutEnd, puts, True).codes)
        except CodeError as error:
            return [error.code] * len(puts)

    def _write(self, grant: say.Grant, parts: Parts) -> None:
        """Copy the bytes to every replica."""
        nbytes = sum(map(len, parts))
        for replica in grant.scattered:
            scattered = self._segments.scattered(replica)
            if scattered is None:
                raise CodeError(TRANSFER_FAILED, "a segment is gone")
            scattered.write(0, parts)
        for location in grant.locations:
            segment = self._segments.get(location >> OFFSET_BITS)
            if segment is None:
                raise CodeError(TRANSFER_FAILED, "a segment is gone")
            segment.write(location & OFFSET_MASK, parts)
            if nbytes >= BULK_BYTES:
                self._warmer.settle(segment, location & OFFSET_MASK, nbytes)

    def _revoke(self, puts: list[int]) -> None:
        with contextlib.suppress(CodeError):  # the master revokes them when their time is over, or with us
            self._link.ask(say.PutEnd, puts, False)

    # ---------------------------------------------------------------- room in advance

    def _put_one(self, journals: ClientJournals, name: str, parts: Parts, wish: say.Wish) -> int:
        """Put into space in advance, if there is any and the name fits into the journal."""
        kind = sum(map(len, parts)), wish
        text = name.encode()
        spare = self._take_spare(kind, journals.losses) if len(text) <= MAX_NAME_BYTES else None
        if spare is None:
            code = self._put_asked([name], [parts], wish, False)[0]
        else:
            try:
                code = self._fill(journals, spare, text, parts)
            except BaseException:
                self._give_back(say.Grants(0, [spare]))
                raise
        with self._lock:
            is_row, self._last = self._last == kind, kind
        if is_row and code == OK:
            try:
                self._refill(kind, journals.losses)
            except CodeError as error:
                return error.code
        return code

    def _fill(self, journals: ClientJournals, spare: say.Grant, name: bytes, parts: Parts) -> int:
        """Write to space in advance, and publish it under this name."""
        code = self._filled(spare, parts)
        try:
            for _ in range(DRAINS):
                if code != OK or journals.append(spare.put, name):
                    return code
                self._link.ask(say.Drain)  # empties the ring, which other threads fill again
            raise CodeError(INTERNAL, "the journal stays full")
        except CodeError as error:
            self._revoke([spare.put])
            return error.code

    def _take_spare(self, kind: Kind, losses: int) -> say.Grant | None:
        with self._lock:
            self._is_idle = False
            if self._losses != losses:
                self._discard()  # of a segment that is gone, perhaps
            return self._spares.popleft() if self._spares and self._kind == kind else None

    def _discard(self) -> None:
        self._back += [spare.put for spare in self._spares]
        self._spares.clear()
        self._kind = None

    def _refill(self, kind: Kind, losses: int) -> None:
        """Ask for space for puts like the last two; return space for others. Raises CodeError."""
        count = max(MIN_SPARES, min(MAX_SPARES, SPARE_BYTES // kind[0]))
        if self._kind == kind and len(self._spares) > count // 2:
            return  # being told wakes the master
        if not self._link.poll() or time.monotonic() < self._ask_after_s:
            return
        with self._lock:
            if self._kind == kind and len(self._spares) > count // 2:
                return
            if self._kind != kind:
                self._discard()
                self._kind, self._losses = kind, losses
            back, self._back = self._back[: say.MAX_KEYS], self._back[say.MAX_KEYS :]

        def keep(reply: Any) -> None:
            grants = reply.grants if isinstance(reply, say.Grants) else []
            spares = [grant for grant in grants if isinstance(grant, say.Grant)]
            with self._lock:
                if (self._kind, self._losses) != (kind, losses):
                    self._back += [spare.put for spare in spares]
                    return
                self._spares += spares
                if not self._spares:
                    self._ask_after_s = time.monotonic() + ASK_AGAIN_S
            self._prepare(spares, kind[0])

        if not self._link.post(say.SparesAsk, *kind, count, back, then=keep):
            with self._lock:
                self._back += back

    def _prepare(self, spares: Sequence[say.Grant], nbytes: int) -> None:
        """Have the pages of space in advance mapped before they are written to."""
        if nbytes < BULK_BYTES:
            return
        for spare in spares:
            for location in spare.locations:
                segment = self._segments.opened(location >> OFFSET_BITS)
                self._warmer.settle(segment, location & OFFSET_MASK, nbytes)
