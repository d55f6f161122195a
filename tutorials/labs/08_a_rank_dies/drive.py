"""The child's side of 8a, 8b and 8d: calls the regions with what the tests send, and tells what was seen.

It runs beside a student's code, so it knows no expected value. Each call reaches the region of one task.
"""

from __future__ import annotations

import threading
from typing import Any

import transport.membership
from mooncake_lite.gateway.order import InOrder
from mooncake_lite.labs.counting import CountedLookUps
from mooncake_lite.messages import Tokens
from store.directory import Directory
from store.errors import PoolFull, StoreError
from store.layout import BlockLayout
from transport.membership import Beat, Monitor

# ------------------------------------------------------------------------------------------- 8a

FIRST_PID = 100
"""Made-up process numbers; no process of the machine is looked at."""


class PlayedKernel:
    """The processes of the host as the monitor sees them: the tests say when each is suspended or ends.

    asked   how often the kernel was asked whether a process is suspended
    """

    def __init__(self, peers: list[dict[str, Any]]) -> None:
        self.tick = self._asked = 0
        self.killed: list[tuple[int, str]] = []
        self._pids = {FIRST_PID + number: peer for number, peer in enumerate(peers) if peer["here"]}
        self._ends = {peer["name"]: peer["ends"] for peer in self._pids.values()}
        self._told: set[str] = set()

    def is_stopped(self, pid: int) -> bool:
        """Tell whether a process is suspended now."""
        self._asked += 1
        return any(begin <= self.tick < end for begin, end in self._pids[pid]["suspended"])

    def kill(self, name: str) -> None:
        """Kill the process of a peer. The kernel reports its end at the next check."""
        self.killed.append((self.tick, name))
        self._ends[name] = self.tick + 1

    def ended(self) -> list[tuple[str, int, int]]:
        """Return (name, pid, file descriptor) of processes that have ended since the last call."""
        found = []
        for pid, peer in self._pids.items():
            at = self._ends[peer["name"]]
            if at is not None and at <= self.tick and peer["name"] not in self._told:
                self._told.add(peer["name"])
                found.append((peer["name"], pid, 0))
        return found


class NoSocket:
    """A hub for the monitor; it drops what it is given to send."""

    def send(self, name: str, message: Any) -> None:
        """Send nothing."""

    def unwatch_fd(self, fd: int) -> None:
        """Watch nothing."""


def watch(inputs: dict[str, Any]) -> dict[str, Any]:
    """Play peers before a monitor whose clock the tests move: one check each tick.

    Tells the ticks at which it killed processes and reported losses, and how often the kernel was asked.
    A peer: its name, whether its process is watched ("here"), the ticks of its beats, from when to when it
    is suspended, and when it ends. late: tick -> how many ticks later than planned the monitor ran.
    early_s: how long before the check of its tick a beat comes. begin_s: what the clock shows at tick 0.
    """
    kernel = PlayedKernel(inputs["peers"])
    reported: list[tuple[int, str, bool]] = []
    monitor = Monitor.__new__(Monitor)  # __init__ opens sockets and starts a thread
    now, early_s = inputs["begin_s"], inputs["early_s"]
    pids = {peer["name"]: FIRST_PID + number for number, peer in enumerate(inputs["peers"]) if peer["here"]}
    peers = {
        peer["name"]: transport.membership._Peer(None, now - early_s, pids.get(peer["name"]))
        for peer in inputs["peers"]
    }
    own = {
        "_peers": peers, "_lost": {}, "_left": set(), "_to_end": [], "_lock": threading.Lock(),
        "_tick_s": inputs["tick_s"], "_dead_s": inputs["dead_s"], "_first_s": inputs["first_s"],
        "_watch": kernel, "_hub": NoSocket(), "starting": False, "term": 0,
        "_on_lost": lambda name, reason, ended: reported.append((kernel.tick, name, ended)),
    }  # fmt: skip
    vars(monitor).update(own)
    real = transport.membership.process_is_stopped
    transport.membership.process_is_stopped = kernel.is_stopped
    late = dict(inputs["late"])
    try:
        for tick in range(1, inputs["ticks"] + 1):
            kernel.tick = tick
            late_s = late.get(tick, 0) * inputs["tick_s"]
            now += inputs["tick_s"] + late_s
            monitor._forgive(late_s)
            for peer in inputs["peers"]:
                if tick in peer["beats"]:
                    monitor._note(peer["name"], Beat(tick), now - early_s)
            for name, reason, ended in monitor._dead(now):
                monitor._report(name, reason, ended)
    finally:
        transport.membership.process_is_stopped = real
    return {"killed": kernel.killed, "reported": reported, "asked": kernel._asked}


