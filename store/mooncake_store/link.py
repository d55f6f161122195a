"""A client's connection to its master: one request, one answer, each within a limit; threads take turns.

Used by `client`. It is ZeroMQ to a master on another machine, and for the first words. To a master of this
machine and this user it is a Unix socket, which answers in half the time. The end of the master is noticed at
once where the kernel tells of it, else by silence. Knows no objects. Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from store.mooncake_store import messages as say
from store.mooncake_store.codes import BAD_PARAMETERS, NO_MASTER, CodeError
from transport.channel import Spoke
from transport.errors import ChannelError, WireError
from transport.messaging.address import address_of, tcp_endpoint
from transport.messaging.curve import CurveKeys
from transport.messaging.lines import Line
from transport.wire import Decoder

CALL_S = 5.0
"""A request without an answer by then ends with a code; the answer may still come."""

GIVE_UP_S = 60.0
"""A master of this machine that owes an answer for so long counts as gone; one elsewhere is asked again."""

UNSURE_S = 1.0
"""An interrupted request without an answer by then counts as not sent."""

CONNECT_S = 3.0


class Link:
    """One connection, opened by Hello.

    address    "HOST:PORT" of the master
    curve      keys of both sides; without, the address must be of this machine

    late       called with the answers to abandoned requests: after the limit, or after a signal
    is_over    no answer will ever come: the master has ended, or has forgotten this client

    _then      called with the answer to the open request; None: none is open
    _is_sent   False: that request was interrupted while it was sent
    _sent_s    when it was sent
    _asking    the thread that waits for an answer
    _is_interrupted   it is to wait no longer

    Raises CodeError (NO_MASTER) when no master answers there.
    """

    def __init__(self, address: str, curve: CurveKeys | None):
        self._lock = threading.RLock()  # a signal handler may close in the middle of a question
        self._call = 0
        self.is_over = False
        self._pidfd = -1
        self._line: Line | None = None
        self.late: Callable[[Any], None] = lambda reply: None
        self._then: Callable[[Any], None] | None = None
        self._is_sent = True
        self._sent_s = 0.0
        self._asking = 0
        self._is_interrupted = False
        self._decoder = Decoder(say.Reply, say.MAX_BYTES)
        try:
            self._spoke = Spoke(
                _endpoint(address),
                f"client-{secrets.token_hex(16)}",
                self._decoder,
                curve,
                plain_loopback=True,
                max_send_bytes=say.MAX_BYTES,
            )
        except ChannelError as error:
            raise CodeError(NO_MASTER, f"the master at {address} cannot be reached: {error}") from None
        try:
            self.welcome: say.Welcome = self.ask(say.Hello, say.PROTOCOL, limit_s=CONNECT_S)
            if not isinstance(self.welcome, say.Welcome) or self.welcome.protocol != say.PROTOCOL:
                raise CodeError(NO_MASTER, f"what listens at {address} is no master of this version")
        except BaseException:
            self.close()
            raise

    def watch(self, pid: int) -> None:
        """Watch the master, a process of this machine: its end ends all waiting."""
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(pid)
            self._spoke.watch_fd(self._pidfd)

    def shorten(self) -> None:
        """Send requests over the master's Unix socket from now on, where there is one. Call before Join."""
        with self._lock, contextlib.suppress(ChannelError):
            self._line = Line(self.welcome.line, self._decoder, say.MAX_BYTES, self._spoke.wake_fd)

    def ask(self, kind: Callable[..., msgspec.Struct], *values: Any, limit_s: float = CALL_S) -> Any:
        """Send a request and return its answer.

        Raises CodeError: NO_MASTER when none comes in time, or when the master does not know us;
        BAD_PARAMETERS when the request is too large; the master's code when it cannot answer.
        """
        with self._lock:
            if self.is_over:
                raise CodeError(NO_MASTER, "the master is gone")
            before, self._asking = self._asking, threading.get_ident()
            try:
                reply = self._asked(kind, values, limit_s)
            finally:
                self._asking = before
        if type(reply) is say.Failed:
            raise CodeError(reply.code, "the master cannot answer")
        if type(reply) is say.Codes and reply.codes == [NO_MASTER]:
            self.is_over = True
            raise CodeError(NO_MASTER, "the master does not know this client (any more)")
        return reply

    def _asked(self, kind: Callable[..., msgspec.Struct], values: tuple[Any, ...], limit_s: float) -> Any:
        if self._then is not None:
            self._collect(limit_s)
        self._call += 1
        if self._line is None:
            return self._ask_channel(kind(self._call, *values), self._call, limit_s)
        self._then = self.late  # if a signal ends this: the next who asks takes the answer
        self._say(self._line, kind(self._call, *values), limit_s)
        reply = self._hear(self._line, limit_s)
        self._then = None
        return reply

    def interrupt(self) -> bool:
        """End the wait of this thread's request, below a signal handler; False when it does not wait."""
        if self._asking != threading.get_ident():
            return False
        self._is_interrupted = True
        self._spoke.wake()
        return True

    def _check_interrupted(self) -> None:
        """Raise CodeError (NO_MASTER) after `interrupt`."""
        if self._is_interrupted:
            self._is_interrupted = False
            for reply in self._spoke.receive(0):  # which also forgets that it was woken
                self.late(reply)
            raise CodeError(NO_MASTER, "this store is closed")

    def post(self, kind: Callable[..., msgspec.Struct], *values: Any, then: Callable[[Any], None]) -> bool:
        """Send a request without waiting; `then` gets its answer in `poll`, or before the next request.

        False when that is impossible now: there is no Unix socket, it is in use, or the last answer has not
        come. The thread that finds the answer calls `then`, which must neither wait nor ask.
        Raises CodeError (NO_MASTER).
        """
        if not self.poll() or not self._lock.acquire(blocking=False):
            return False
        try:
            if self._line is None or self._then is not None:
                return False
            self._call += 1
            self._then = then
            self._say(self._line, kind(self._call, *values), CALL_S)
            return True
        finally:
            self._lock.release()

    def poll(self) -> bool:
        """Take the answer to a posted request if it has come; tell whether no posted request is open.

        Raises CodeError (NO_MASTER) when the master is known to be gone.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self.is_over:
                raise CodeError(NO_MASTER, "the master is gone")
            if self._then is not None and self._line is not None and self._line.is_ready():
                self._collect(CALL_S)
            return self._then is None
        finally:
            self._lock.release()

    def _collect(self, limit_s: float) -> None:
        """Take the answer to the open request."""
        assert self._line is not None
        assert self._then is not None
        if not self._is_sent and not self._line.is_ready(min(UNSURE_S, limit_s)):
            self._then = None
            return
        reply = self._hear(self._line, limit_s)
        then, self._then = self._then, None
        then(reply)

    def _say(self, line: Line, message: Any, limit_s: float) -> None:
        self._is_sent, self._sent_s = False, time.monotonic()
        try:
            line.send(message, limit_s)
        except WireError as error:
            self._then = None
            raise CodeError(BAD_PARAMETERS, str(error)) from None
        except ChannelError as error:
            self.is_over = True
            raise CodeError(NO_MASTER, f"the master is gone: {error}") from None
        self._is_sent = True

    def _hear(self, line: Line, limit_s: float) -> Any:
        """Return the answer to the last request; `late` gets those to abandoned ones before it."""
        deadline = time.monotonic() + limit_s
        while True:
            is_ready = line.is_ready(max(0.0, deadline - time.monotonic()))
            self._check_interrupted()
            if not is_ready:
                self.is_over = time.monotonic() - self._sent_s > GIVE_UP_S
                raise CodeError(NO_MASTER, f"the master has not answered within {limit_s:.0f} s")
            try:
                reply = line.receive(limit_s)
            except (ChannelError, WireError) as error:  # after it, whose answer comes next is not known
                self.is_over = True
                raise CodeError(NO_MASTER, f"the master is gone: {error}") from None
            if reply.call == self._call:
                return reply
            self.late(reply)

    def _ask_channel(self, message: Any, call: int, limit_s: float) -> Any:
        """Return the answer to this call; `late` gets those to abandoned calls."""
        try:
            if not self._spoke.send(message):
                raise CodeError(NO_MASTER, "the master takes no more messages")
        except WireError as error:
            raise CodeError(BAD_PARAMETERS, str(error)) from None
        deadline = time.monotonic() + limit_s
        while (left_s := deadline - time.monotonic()) > 0:
            for message in self._spoke.receive(left_s):
                if message.call == call:
                    return message
                self.late(message)
            self._check_interrupted()
            if self._master_ended():
                self.is_over = True
                raise CodeError(NO_MASTER, "the master's process has ended")
        raise CodeError(NO_MASTER, f"the master has not answered within {limit_s:.0f} s")

    def _master_ended(self) -> bool:
        if self._pidfd < 0:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """End the connection, after calls under way; later ones fail. May be called twice."""
        with self._lock:
            self.is_over = True
            self._spoke.close()
            if self._line is not None:
                self._line.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1


def _endpoint(address: str) -> str:
    """Return the endpoint of a master at HOST:PORT; HOST may be a name. Raises CodeError (NO_MASTER)."""
    host, _, port = address.rpartition(":")
    try:
        return tcp_endpoint(address_of(host, int(port)), port)
    except (OSError, ValueError, OverflowError) as error:
        raise CodeError(NO_MASTER, f"the master's address {address!r} is not HOST:PORT: {error}") from None
