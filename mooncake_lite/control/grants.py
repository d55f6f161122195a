"""Grants: orders and permissions that ranks have not reported on yet, each with a time to check.

Used by `machine.py` and by the parts of the control plane that give orders. A transfer without a report is
given up. Work on a request is checked: the rank is asked what it has open. See docs/explain/control.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from mooncake_lite.control.effects import Effect, ListOpen
from mooncake_lite.control.events import OpenListed
from mooncake_lite.control.mechanisms import Mechanisms

TRANSFER_S = 120.0
"""A transfer without a report for this long has failed, and late bytes may still land.

It is longer than any wait of `transport`, so that a rank reports a failed transfer itself before.
"""

WORK_S, WORK_FACTOR = 30.0, 3.0
"""Work on a request is checked after 30 s, or after three times its predicted duration if that is longer.

Any values of this order work: a check costs one message, and finds a lost order or report.
"""

UNKNOWN_S = 300.0
"""Time to the check before any prompt was measured: a rank answers between passes, which may take minutes."""

NOBODY = 0
"""The rank of a pause, which is a grant of the conductor to itself."""

Work = tuple[str, int]
"""A request and the attempt that a rank works on."""


@dataclass(slots=True)
class Grant:
    """One order or permission of a rank, until it reports.

    number     from 1 on
    about      data of the part that gave it, for the report
    blocks     number of blocks that the report must cover
    kind       the mechanism that they are counted for; "": none
    lost       called when there will be no report
    work       the request, of work that is checked; None: a transfer, which is given up
    lasts_s    from one check to the next; check_at: time of the next one
    """

    number: int
    rank: int
    about: Any
    lost: Lost
    lasts_s: float
    check_at: float
    blocks: int = 0
    kind: str = ""
    work: Work | None = None


Lost = Callable[[Grant, str, bool, float], None]
"""Called with the reason, whether bytes may still land, and the time."""


class _Question(NamedTuple):
    """A ListOpen to a rank: its number, and the time at which the answer is overdue."""

    number: int
    overdue_at: float


class Grants:
    """The table of grants.

        tried    how often each mechanism was tried, and how often that failed
        _open    number -> grant
        _asked   rank -> the question that it has not answered
        _due     heap of (time, number), with outdated entries

    Invariant: every open grant is in _due, at its check_at or earlier.
    """

    def __init__(self, emit: Callable[[Effect], None]) -> None:
        self._emit = emit
        self.tried = Mechanisms()
        self._open: dict[int, Grant] = {}
        self._asked: dict[int, _Question] = {}
        self._due: list[tuple[float, int]] = []
        self._last = 0

    def __len__(self) -> int:
        """Return the number of open grants."""
        return len(self._open)

    def open(
        self, rank: int, about: Any, lost: Lost, now: float, *, lasts_s: float = TRANSFER_S,
        work: Work | None = None, blocks: int = 0, kind: str = "",
    ) -> Grant:  # fmt: skip
        """Add a grant. See Grant."""
        self._last += 1
        grant = Grant(self._last, rank, about, lost, lasts_s, now + lasts_s, blocks, kind, work)
        self._open[grant.number] = grant
        heapq.heappush(self._due, (grant.check_at, grant.number))
        return grant

    def __getitem__(self, number: int) -> Grant:
        """Return an open grant."""
        return self._open[number]

    def get(self, rank: int, number: int) -> Grant | None:
        """Return an open grant of this rank."""
        grant = self._open.get(number)
        return grant if grant is not None and grant.rank == rank else None

    def end(self, rank: int, number: int, failed: int = 0, reason: str = "") -> Grant | None:
        """End a grant that this rank has reported about. None: the rank has no such grant.

        failed   of its blocks; reason: why
        """
        grant = self.get(rank, number)
        if grant is not None:
            del self._open[number]
            self.tried.count(grant.kind, grant.blocks, failed, reason)
        return grant

    def close(self, number: int) -> None:
        """Forget a grant whose end is known from elsewhere. A number that is not open changes nothing."""
        self._open.pop(number, None)

    def fail(self, number: int, reason: str, may_still_write: bool, now: float) -> None:
        """Give a grant up, if it is still open."""
        grant = self._open.pop(number, None)
        if grant is not None:
            self.tried.count(grant.kind, grant.blocks, grant.blocks, reason)
            grant.lost(grant, reason, may_still_write, now)

    def rank_lost(self, rank: int, may_still_write: bool, now: float) -> None:
        """Give up all grants of a rank that is lost. may_still_write: its process was not seen to end."""
        self._asked.pop(rank, None)
        for number in [number for number, grant in self._open.items() if grant.rank == rank]:
            self.fail(number, f"rank {rank} is lost", may_still_write, now)

    # ------------------------------------------------------------------------------ checks

    def check(self, now: float) -> list[int]:
        """Give up transfers that took too long, and ask for work that is due. Returns silent ranks."""
        silent = []
        while self._due and self._due[0][0] <= now:
            _, number = heapq.heappop(self._due)
            grant = self._open.get(number)
            if grant is None:
                continue
            if grant.check_at > now:
                heapq.heappush(self._due, (grant.check_at, number))
            elif grant.work is None:
                self.fail(number, f"rank {grant.rank} did not answer for {grant.lasts_s:.0f} s", True, now)
            elif self._ask(grant, now):
                heapq.heappush(self._due, (grant.check_at, number))
            else:
                silent.append(grant.rank)
                grant.check_at = now + grant.lasts_s
                heapq.heappush(self._due, (grant.check_at, number))
        return silent

    def _ask(self, grant: Grant, now: float) -> bool:
        """Ask a rank what it has open, unless a question is on its way. False: its answer is overdue.

        It may take as long as the longest work of the rank, because a rank answers between two passes.
        """
        asked = self._asked.get(grant.rank)
        if asked is None:
            self._last += 1
            lasts_s = max(one.lasts_s for one in self._open.values() if one.rank == grant.rank and one.work)
            asked = self._asked[grant.rank] = _Question(self._last, now + lasts_s)
            self._emit(ListOpen(grant.rank, asked.number))
        grant.check_at = asked.overdue_at
        return now < asked.overdue_at

    def not_asked(self, rank: int) -> None:
        """Note that a question was not sent. The next check asks again."""
        self._asked.pop(rank, None)

    def on_listed(self, listed: OpenListed, now: float) -> list[Grant]:
        """Apply what a rank has open: work that it lacks is lost. Returns its other grants of work.

        An order that was given after the question is not lost: it may still be on its way. The last report
        about lost work may be lost as well, so bytes may still land.
        """
        asked = self._asked.get(listed.rank)
        if asked is None or asked.number != listed.number:
            return []
        del self._asked[listed.rank]
        there: Collection[Work] = {(request_id, attempt) for request_id, attempt in listed.work}
        kept = []
        for grant in [grant for grant in self._open.values() if grant.rank == listed.rank]:
            if grant.work is None or grant.number > asked.number:
                continue
            if grant.work in there:
                kept.append(grant)  # it is checked again when the answer would have been overdue
            else:
                self.fail(grant.number, f"rank {grant.rank} does not have the request", True, now)
        return kept

    def next_deadline(self) -> float:
        """Return when the next grant is checked; inf without one."""
        while self._due and self._due[0][1] not in self._open:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else inf

    def assert_sound(self) -> None:
        """Assert the invariant."""
        first: dict[int, float] = {}
        for time, number in self._due:
            first[number] = min(time, first.get(number, time))
        assert all(first[number] <= grant.check_at for number, grant in self._open.items())
