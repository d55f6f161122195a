"""A Flight: a job under way over one-sided MPI.

Used by `one_sided` alone. Knows no threads. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transport.bulk.jobs import TransferJob
from transport.bulk.slices import Part
from transport.errors import TransferError


@dataclass(slots=True, eq=False)
class Flight:
    """A job under way.

    parts      parts that have not begun yet, while more; begun: some parts have begun
    flying     requests of MPI that have begun, the oldest first
    putting    a write with all of its parts begun: its bytes leave, and may not be in place yet
    flushing   the flush thread has got it; flushed: all bytes of the write are in place
    error      the job has failed: begin no more parts

        waiting               not begun
           | _advance() begins parts, WINDOW at once
           v
        moving                more, or flying
           | every request has ended
           +---> a read -----------------------------+
           v                                         |
        flushing, a write     unsure, until flushed  |
           | window.Flush() has returned             |
           v                                         |
        ended  <-------------------------------------+
           ^
           | the rank is lost, or nothing has moved for stall_s since the error: MPI may still hold buffers
        any state with an error

    An error ends `more`. The job then goes on to its end as drawn, or is dropped as in the last line.
    """

    job: TransferJob
    window: Any
    parts: Iterator[list[Part]]
    touched_s: float
    began_s: float
    asked_s: float
    flying: deque[Any] = field(default_factory=deque)
    more: bool = True
    begun: bool = False
    putting: bool = False
    flushing: bool = False
    flushed: bool = False
    error: TransferError | None = None

    @property
    def unsure(self) -> bool:
        """Tell whether bytes of a write may still land."""
        return self.putting and not self.flushed
