"""A Flight: a job under way over one-sided MPI.

Used by `one_sided` alone. Knows no threads. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transport.errors import TransferError
from transport.jobs import TransferJob
from transport.slices import Part


@dataclass(slots=True, eq=False)
class Flight:
    """A job under way.

    parts      still to be begun, while more; begun: some were
    flying     requests, the oldest first
    putting    a write that has ended here is to be made sure of there; flushing, flushed: that began, ended
    error      it has failed; it ends when MPI has let go
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
        """Whether bytes of a write may still land."""
        return self.putting and not self.flushed
