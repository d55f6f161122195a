"""An Exchange: one request under way between the couriers of two nodes, on one of the two sides.

Used by `courier` alone. Knows no sockets. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transport.bulk.jobs import TransferJob
from transport.bulk.lent import Loan
from transport.bulk.slices import Stream
from transport.errors import TransferError

Key = tuple[bool, int, int]
"""(whether the number is ours, the other rank, number)."""


@dataclass(slots=True)
class Exchange:
    """One request under way, on either side. job is None on the side that serves, loan on the one that asks.

    stream      None while a write waits for Accept
    confirmed   the other side has said Done
    touched_s   when something last moved
    error       it has failed, and is kept until none of its bytes can land any more
    kept        requests of a failed exchange that MPI still holds
    unconfirmed it has failed, and the other side has yet to confirm that it uses no bytes of it
    """

    op: str
    rank: int
    number: int
    touched_s: float
    stream: Stream | None
    job: TransferJob | None = None
    loan: Loan | None = None
    confirmed: bool = False
    error: TransferError | None = None
    kept: list[Any] = field(default_factory=list)
    unconfirmed: bool = False

    @property
    def receiving(self) -> bool:
        """Tell whether bytes come to this side: it reads, or serves a write."""
        return (self.op == "read") == (self.job is not None)
