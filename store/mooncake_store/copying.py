"""A client's work with replicas: find them, drop its own, and copy or move them in the background.

Used by `api`. The client that asks for a copy carries it out, in a thread; the master keeps the books.
Explained in docs/explain/leases.md.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from store.errors import StoreError
from store.mooncake_store import messages as say
from store.mooncake_store.client import Client
from store.mooncake_store.codes import BAD_PARAMETERS, NO_TASK, OK, CodeError
from store.mooncake_store.replicas import (
    BufferDescriptor,
    MemoryDescriptor,
    QueryTaskResponse,
    ReplicaDescriptor,
    TaskStatus,
    TaskType,
)
from store.mooncake_store.shared_table import OFFSET_MASK
from transport.errors import TransportError
from transport.threads import start_thread

PIECE_BYTES = 16 * 2**20
"""Bytes that are copied at once, so that a large copy needs little memory. Any value of this order works."""


class Copying:
    """Descriptors, clearing and tasks of one client."""

    def __init__(self, client: Client):
        self._client = client
        self._threads: list[threading.Thread] = []

    def describe(self, names: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Return every replica of these objects; unknown objects are left out. Grants no lease."""
        described: dict[str, list[ReplicaDescriptor]] = {}
        try:
            for some in say.portions(names):
                places = self._client.ask(say.Find, list(names[some]), False).places
                for name, place in zip(names[some], places):
                    if place is not None:
                        described[name] = [
                            self._descriptor(place.nbytes, first)
                            for first in (*place.locations, *(pieces[0][0] for pieces in place.scattered))
                        ]
        except CodeError:
            return {}
        return described

    def _descriptor(self, nbytes: int, location: int) -> ReplicaDescriptor:
        name = self._client.segment_name(location)
        return ReplicaDescriptor(MemoryDescriptor(BufferDescriptor(nbytes, name, location & OFFSET_MASK)))

    def clear(self, names: Sequence[str], segment: str) -> list[str]:
        """Drop this client's replicas of these objects; return the names that had some."""
        cleared: list[str] = []
        if len(segment) > say.MAX_SHORT:
            return cleared
        for some in say.portions(names):
            try:
                cleared += self._client.ask(say.Clear, list(names[some]), segment).names
            except CodeError:
                break
        return cleared

    def start(self, name: str, source: str, targets: list[str]) -> tuple[tuple[int, int], int]:
        """Begin a copy (source "") or a move; return (its id, OK), or ((0, 0), a code)."""
        if len(targets) > say.MAX_TARGETS or max(map(len, [source, *targets])) > say.MAX_SHORT:
            return (0, 0), BAD_PARAMETERS
        try:
            task = self._client.ask(say.TaskStart, name, source, targets)
        except CodeError as error:
            return (0, 0), error.code
        if task.code != OK:
            return (0, 0), task.code
        thread = start_thread(
            "store copy", self._carry_out, task, name, on_death=lambda reason: self._end(task.task, reason)
        )
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        return (task.task, 0), OK

    def _carry_out(self, task: say.TaskIs, name: str) -> None:
        try:
            for target in task.targets:
                self._client.copy(name, target, PIECE_BYTES)
            failed = ""
        except (StoreError, TransportError, ValueError, OSError) as error:
            failed = str(error) or type(error).__name__
        self._end(task.task, failed)

    def _end(self, task: int, failed: str) -> None:
        """Tell the master that a task has ended. failed: the reason, "" for success."""
        with contextlib.suppress(CodeError):  # the master fails the tasks of a client that is gone
            self._client.ask(say.TaskEnd, task, failed[: say.MAX_SHORT])

    def query(self, task_id: Any) -> tuple[QueryTaskResponse | None, int]:
        """Return (the state of a task, OK), or (None, a code). Raises TypeError for anything but an id."""
        if not (isinstance(task_id, tuple) and [type(part) for part in task_id] == [int, int]):
            raise TypeError("task_id must be a tuple of two integers")
        if not 0 <= task_id[0] < 2**63 or task_id[1] != 0:
            return None, NO_TASK
        try:
            task = self._client.ask(say.TaskAsk, task_id[0])
        except CodeError as error:
            return None, error.code
        if task.code != OK:
            return None, task.code
        kind = TaskType.REPLICA_MOVE if task.move else TaskType.REPLICA_COPY
        return (
            QueryTaskResponse(
                task_id, kind, TaskStatus(task.status), task.created_ms, task.updated_ms, task.reason
            ),
            OK,
        )

    def close(self) -> None:
        """Wait for copies under way, at most 5 s each."""
        for thread in self._threads:
            thread.join(timeout=5)