# ------------------------------------------------------------------------------------------- 8b

LAYOUT = BlockLayout(2, 1, 64, 8, 4)
SUMS = [21, 22]


class Pool:
    """A directory that plays the steps of a test. Objects and owners have names, blocks have keys."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.directory = Directory(LAYOUT)
        self.ids: dict[str, int] = {}
        for rank, blocks, has_tier, saver in inputs["segments"]:
            self.directory.add_segment(rank, blocks * LAYOUT.nbytes, rank, tier=has_tier, saver=saver)
        self.play(inputs["steps"])

    def play(self, steps: list[list[Any]]) -> None:
        """Play steps: a verb and its words each."""
        for verb, *words in steps:
            getattr(self, f"_{verb}")(*words)

    def _put(self, name: str, rank: int, key: int | None, owner: str, publish: bool) -> None:
        """An owner puts an object. Without a key it stays private; unpublished it is still being written."""
        obj = self.directory.allocate(owner, LAYOUT.nbytes, now=0.0, rank=rank, key=key, digest=key or 0)
        self.ids[name] = obj.object_id
        if publish:
            self._publish(name)

    def _publish(self, name: str) -> None:
        self.directory.put_end(self.ids[name], SUMS, 0.0)

    def _copy(self, name: str, rank: int, of: str) -> None:
        """A visible block gets a copy on another rank."""
        copied = self.directory.put_copy(self.ids[of], now=0.0, owner=name, rank=rank)
        self.ids[name] = copied.object_id
        self._publish(name)

    def _lease(self, owner: str, *names: str) -> None:
        self.directory.lease(owner, [self.ids[name] for name in names], 0.0, 100.0)

    def _bad(self, name: str) -> None:
        """A visible block is found to be bad. While it is leased, it is there, and no lookup finds it."""
        self.directory.bad([self.ids[name]])

    def _late(self, owner: str, rank: int) -> None:
        """An owner fails, and late bytes may still land in what it was writing."""
        self.directory.revoke_owner(owner, 0.0, writer_may_live=True, writer=rank)

    def _tier(self, rank: int, *keys: int) -> None:
        self.directory.add_tier_blocks(rank, keys, keys)

    def _told(self) -> None:
        """The tiers are told what they are to save."""
        self.directory.take_saves()

    def _saved(self, rank: int, *keys: int) -> None:
        self.directory.durable(rank, keys)

    def found(self, keys: list[int]) -> list[list[Any] | None]:
        """Return where a lookup finds each key: the tier and the rank."""
        seen = []
        for key in keys:
            hits = self.directory.lookup([key], [key], 1.0, touch=False)
            seen.append([hits[0].tier, hits[0].rank] if hits else None)
        return seen


def remove(inputs: dict[str, Any]) -> dict[str, Any]:
    """Play the steps on a pool, remove a rank's segment, and play the steps `after`. Tells what is there."""
    pool = Pool(inputs)
    directory = pool.directory
    directory.drain_events()
    directory._objects = objects = CountedLookUps(directory._objects)
    events_before = len(directory._events)
    raised, owners, visited = "", [], 0
    try:
        owners = directory.remove_segment(inputs["rank"])
    except StoreError as error:
        raised = type(error).__name__
    visited = objects._asked
    there = {name: directory.has(number) for name, number in pool.ids.items()}
    events = [
        [type(event).__name__, event.key, event.rank, event.tier]
        for event in directory._events[events_before:]
    ]
    problem = ""
    try:
        pool.play(inputs["after"])
        directory.check()
    except (AssertionError, KeyError, AttributeError, StoreError) as error:
        problem = f"{type(error).__name__} {error}".strip()
    left = [obj for obj in objects.values() if obj.state.name == "VISIBLE"]
    return {
        "raised": raised,
        "owners": owners,
        "there": [name for name, is_there in there.items() if is_there],
        "found": pool.found(inputs["keys"]),
        "unsaved": sorted(obj.key for obj in left if obj.unsaved),
        "evictable": sorted(obj.key for obj in left if obj.evictable),
        "saving": directory.stats()["saving"],
        "to_save": sorted(obj.key for saves in _saves(directory) for obj in saves),
        "leased": {
            owner: sorted(name for name, number in pool.ids.items() if number in record.leased)
            for owner, record in directory._leases.owners.items()
            if record.leased
        },
        "events": events,
        "problem": problem,
        "visited": visited,
        "savers": [[rank, segment.saver] for rank, segment in directory._segments.items()],
        "fits": _fits(directory),
    }


