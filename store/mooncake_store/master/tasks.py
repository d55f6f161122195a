"""Copies and moves of replicas: started in the books here, carried out by the client that asked for them.

Called by the master. Pure: time is an argument. Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass

from store.mooncake_store.codes import BAD_PARAMETERS, NO_SPACE, NO_TASK, NOT_FOUND, NOT_READY, OK
from store.mooncake_store.master.catalogue import Catalogue
from store.mooncake_store.master.entries import NEVER_NS, Entry, Replica
from store.mooncake_store.messages import TaskIs

PROCESSING, FAILED, SUCCESS = 1, 2, 3
"""Numbers of TaskStatus."""

TASK_LIMIT_NS, SLOWEST_NS_PER_BYTE = 30 * 10**9, 50
"""A task has so long, and in addition the time of its bytes at 20 MB/s, a slow network."""

KEPT_TASKS = 10_000
"""Most tasks kept for queries; the oldest finished ones are forgotten. Any value of this order works."""


@dataclass(slots=True)
class ReplicaTask:
    """One copy (source None) or move.

    source      number of the segment that loses its replica
    limit_ns    when it fails, unless it has ended
    """

    number: int
    client: str
    entry: Entry
    source: int | None
    added: list[Replica]
    created_ms: int
    limit_ns: int
    status: int = PROCESSING
    updated_ms: int = 0
    reason: str = ""


class Tasks:
    """All tasks of one master. The object of an unfinished task is neither evicted nor removed."""

    def __init__(self, catalogue: Catalogue):
        self._catalogue = catalogue
        self._tasks: OrderedDict[int, ReplicaTask] = OrderedDict()

    def start(
        self, call: int, client: str, name: str, source: str, targets: list[str], now_ns: int, wall_ms: int
    ) -> TaskIs:
        """Start a copy or a move; return the space on the targets and the place of the bytes."""
        books = self._catalogue
        entry = books.find(name, now_ns, lease=False)
        if entry is None:
            return TaskIs(call, NOT_FOUND)
        if entry.tasks:
            return TaskIs(call, NOT_READY)
        wanted = [books.segment_named(target) for target in targets]
        origin = books.segment_named(source) if source else None
        held = {replica.segment for replica in entry.replicas}
        if not wanted or None in wanted or (source and (origin is None or origin.number not in held)):
            return TaskIs(call, BAD_PARAMETERS)
        numbers = list(dict.fromkeys(lender.number for lender in wanted if lender is not None))
        if origin is not None and numbers == [origin.number]:
            return TaskIs(call, BAD_PARAMETERS)
        added = books.add_replicas(entry, [number for number in numbers if number not in held], now_ns)
        if added is None:
            return TaskIs(call, NO_SPACE)
        number = secrets.randbits(63)
        task = ReplicaTask(
            number,
            client,
            entry,
            origin.number if origin else None,
            added,
            wall_ms,
            now_ns + TASK_LIMIT_NS + len(added) * entry.nbytes * SLOWEST_NS_PER_BYTE,
            updated_ms=wall_ms,
        )
        entry.tasks += 1
        self._tasks[number] = task
        while len(self._tasks) > KEPT_TASKS and next(iter(self._tasks.values())).status != PROCESSING:
            self._tasks.popitem(last=False)
        return self._told(call, task)

    def end(self, client: str, number: int, failed: str, now_ns: int, wall_ms: int) -> int:
        """End a task whose bytes the client has copied, or could not copy. Returns OK or NO_TASK."""
        task = self._tasks.get(number)
        if task is None or task.client != client or task.status != PROCESSING:
            if task is not None and task.client == client:  # too late: at least it writes no more
                self._catalogue.settle_copy(client, task.added, now_ns)
            return NO_TASK
        self._finish(task, failed, now_ns, wall_ms)
        return OK

    def drop_client(self, client: str, now_ns: int, wall_ms: int, until_ns: int = 0) -> None:
        """Fail the unfinished tasks of a lost client. until_ns: as in `Catalogue.drop_client`."""
        for task in self._tasks.values():
            if task.client == client and task.status == PROCESSING:
                self._finish(task, "its client is gone", now_ns, wall_ms, until_ns)

    def tick(self, now_ns: int, wall_ms: int) -> None:
        """Fail tasks that take too long: their client may be stopped, and its object must not stay pinned."""
        for task in self._tasks.values():
            if task.status == PROCESSING and now_ns > task.limit_ns:
                self._finish(task, "it took too long", now_ns, wall_ms, NEVER_NS)

    def ask(self, call: int, number: int) -> TaskIs:
        """Return the state of a task; code NO_TASK for an unknown one."""
        task = self._tasks.get(number)
        return TaskIs(call, NO_TASK) if task is None else self._told(call, task)

    def _finish(self, task: ReplicaTask, failed: str, now_ns: int, wall_ms: int, until_ns: int = 0) -> None:
        task.entry.tasks -= 1
        done = self._catalogue.end_copy(
            task.entry, task.added, task.source, not failed, now_ns, client=task.client, until_ns=until_ns
        )
        task.reason = failed or ("" if done else "the object is gone")
        task.status = SUCCESS if done else FAILED
        task.updated_ms = wall_ms

    def _told(self, call: int, task: ReplicaTask) -> TaskIs:
        return TaskIs(
            call,
            OK,
            task.number,
            task.source is not None,
            task.status,
            task.created_ms,
            task.updated_ms,
            task.reason,
            task.entry.nbytes,
            [replica.pieces[0][0] for replica in task.added],
        )
