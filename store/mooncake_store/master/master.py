"""The master process of a store: it listens, keeps the books, publishes the table, and notices deaths.

Started by `mooncake-lite store master`; `Master` also runs in a thread of a test. Moves no bytes.
Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec

from store.errors import StoreError
from store.mooncake_store import messages as say
from store.mooncake_store.codes import BAD_PARAMETERS, NO_MASTER, NO_SPACE, OK
from store.mooncake_store.journal import Journals
from store.mooncake_store.master.catalogue import LATE_WRITES_NS, Catalogue
from store.mooncake_store.master.entries import NEVER_NS
from store.mooncake_store.master.tasks import Tasks
from store.mooncake_store.memory import machine_id
from store.mooncake_store.shared_table import TOKEN_BYTES, TableWriter
from transport.channel import Hub
from transport.errors import WireError
from transport.messaging.curve import CurveKeys
from transport.messaging.descriptors import raise_limit
from transport.messaging.lines import LineServer
from transport.messaging.pids import ProcessWatch
from transport.wire import Decoder

log = logging.getLogger("mooncake_lite.store")

DEFAULT_LEASE_MS = 10_000
FIRST_PORT, LAST_PORT = 12_300, 14_300
"""Ports that are given to host names without one."""

TICK_S = 0.25
SILENT_NS = 10 * 10**9
"""A client of another machine that is silent for so long counts as gone."""

MAX_CLIENTS = LAST_PORT - FIRST_PORT
"""Most clients: fewer than there are ports to give, so that one is always free."""

CLIENT_DESCRIPTORS, OTHER_DESCRIPTORS = 3, 64
"""Descriptors of each client: channel, line, process; and those of the master itself, with a reserve."""

MAX_LISTINGS = 64
"""Most unfinished lists of names of one client: more than it has threads, unless some were interrupted."""

SAY_AGAIN_S = 60.0
"""Time between two lines of the log that say that the master is full."""

REMOVED_AT_ONCE = 20_000
"""Objects that one RemoveAll removes at once, which takes a fifth of a second."""

AWAKE_NS = 300_000
"""Time to stay awake after a request over a line: in a series of puts or lookups the next comes sooner."""

AWAY_NS = 5_000_000
"""Longest time that requests over lines keep the master from its other work."""


@dataclass(slots=True)
class Client:
    """A client that has joined.

    pid        0: it is on another machine, and its beats are watched
    journal    None: it has none
    removing   names that its RemoveAll has not reached yet
    listings   number of a list of names -> those that it has not been told
    """

    peer: str
    machine: str
    pid: int
    heard_ns: int
    segment: int = 0
    journal: int | None = None
    removing: list[str] = field(default_factory=list)
    listings: dict[int, list[str]] = field(default_factory=dict)


class Master:
    """One master. run() serves until stop(), from any thread.

    endpoint     "tcp://ADDRESS:PORT"; without curve a loopback address
    lease_ms     length of a lease that reads and is_exist grant
    """

    def __init__(self, endpoint: str, lease_ms: int = DEFAULT_LEASE_MS, curve: CurveKeys | None = None):
        self._curve = curve
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._machine = machine_id()
        self.catalogue = Catalogue(TableWriter(lease_ms * 10**6, self._token))
        self._tasks = Tasks(self.catalogue)
        self._journals = Journals()
        self._writers: dict[int, Client] = {}
        self._parted: dict[str, int] = {}  # journals of processes that live on without a connection
        self._clients: dict[str, Client] = {}
        self._segments: dict[int, say.Segment] = {}
        self._watch = ProcessWatch()
        self._strangers = self._refused = 0
        self._most_clients = min(MAX_CLIENTS, (raise_limit() - OTHER_DESCRIPTORS) // CLIENT_DESCRIPTORS)
        self._said_full_s = -inf
        decoder = Decoder(say.Request, say.MAX_BYTES)
        self._hub = Hub(
            [endpoint], decoder, curve, plain_loopback=curve is None, max_send_bytes=say.MAX_BYTES
        )
        self.endpoint = self._hub.endpoints[0]
        self._lines = LineServer(decoder, say.MAX_BYTES)
        self._hub.watch_fd(self._lines.fd)
        self._hub.watch_fd(self._watch.fd)
        self._running = True
        self._next_port = FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT)
        self._answers: dict[type, Callable[[Client, Any, int], Any]] = {
            say.Leave: self._leave,
            say.Beat: self._beat,
            say.Drain: lambda client, ask, now: say.Codes(ask.call, [OK]),
            say.TableAsk: lambda client, ask, now: say.TableIs(ask.call, self._table()),
            say.SegmentAsk: lambda client, ask, now: say.SegmentIs(ask.call, self._segments.get(ask.number)),
            say.PutStart: self._put_start,
            say.SparesAsk: self._spares_ask,
            say.PutEnd: self._put_end,
            say.Find: self._find,
            say.Remove: self._remove,
            say.RemoveAll: self._remove_all,
            say.NamesAsk: self._names_ask,
            say.Clear: self._clear,
            say.TaskStart: self._task_start,
            say.TaskEnd: self._task_end,
            say.TaskAsk: lambda client, ask, now: self._tasks.ask(ask.call, ask.task),
            say.StatsAsk: lambda client, ask, now: say.Stats(ask.call, self.stats()),
        }

    def run(self) -> None:
        """Read requests and answer them until stop()."""
        next_tick = 0.0
        while self._running:
            received = self._hub.receive(TICK_S) + self._lines.receive()
            for peer, message in received:
                self._handle(peer, message, time.monotonic_ns())
            if not all(isinstance(message, say.SparesAsk) for _, message in received):
                self._stay_awake()  # a client waited for the answer
            now = time.monotonic()
            self._notice_ends()
            if now >= next_tick:
                next_tick = now + TICK_S
                self._tick()
        self._close()

    def _stay_awake(self) -> None:
        """Poll for the next request for a moment.

        A client that asks again soon then need not wait for this process to wake up, and keeps its core.
        """
        began_ns = time.monotonic_ns()
        until = began_ns + AWAKE_NS
        while (now_ns := time.monotonic_ns()) < min(until, began_ns + AWAY_NS) and self._running:
            for peer, message in self._lines.receive():
                self._handle(peer, message, now_ns)
                if not isinstance(message, say.SparesAsk):
                    until = now_ns + AWAKE_NS
            os.sched_yield()

    def stop(self) -> None:
        """Let run() return within a second. Any thread or signal handler may call it."""
        self._running = False
        self._hub.wake()

    def _close(self) -> None:
        self._watch.close()
        self._lines.close()
        self._hub.close()
        self._journals.close()
        self.catalogue.close()

    def stats(self) -> dict[str, int]:
        """Return the counters and gauges of the books and of the channel."""
        channel = {f"channel_{name}": value for name, value in self._hub.counters.as_dict().items()}
        return (
            self.catalogue.stats() | channel | {"clients": len(self._clients), "strangers": self._strangers}
        )

    # ------------------------------------------------------------------------- coming, going

    def _handle(self, peer: str, message: Any, now_ns: int) -> None:
        if isinstance(message, say.Hello):
            welcome = say.Welcome(
                message.call, say.PROTOCOL, self._table(), self.catalogue.table.lease_ttl_ns, self._lines.name
            )
            self._send(peer, welcome)
            return
        if isinstance(message, say.Join):
            self._send(peer, self._join(peer, message, now_ns))
            return
        client = self._clients.get(peer)
        if client is None:
            self._strangers += 1
            self._send(peer, say.Codes(message.call, [NO_MASTER]))
            return
        client.heard_ns = now_ns = self._drain()
        reply = self._answers[type(message)](client, message, now_ns)
        try:
            self._send(peer, reply)
        except WireError:  # longer than a message may be: objects in very many ranges
            for grant in reply.grants if isinstance(reply, say.Grants) else ():
                if isinstance(grant, say.Grant):
                    self.catalogue.put_revoke(peer, grant.put, now_ns)
            self._send(peer, say.Failed(message.call, NO_SPACE))
        if isinstance(message, say.PutStart | say.SparesAsk):
            self.catalogue.keep_below_high_water(now_ns)

    def _drain(self) -> int:
        """Publish all puts that are in the journals, before any other work; return the present time."""
        now_ns = time.monotonic_ns()
        claims = self._journals.waiting(now_ns)
        for claim in claims:
            writer = self._writers.get(claim.journal)
            if writer is not None:
                self.catalogue.claim(writer.peer, claim.put, _text(claim.name), now_ns)
        self._journals.taken(claims)
        return now_ns

    def _send(self, peer: str, reply: Any) -> None:
        if not self._lines.send(peer, reply):
            self._hub.send(peer, reply)

    def _table(self) -> say.Memory:
        table = self.catalogue.table
        return say.Memory(self._machine, os.getpid(), table.fd, table.inode, table.nbytes)

    def _join(self, peer: str, join: say.Join, now_ns: int) -> say.Joined:
        trusted = self._curve is not None or secrets.compare_digest(join.token, self._token)
        is_full = len(self._clients) >= self._most_clients
        if not trusted or peer in self._clients or is_full:
            self._strangers += not trusted
            if is_full:
                self._say_full(f"{self._most_clients} clients have joined")
            return say.Joined(join.call, BAD_PARAMETERS, "", 0)
        local = join.machine == self._machine and join.pid > 0
        client = Client(peer, join.machine, join.pid if local else 0, now_ns)
        hostname = self._hostname(join.hostname)
        if join.segment is not None:
            try:
                client.segment = self.catalogue.mount(peer, hostname, join.machine, join.segment.nbytes)
            except StoreError:
                return say.Joined(join.call, BAD_PARAMETERS, "", 0)
            self._segments[client.segment] = msgspec.structs.replace(join.segment, name=hostname)
        self._clients[peer] = client
        if not local:
            return say.Joined(join.call, OK, hostname, client.segment)
        self._watch.add(peer, join.pid)
        client.journal = self._journals.open()
        if client.journal is None:
            return say.Joined(join.call, OK, hostname, client.segment)
        self._writers[client.journal] = client
        shared = self._journals
        where = say.Memory(self._machine, os.getpid(), shared.fd, shared.inode, shared.nbytes)
        return say.Joined(join.call, OK, hostname, client.segment, client.journal, where)

    def _say_full(self, why: str) -> None:
        """Log that clients are refused, in one line a minute."""
        if time.monotonic() - self._said_full_s > SAY_AGAIN_S:
            self._said_full_s = time.monotonic()
            log.warning("more clients are refused: %s; raise the limit on open files (ulimit -n)", why)

    def _hostname(self, wanted: str) -> str:
        """Return HOST:PORT: as wanted when it has a port, else with one that no segment has."""
        _, colon, port = wanted.rpartition(":")
        if colon and port.isdigit():
            return wanted
        while True:
            self._next_port += 1
            if self._next_port > LAST_PORT:
                self._next_port = FIRST_PORT
            name = f"{wanted}:{self._next_port}"
            if self.catalogue.segment_named(name) is None:
                return name

    def _leave(self, client: Client, leave: say.Leave, now_ns: int) -> say.Codes:
        self._forget(client)
        self._watch.remove(client.peer)
        return say.Codes(leave.call, [OK])

    def _forget(self, client: Client, until_ns: int = 0, machine: str = "") -> None:
        """Forget a client that has left or died. until_ns, machine: see `Catalogue.drop_client`."""
        now_ns = self._drain()
        del self._clients[client.peer]
        if client.journal is not None:
            del self._writers[client.journal]
            if until_ns == NEVER_NS:
                self._parted[client.peer] = client.journal  # one record of it may still come
            else:
                self._journals.release(client.journal)
        self._journals.note_loss()
        self._tasks.drop_client(client.peer, now_ns, _wall_ms(), until_ns)
        self.catalogue.drop_client(client.peer, now_ns, until_ns, machine)
        self._segments.pop(client.segment, None)

    def _notice_ends(self) -> None:
        """Forget clients of this machine whose processes, or connections, have ended."""
        late_ns = time.monotonic_ns() + LATE_WRITES_NS
        for peer, _, _ in self._watch.ended():
            if peer in self._clients:
                self._forget(self._clients[peer], late_ns, self._machine)
            else:
                self.catalogue.settle_client(peer, time.monotonic_ns())
                if peer in self._parted:
                    self._journals.release(self._parted.pop(peer))
        for peer in self._lines.ended():
            if peer in self._clients:  # its process may go on, and write to what it had
                self._forget(self._clients[peer], NEVER_NS)

    def _tick(self) -> None:
        now_ns = self._drain()
        for client in list(self._clients.values()):
            if client.pid == 0 and now_ns - client.heard_ns > SILENT_NS:
                self._forget(client, now_ns + LATE_WRITES_NS)
        self.catalogue.tick(now_ns)
        self._tasks.tick(now_ns, _wall_ms())
        if self._lines.refused != self._refused:
            self._refused = self._lines.refused
            self._say_full("no descriptor is left")

    # ------------------------------------------------------------------------------ answers

    def _beat(self, client: Client, beat: say.Beat, now_ns: int) -> say.Codes:
        lender = self.catalogue.segments().get(client.segment)
        if lender is not None and beat.growth is not None:
            lender.grows_until = lender.used_until + beat.growth
        return say.Codes(beat.call, [OK])

    def _put_start(self, client: Client, ask: say.PutStart, now_ns: int) -> say.Grants:
        start, who = self.catalogue.put_start, (client.peer, client.machine)
        grants = [
            start(*who, name, nbytes, ask.wish, ask.upsert, now_ns)
            for name, nbytes in zip(ask.names, ask.sizes)
        ]
        return say.Grants(ask.call, grants)

    def _spares_ask(self, client: Client, ask: say.SparesAsk, now_ns: int) -> say.Grants:
        books = self.catalogue
        for put in ask.back:
            books.put_revoke(client.peer, put, now_ns)
        spares = books.spares(client.peer, client.machine, ask.nbytes, ask.wish, ask.count, now_ns)
        return say.Grants(ask.call, list(spares))

    def _put_end(self, client: Client, ask: say.PutEnd, now_ns: int) -> say.Codes:
        act = self.catalogue.put_end if ask.done else self.catalogue.put_revoke
        return say.Codes(ask.call, [act(client.peer, put, now_ns) for put in ask.puts])

    def _find(self, client: Client, ask: say.Find, now_ns: int) -> say.Places:
        found = [self.catalogue.find(name, now_ns, lease=ask.lease) for name in ask.names]
        places = [
            None if entry is None else say.Place(entry.nbytes, entry.locations, entry.scattered)
            for entry in found
        ]
        return say.Places(ask.call, places)

    def _remove(self, client: Client, ask: say.Remove, now_ns: int) -> say.Codes:
        remove = self.catalogue.remove
        return say.Codes(ask.call, [remove(name, now_ns, force=ask.force) for name in ask.names])

    def _remove_all(self, client: Client, ask: say.RemoveAll, now_ns: int) -> say.Codes:
        if not ask.more:
            client.removing = self.catalogue.all_names()
        some = client.removing[-REMOVED_AT_ONCE:]
        del client.removing[-REMOVED_AT_ONCE:]
        remove = self.catalogue.remove
        removed = sum(remove(name, now_ns, force=ask.force) == OK for name in some)
        return say.Codes(ask.call, [removed, len(client.removing)])

    def _names_ask(self, client: Client, ask: say.NamesAsk, now_ns: int) -> say.NamesAre:
        left = client.listings.pop(ask.listing, []) if ask.more else self.catalogue.all_names()
        last = left[: -say.MAX_KEYS - 1 : -1]
        page = last[next(say.portions(last), slice(0))]
        del left[len(left) - len(page) :]
        if left:
            client.listings[ask.listing] = left
            if len(client.listings) > MAX_LISTINGS:
                del client.listings[next(iter(client.listings))]
        return say.NamesAre(ask.call, page, bool(left))

    def _clear(self, client: Client, ask: say.Clear, now_ns: int) -> say.NamesAre:
        clear = self.catalogue.clear
        cleared = [name for name in ask.names if clear(client.peer, name, ask.segment, now_ns)]
        return say.NamesAre(ask.call, cleared)

    def _task_start(self, client: Client, ask: say.TaskStart, now_ns: int) -> say.TaskIs:
        return self._tasks.start(ask.call, client.peer, ask.name, ask.source, ask.targets, now_ns, _wall_ms())

    def _task_end(self, client: Client, ask: say.TaskEnd, now_ns: int) -> say.Codes:
        code = self._tasks.end(client.peer, ask.task, ask.failed, now_ns, _wall_ms())
        return say.Codes(ask.call, [code])


def _text(name: bytes | None) -> str:
    """Return a name from a journal; "" for none, and for bytes that are not UTF-8."""
    try:
        return (name or b"").decode()
    except UnicodeDecodeError:
        return ""


def _wall_ms() -> int:
    return time.time_ns() // 10**6
