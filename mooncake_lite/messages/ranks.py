"""Between the conductor and every rank: how they register, report and stop.

Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

from mooncake_lite.messages.parts import Message, Metric


class RankHello(Message, frozen=True):
    """A rank has loaded, compiled and made its segment; sent once to each conductor.

    segment_bytes   DRAM that it gives to the pool, from the start of its segment on (0: none)
    tier            a store rank with an SSD tier; it says in TierIndexed what that holds
    epoch           number of the conductor
    """

    rank: int
    role: str
    node: int
    segment_bytes: int = 0
    tier: bool = False
    epoch: int = 0


class StewardHello(Message, frozen=True):
    """The steward -> a new conductor, which answers with Conducting."""


class Conducting(Message, frozen=True):
    """Conductor -> steward: ranks and gateways may come. term: its number."""

    term: int


class RankStats(Message, frozen=True):
    """Rank -> conductor, every quarter of a second at most (REPORT_EVERY_S): this rank's metrics."""

    rank: int
    metrics: list[Metric]


class Degraded(Message, frozen=True):
    """Rank -> conductor: the rank's present troubles, although it works; sent when the text changes.

    kind   what is concerned: one text for each
    text   what is wrong, in one line; "" when it is over
    """

    rank: int
    kind: str
    text: str


class Stopped(Message, frozen=True):
    """Rank -> conductor: the rank takes no more work and has flushed. `dropped`: blocks not saved."""

    dropped: int


class TraceLines(Message, frozen=True):
    """Rank on another host -> conductor: a piece of its trace, whole lines (tracing/tracer.py)."""

    rank: int
    lines: bytes
