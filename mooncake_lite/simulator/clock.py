"""Virtual time: actions at their times, and links between processes.

Used by `world.py` and its models. Knows nothing of what the actions do. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]


class Clock:
    """Runs actions in the order of their times; of two at the same time, the one that was added first.

    now   seconds, moved by `step` alone
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._added = 0

    def at(self, time: float, action: Action) -> None:
        """Run an action at this time, which may not have passed."""
        assert time >= self.now, f"{time} has passed, it is {self.now}"
        self._added += 1
        heappush(self._heap, (time, self._added, action))

    def after(self, seconds: float, action: Action) -> None:
        """Run an action so many seconds from now."""
        self.at(self.now + seconds, action)

    def step(self) -> bool:
        """Run the next action; False when there is none."""
        if not self._heap:
            return False
        self.now, _, action = heappop(self._heap)
        action()
        return True


class Links:
    """Delivers messages between processes: in order for each (sender, receiver), in any order across pairs.

    _free_at   when the last message of a pair arrives
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_at: dict[tuple[int, int], float] = {}

    def send(self, sender: int, receiver: int, delay_s: float, deliver: Action) -> float:
        """Deliver after the delay, but not before what was sent earlier between these two.

        Returns the time of the delivery.
        """
        arrives = max(self._clock.now + delay_s, self._free_at.get((sender, receiver), 0.0))
        self._free_at[sender, receiver] = arrives
        self._clock.at(arrives, deliver)
        return arrives
