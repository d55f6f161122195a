"""Orders to store ranks that have not been answered, by number, each with a time limit.

Used by `machine.py` and by the parts of the control plane that send orders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

ORDER_LIMIT_S = 120.0
"""An order without an answer for this long has failed. Late bytes may still land."""

GiveUp = Callable[[int, str, bool, float], None]
"""Called with the number, the reason, whether bytes may still land, and the time."""


class _Open(NamedTuple):
    rank: int
    give_up: GiveUp


class Orders:
    """Numbers orders, and gives up those that are not answered in time.

        _open   number -> its rank, and the function to call when the order is given up
        _due    (deadline, number), oldest first, including orders that were answered

    Invariant: every open order is in _due.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._due: deque[tuple[float, int]] = deque()
        self._last = 0

    def __len__(self) -> int:
        """Return the number of orders without an answer."""
        return len(self._open)

    def begin(self, rank: int, give_up: GiveUp, now: float) -> int:
        """Open an order to `rank` and return its number, from 1 on."""
        self._last += 1
        self._open[self._last] = _Open(rank, give_up)
        self._due.append((now + ORDER_LIMIT_S, self._last))
        return self._last

    def end(self, rank: int, number: int) -> bool:
        """Close an order that this rank has answered. False: the rank has no such open order."""
        order = self._open.get(number)
        if order is None or order.rank != rank:
            return False
        del self._open[number]
        return True

    def fail(self, number: int, reason: str, may_still_write: bool, now: float) -> None:
        """Give an order up, if it is still open."""
        order = self._open.pop(number, None)
        if order is not None:
            order.give_up(number, reason, may_still_write, now)

    def expire(self, now: float) -> bool:
        """Give up orders that were not answered in time. True: there was at least one."""
        failed = False
        while self._due and self._due[0][0] <= now:
            _, number = self._due.popleft()
            if number in self._open:
                rank = self._open[number].rank
                self.fail(number, f"rank {rank} did not answer for {ORDER_LIMIT_S:.0f} s", True, now)
                failed = True
        return failed

    def next_deadline(self) -> float | None:
        """Return when the oldest open order is given up; None without open orders."""
        while self._due and self._due[0][1] not in self._open:
            self._due.popleft()
        return self._due[0][0] if self._due else None

    def check(self) -> None:
        """Assert the invariant."""
        assert self._open.keys() <= {number for _, number in self._due}
