"""An Exchange: one request under way between the couriers of two nodes, as one of the two sees it.

Used by `courier` alone. Knows no sockets. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transport.errors import TransferError
from transport.jobs import TransferJob
from transport.lent import Loan
from transport.slices import Stream

Key = tuple[bool, int, int]
"""(whether the number is ours, the other rank, number)."""


@dataclass(slots=True)
class Exchange:
    """One request under way, on either side. job is None on the side that serves, loan on the one that asks.

    stream      None while a write waits for Accept
    confirmed   the other side has said Done
    touched_s   when something last moved
    error       it has failed, and is kept until nothing of it can land any more
    kept        what MPI still holds of a failed one
    unconfirmed it has failed, and the other side has yet to say that it has let go
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
        """Whether bytes come to this side: it reads, or serves a write."""
        return (self.op == "read") == (self.job is not None)
