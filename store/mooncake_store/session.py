"""A store's membership over the life of several masters: when one has ended, the next is joined.

Used by `api`. The objects of the old segment are lost with the master that knew their places. The segment
stays mapped for readers under way. Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from dataclasses import replace
from typing import Any

from store.errors import StoreError
from store.mooncake_store.client import Client
from store.mooncake_store.config import Setup
from store.mooncake_store.copying import Copying
from transport.errors import ChannelError
from transport.messaging.curve import CurveKeys
from transport.threads import start_thread

REJOIN_S = 0.5
"""Time between two tries to find a new master."""

log = logging.getLogger("mooncake_lite.store")

LEAVE_S = 1.0
"""Longest wait of a collected store for the end of its session.

The garbage collector may run below a lock that the session needs for its end. The session then ends later.
"""

_holders: weakref.WeakSet[Any] = weakref.WeakSet()
_left_behind: list[Session] = []


def forget_in_children(holder: Any) -> None:
    """Let forked processes start without the session (`holder._session`) of their parent.

    They have copies of its sockets, journal and locks, but none of its threads, and would speak in its name.
    """
    _holders.add(holder)


def _forget() -> None:
    for holder in list(_holders):
        if holder._session is not None:
            _left_behind.append(holder._session)  # not collected: that would close what is the parent's
            holder._session.ending.detach()
            holder._session = None


os.register_at_fork(after_in_child=_forget)


def _leave(session: Session) -> None:
    """End the session of a store that is collected, or of one that is left at the end of the program.

    A new thread ends it, because the collector may run on any thread, even on one that the end waits for.
    """
    start_thread("store end", session.close).join(LEAVE_S)


class Session:
    """The client of the present master, replaced when that has ended and another one answers.

    client, copying   may change at any time; calls of the old ones return codes
    ending            closes the session when its holder is collected; no thread refers to the holder

    Raises CodeError as Client does.
    """

    def __init__(self, holder: Any, setup: Setup, curve: CurveKeys | None, *, use_tcp: bool):
        self._setup, self._curve, self._use_tcp = setup, curve, use_tcp
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.client = self._joined()
        self.copying = Copying(self.client)
        self._setup = replace(setup, local_hostname=self.client.hostname)
        self.ending = weakref.finalize(holder, _leave, self)

    def _joined(self) -> Client:
        return Client(self._setup, self._curve, use_tcp=self._use_tcp, on_end=self._rejoin)

    def _rejoin(self) -> None:
        """Join the next master at the same address, under the same name, with an empty segment.

        The thread of the client that has lost its master calls it.
        """
        if not self._closed.is_set():
            log.warning("%s has lost its master, and looks for the next one", self.client.hostname)
        while not self._closed.wait(REJOIN_S):
            try:
                new = self._joined()
            except (StoreError, ChannelError, OSError):
                continue
            with self._lock:
                if self._closed.is_set():
                    old = new
                else:
                    log.warning("%s has joined a new master", new.hostname)
                    old, self.client, self.copying = self.client, new, Copying(new)
            old.close()
            return

    def close(self) -> None:
        """Leave. May be called twice.

        Below a signal handler, a call of this thread may be waiting. That call then ends with a code, and a
        new thread leaves, because the call holds what leaving needs.
        """
        self.ending.detach()
        if self.client.interrupt():
            start_thread("store end", self._close)
        else:
            self._close()

    def _close(self) -> None:
        with self._lock:
            self._closed.set()
        self.copying.close()
        self.client.close()
