"""The compute role: serves prefill, decode, or both, one step after the other.

`scheduler.instance` decides what the rank does next, and `engine.Runner` carries it out. This file turns the
conductor's messages into events; compute_answers.py turns outcomes into messages.
See docs/explain/lifecycle.md.
"""

from __future__ import annotations

import time
from typing import Protocol

from mooncake_lite.messages import Cancel, ForgetPages, Message, PutGranted, SwapGranted
from mooncake_lite.roles.compute_answers import Answers
from mooncake_lite.roles.compute_jobs import Asks, job_of
from mooncake_lite.roles.compute_rank import ComputeRank
from scheduler.instance import (
    Arrived,
    Cancelled,
    Event,
    Forgotten,
    Granted,
    JobId,
    Result,
    Step,
    SwapAnswered,
    begin,
    next_step,
    on,
)

IDLE_WAIT_S = 0.2


class StepRunner(Protocol):
    """Carries out steps: engine.Runner, or one that stands in for it or around it."""

    def run(self, step: Step) -> Result:
        """Do the parts of a step, without waiting for transfers to end."""


class ComputeRole:
    """The loop of a rank that computes.

    rank      its neighbours, and the planner's books: rank.state.duties says what the rank serves
    runner    carries steps out
    max_len   tokens of prompt and answer together, at most
    """

    def __init__(self, rank: ComputeRank, runner: StepRunner, max_len: int) -> None:
        self.rank = rank
        self.state = rank.state
        self.runner = runner
        self._max_len = max_len
        self._answers = Answers(rank)

    def run(self) -> None:
        """Serve until told to stop."""
        while not self.rank.stopping:
            self.turn(0.0 if self.state.busy else IDLE_WAIT_S)

    def turn(self, wait_s: float) -> None:
        """Read, decide, compute, tell. Waits wait_s at most for messages."""
        for message in self.rank.receive(wait_s):  # read
            self._answers.tell(on(self.state, self._event(message), time.monotonic()))
        step = next_step(self.state, time.monotonic())  # decide
        begin(self.state, step)
        result = self.runner.run(step)  # compute
        self._answers.tell(on(self.state, result, time.monotonic()))  # tell
        self._answers.tell_held(*self.state.prefix.drain())

    def _event(self, message: Message) -> Event:
        """Turn a message of the conductor into an event of the planner."""
        if isinstance(message, Cancel):
            branch = message.branch if message.branch >= 0 else None
            return Cancelled(message.request_id, message.attempt, branch)
        if isinstance(message, PutGranted):
            return Granted(message.number, message.places)
        if isinstance(message, SwapGranted):
            swapping = JobId(message.request_id, message.attempt, message.branch)
            return SwapAnswered(swapping, message.places)
        if isinstance(message, ForgetPages):
            return Forgotten()
        assert isinstance(message, Asks)
        job = job_of(message, self._max_len)
        self._answers.expect(job, message)
        return Arrived(job)
