"""The order in which bodies get the process for long prompts: the shortest first, within limits.

Used by `long_prompts`. Knows sizes and times, no process and no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from mooncake_lite.gateway.problems import Refused

PASSED_OVER_S = 10.0
"""Shorter bodies may go before one that came earlier; before one that has waited for this long, none may."""


@dataclass(eq=False, slots=True)
class _Waiting:
    nbytes: int
    since: float
    turn: asyncio.Future[None]


class ShortestFirst:
    """Turns, one at a time. Belongs to one event loop.

    wait_s         the longest wait for a turn
    passed_over_s  the longest wait in which shorter bodies may go first
    """

    def __init__(self, wait_s: float, passed_over_s: float = PASSED_OVER_S):
        self.wait_s = wait_s
        self.passed_over_s = passed_over_s
        self._taken = False
        self._waiting: list[_Waiting] = []

    @contextlib.asynccontextmanager
    async def turn(self, nbytes: int) -> AsyncIterator[None]:
        """A turn for a body of this size. Raises Refused when it does not come within wait_s."""
        await self._take(nbytes)
        try:
            yield
        finally:
            self._pass_on()

    def longest_wait_s(self) -> float:
        """Return the longest wait so far among those that wait; 0 when none waits."""
        return time.monotonic() - self._waiting[0].since if self._waiting else 0.0

    async def _take(self, nbytes: int) -> None:
        if not self._taken:
            self._taken = True
            return
        waiting = _Waiting(nbytes, time.monotonic(), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(self.wait_s):
                await waiting.turn
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:  # the turn came at the moment of the end
                self._pass_on()
            if isinstance(error, TimeoutError):
                raise Refused(
                    f"this long prompt has waited {self.wait_s:g} s for others, which is the limit; come "
                    "back later, or send a shorter one",
                    self.wait_s,
                ) from None
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next one, or to none."""
        waiting = [one for one in self._waiting if not one.turn.cancelled()]
        self._taken = bool(waiting)
        if waiting:
            oldest, shortest = waiting[0], min(waiting, key=lambda one: one.nbytes)
            chosen = oldest if time.monotonic() - oldest.since >= self.passed_over_s else shortest
            self._waiting.remove(chosen)
            chosen.turn.set_result(None)