def _saves(directory: Directory) -> list[list[Any]]:
    """What tiers would be told to save now; none where the books know no rank that saves it."""
    try:
        return list(directory.take_saves().values())
    except (AssertionError, KeyError):
        return []


def _fits(directory: Directory) -> int:
    """How many new blocks fit into the pool, with eviction."""
    placed = 0
    try:
        while placed < 1000:
            directory.allocate("newcomer", LAYOUT.nbytes, now=2.0, key=10**9 + placed, digest=1)
            placed += 1
    except (PoolFull, StoreError, KeyError, AttributeError, AssertionError):
        pass
    return placed


# ------------------------------------------------------------------------------------------- 8d


class WatchedOrder(InOrder):
    """An answer whose table of waiting messages counts what is read of it."""

    def __init__(self, max_tokens: int) -> None:
        self._table = CountedLookUps()
        super().__init__(max_tokens)

    @property  # type: ignore[override]
    def waiting(self) -> Any:
        """The messages that came before their turn."""
        return self._table

    @waiting.setter
    def waiting(self, entries: Any) -> None:
        if entries is not self._table:
            counts = self._table._asked, self._table._taken
            self._table = CountedLookUps(dict.items(entries))
            self._table._asked, self._table._taken = counts


def push(inputs: dict[str, Any]) -> dict[str, Any]:
    """Give messages and recalls to one answer, one after the other. Tells what came out after each.

    ["tokens", index, token_ids, finish, attempt], ["recall", attempt] or ["end"].
    """
    order = WatchedOrder(inputs["max_tokens"])
    seen = []
    for verb, *words in inputs["steps"]:
        turn: list[Tokens] = []
        if verb == "recall":
            order.recall(words[0])
        elif verb == "end":
            order.end()
        else:
            index, token_ids, finish, attempt = words
            cached = {"dram": 64} if index == 0 else {}
            turn = order.push(Tokens("r", index, token_ids, finish, cached, attempt=attempt))
        seen.append(
            {
                "turn": [[one.index, one.token_ids, one.finish, one.cached_tokens] for one in turn],
                "token_ids": list(order.token_ids),
                "waiting": sorted(
                    [index, len(one.token_ids), one.finish or ""] for index, one in dict.items(order.waiting)
                ),
                "ended": order.ended,
            }
        )
    return {"seen": seen, "asked": order.waiting._asked - order.waiting._taken}  # taking out is free


CALLS = {"watch": watch, "remove": remove, "push": push}
