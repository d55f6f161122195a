"""The API's descriptions of replicas and tasks: plain objects with Mooncake's names.

Made by `api`. Explained in docs/explain/leases.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ReplicaStatus(IntEnum):
    """State of one replica; those that can be read are COMPLETE."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class TaskStatus(IntEnum):
    """State of a copy or a move."""

    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3


class TaskType(IntEnum):
    """The kind of a task."""

    REPLICA_COPY = 0
    REPLICA_MOVE = 1


@dataclass(frozen=True, slots=True)
class BufferDescriptor:
    """Bytes of one replica. transport_endpoint_: name of its segment; buffer_address_: offset of its first
    byte in it (the rest follows, unless the object had to be scattered over several ranges)."""

    size_: int
    transport_endpoint_: str
    buffer_address_: int

    @property
    def size(self) -> int:
        """Return size_."""
        return self.size_

    @property
    def transport_endpoint(self) -> str:
        """Return transport_endpoint_."""
        return self.transport_endpoint_

    @property
    def buffer_address(self) -> int:
        """Return buffer_address_."""
        return self.buffer_address_


@dataclass(frozen=True, slots=True)
class MemoryDescriptor:
    """A replica in memory."""

    buffer_descriptor: BufferDescriptor


@dataclass(frozen=True, slots=True)
class ReplicaDescriptor:
    """One replica of an object. All of ours are in memory."""

    memory: MemoryDescriptor
    status: ReplicaStatus = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        """Tell whether it is in a client's segment: always."""
        return True

    def is_disk_replica(self) -> bool:
        """Tell whether it is on a disk: never."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Tell whether it is on a local disk: never."""
        return False

    def get_memory_descriptor(self) -> MemoryDescriptor:
        """Return its place in memory."""
        return self.memory

    def get_disk_descriptor(self) -> None:
        """Raise RuntimeError: no replica is on a disk."""
        raise RuntimeError("Expected DiskDescriptor")


@dataclass(frozen=True, slots=True)
class QueryTaskResponse:
    """The state of a copy or a move. Times in ms since 1970."""

    id: tuple[int, int]
    type: TaskType
    status: TaskStatus
    created_at: int
    last_updated_at: int
    message: str
