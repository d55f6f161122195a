"""A model of a rank of both duties: it computes a prompt and decodes its answer.

Used by `world.py`, in mode colocated. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.simulator.decode_rank import DecodeModel
from mooncake_lite.simulator.held_pages import HeldPages
from mooncake_lite.simulator.jobs import Engine, Job, Part, Prompt, first_tokens
from mooncake_lite.simulator.surroundings import Surroundings


class ComputeModel(DecodeModel):
    """A rank of both duties: loads what the pool has of a prompt, computes the rest, and decodes on."""

    def __init__(self, number: int, slots: int, world: Surroundings) -> None:
        super().__init__(number, slots, world)
        self.pages = HeldPages(number, world)
        self._engine = Engine(world.clock)

    def on(self, order: fx.Order) -> None:
        """Carry out an order."""
        if isinstance(order, fx.StartServe):
            self._serve(order)
        elif isinstance(order, fx.ForgetPages):
            self.pages.forget()
        else:
            super().on(order)

    def _serve(self, order: fx.StartServe) -> None:
        """Read what is reused, and compute the rest."""
        world, request = self._world, self._world.requests[order.request_id]
        branches = range(request.n) if request.n > 1 else (request.branch,)
        jobs = self._accept(order, branches)
        prompt = Prompt.begin(request, self.pages, len(order.load), world.clock.now)
        prompt.may_fail(world.faults, world.dice)
        is_preempted = request.n == 1 and world.dice.random() < world.faults.preempted
        load = order.load[prompt.held :]
        world.hardware.read(self.number, load, lambda: self._read(jobs, prompt, is_preempted))

    def _read(self, jobs: list[Job], prompt: Prompt, is_preempted: bool) -> None:
        if not self._goes_on(jobs, prompt, "read"):
            return
        world, num_tokens = self._world, jobs[0].request.text.num_tokens
        prompt.load_s = world.clock.now - prompt.began_s
        prompt.compute_s = world.hardware.prefill_s(self.number, num_tokens, num_tokens - prompt.computed)
        if is_preempted:
            world.clock.after(prompt.compute_s * world.dice.random(), lambda: self._preempt(jobs[0]))
        else:
            self._engine.compute(prompt.compute_s, lambda: self._computed(jobs, prompt))

    def _computed(self, jobs: list[Job], prompt: Prompt) -> None:
        """Add the first token of each answer, offer the blocks that were computed, and decode on."""
        if not self._goes_on(jobs, prompt, "compute"):
            return
        order, request = jobs[0].order, jobs[0].request
        assert isinstance(order, fx.StartServe)
        full = request.text.num_tokens // request.text.block_tokens
        if request.reuse:
            self.pages.use(request.keys[:full])
        request.first_token(self._world.clock.now)
        finished = first_tokens(request, self._world)
        self._world.answer(
            ev.PromptComputed(
                self.number, 0, order.request_id, order.attempt, prompt.computed, prompt.compute_s,
                prompt.load_s, prompt.read,
            )
        )  # fmt: skip
        for num_blocks in range(len(order.load) + 1, full + 1):
            self._offer(request, num_blocks)
        for job in jobs:
            if not job.over:
                job.request = request.parts[job.branch]
                if job.branch in finished:
                    self._end(job)
                else:
                    self._decode(job)

    def _goes_on(self, jobs: list[Job], prompt: Prompt, part: Part) -> bool:
        """Tell whether anything goes on after a part. It may fail now, or may have been dropped."""
        if prompt.fails == part or (prompt.fails == "write" and part == "compute"):
            self._fail(jobs)
        return not all(job.over for job in jobs)
