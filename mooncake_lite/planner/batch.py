"""A node of a replay that decodes: KV comes in, sequence by sequence, and joins a batch between two steps.

Used by `replay.py`. It takes the steps that a simulated rank takes, many at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

import numpy as np

from mooncake_lite.simulator.clock import Clock
from scheduler.costs import DecodeCost

MOST_STEPS = 4_096
"""Taken at once, so that an event among the first ones does not waste the time of the others."""

Load = Callable[[int, Callable[[], None]], None]


class Batch:
    """One node.

    load      reads the KV of a request, and calls back
    tokens, answers   of all requests
    waiting   requests whose KV is in the pool; arriving: one is on its way; here: its KV has come
    running   (number of the last step, request) of each sequence; context: tokens that they attend to
    step      number of steps so far; begun: the first one of each request
    open      sequences that are placed here, and their tokens
    """

    def __init__(
        self, clock: Clock, cost: DecodeCost, step_s: float, load: Load, told: Callable[[int, float], None],
        tokens: list[int], answers: list[int],
    ) -> None:  # fmt: skip
        self._clock, self._cost, self._step_s, self._load, self._told = clock, cost, step_s, load, told
        self._tokens, self._answers = tokens, answers
        self.waiting, self.running = deque[int](), list[tuple[int, int]]()
        self.arriving, self.here = False, list[int]()
        self.step, self.context, self.most_context = 0, 0, 0
        self.open = self.open_tokens = 0
        self.begun = dict[int, int]()
        self._ends = list[np.ndarray]()
        self._asked_s, self._alarm, self._leap = 0.0, 0, np.zeros(0)

    def step_s(self, tokens: int) -> float:
        """Return a step's seconds with one more sequence, as placement predicts it."""
        return float(self._cost.step_s(self.open + 1, self.open_tokens + tokens))

    def place(self, request: int) -> None:
        """Count a request as one that will decode here."""
        self.open, self.open_tokens = self.open + 1, self.open_tokens + self._tokens[request]

    def on_stored(self, request: int) -> None:
        """Take a request whose KV can be read now."""
        self.waiting.append(request)
        self._wake()

    def ends_s(self) -> np.ndarray:
        """Return when each step ended."""
        return np.concatenate(self._ends) if self._ends else np.zeros(0)

    def _on_loaded(self, request: int) -> None:
        self.here.append(request)
        self._wake()

    def _wake(self) -> None:
        """Turn now, or at the end of the step under way."""
        if not len(self._leap):
            self._turn()
        elif len(self._leap) > 1:
            left = max(1, int(np.searchsorted(self._leap, self._clock.now)) + 1)
            self._leap = self._leap[:left]
            self._set_alarm()

    def _turn(self) -> None:
        """Between two steps: join those whose KV is here, begin to load the next, and take steps."""
        for request in self.here:
            self.arriving = False
            self._told(request, self._clock.now - self._asked_s)
            self.begun[request] = self.step
            heappush(self.running, (self.step + self._answers[request] - 1, request))
            self.context += self._tokens[request] + 1
        self.here.clear()
        if self.waiting and not self.arriving:
            self.arriving, request = True, self.waiting.popleft()
            self._asked_s = self._clock.now
            self._load(request, partial(self._on_loaded, request))
        self.most_context = max(self.most_context, self.context)
        if self.running:
            first_s = float(self._cost.step_s(len(self.running), self.context)) + self._step_s
            count = min(MOST_STEPS, self.running[0][0] - self.step)
            more_s = self._cost.per_key_s * len(self.running)
            self._leap = self._clock.now + np.cumsum(first_s + more_s * np.arange(count))
            self._set_alarm()

    def _set_alarm(self) -> None:
        self._alarm += 1
        self._clock.at(float(self._leap[-1]), partial(self._end, self._alarm))

    def _end(self, alarm: int) -> None:
        """End the steps under way, and the sequences whose last one it was."""
        if alarm != self._alarm:
            return
        self._ends.append(self._leap)
        self.step += len(self._leap)
        self.context += len(self.running) * len(self._leap)
        self._leap = self._leap[:0]
        while self.running and self.running[0][0] <= self.step:
            _, request = heappop(self.running)
            self.context -= self._tokens[request] + self._answers[request]
            self.open, self.open_tokens = self.open - 1, self.open_tokens - self._tokens[request]
        self._turn()
