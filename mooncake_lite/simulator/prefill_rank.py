"""A model of a prefill rank: orders in, answers out after the times of the hardware.

Used by `world.py`. What it reads and writes is kept in `memory.py`, and what lies in its pages in
`held_pages.py`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.simulator.custody import labels_of, tail_of
from mooncake_lite.simulator.held_pages import HeldPages
from mooncake_lite.simulator.jobs import CHUNK_S, MOVE_FAILED, Engine, Part, Prompt, first_tokens
from mooncake_lite.simulator.memory import Content
from mooncake_lite.simulator.surroundings import Surroundings
from mooncake_lite.simulator.workload import Request


@dataclass(slots=True, eq=False)
class _Job:
    """A prompt on the rank. over: its answer has been sent, and nothing about it happens any more."""

    order: fx.StartPrefill
    request: Request
    prompt: Prompt
    over: bool = False


class PrefillModel:
    """A prefill rank: reads prefixes, computes one prompt after the other, and writes KV."""

    def __init__(self, number: int, world: Surroundings) -> None:
        self.number = number
        self.pages = HeldPages(number, world)
        self._world = world
        self._engine = Engine(world.clock)
        self._jobs: list[_Job] = []

    def on(self, order: fx.Order) -> None:
        """Carry out an order."""
        match order:
            case fx.StartPrefill():
                assert all(job.order.request_id != order.request_id for job in self._jobs)
                self._start(order)
                assert len(self._jobs) <= self._world.shape.prompts, "a rank gets more prompts than slots"
            case fx.CancelOn():
                for job in self._jobs:
                    if (job.order.request_id, job.order.attempt) == (order.request_id, order.attempt):
                        self._world.clock.after(CHUNK_S, partial(self._fail, job, "cancelled", False))
            case fx.ForgetPages():
                self.pages.forget()
            case _:
                raise AssertionError(f"a prefill rank gets {order}")

    def _start(self, order: fx.StartPrefill) -> None:
        """Read what is reused; then compute the rest; then write all that is new."""
        world, request = self._world, self._world.requests[order.request_id]
        prompt = Prompt.begin(request, self.pages, len(order.load), world.clock.now)
        prompt.may_fail(world.faults, world.dice)
        job = _Job(order, request, prompt)
        self._jobs.append(job)
        world.hardware.read(self.number, order.load[prompt.held :], lambda: self._read(job))

    def _read(self, job: _Job) -> None:
        if not self._goes_on(job, "read"):
            return
        world, prompt, num_tokens = self._world, job.prompt, job.request.text.num_tokens
        prompt.load_s = world.clock.now - prompt.began_s
        prompt.compute_s = world.hardware.prefill_s(self.number, num_tokens, num_tokens - prompt.computed)
        self._engine.compute(prompt.compute_s, lambda: self._computed(job))

    def _computed(self, job: _Job) -> None:
        """Send the first token, and write KV."""
        if not self._goes_on(job, "compute"):
            return
        world, order = self._world, job.order
        job.request.first_token(world.clock.now)
        job.prompt.began_s = world.clock.now
        new = order.store if order.tail is None else [*order.store, order.tail]
        world.hardware.write(self.number, new, lambda: self._written(job))

    def _written(self, job: _Job) -> None:
        """Let all KV be in the pool, and report."""
        if not self._goes_on(job, "write"):
            return
        job.over = True
        self._jobs.remove(job)
        order, request, prompt, world = job.order, job.request, job.prompt, self._world
        labels = labels_of(request, order.attempt, len(order.load) + len(order.store))
        checksums = []
        for ref, label in zip(order.store, labels[len(order.load) :], strict=True):
            content = Content(label, world.dice.getrandbits(32))
            world.memory.write(ref, content)
            checksums.append(world.memory.sums(content))
        if order.tail is not None:
            world.memory.write(order.tail, Content(tail_of(order.request_id, order.attempt), 0))
        if request.reuse:
            self.pages.use(request.keys[: request.text.num_tokens // request.text.block_tokens])
        finished = first_tokens(request, world)
        store_s = world.clock.now - prompt.began_s
        world.answer(
            ev.PrefillEnded(
                self.number, 0, order.request_id, order.attempt, checksums, finished, prompt.load_s,
                prompt.compute_s, store_s, prompt.computed, prompt.read,
            )
        )  # fmt: skip

    def _goes_on(self, job: _Job, part: Part) -> bool:
        """Tell whether a job goes on after a part of it. It may fail now, or may have been dropped."""
        world = self._world
        if job.prompt.fails == part and not job.over:
            may_still_write = world.dice.random() < world.faults.may_still_write
            self._fail(job, MOVE_FAILED, may_still_write)
        return not job.over

    def _fail(self, job: _Job, reason: str, may_still_write: bool) -> None:
        if job.over:
            return
        job.over = True
        self._jobs.remove(job)
        order = job.order
        failed = ev.RequestFailed(self.number, 0, order.request_id, order.attempt, reason, may_still_write)
        self._world.answer(failed)
