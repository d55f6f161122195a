"""A model of a decode rank: orders in, answers out after the times of the hardware.

Used by `world.py`. Its requests form one batch (`batch.py`). What they read and write is kept in `memory.py`.
Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.simulator.batch import Batch, Sequence
from mooncake_lite.simulator.custody import tail_of
from mooncake_lite.simulator.jobs import CHUNK_S, MOVE_FAILED, Job
from mooncake_lite.simulator.memory import Content
from mooncake_lite.simulator.surroundings import Surroundings
from mooncake_lite.simulator.workload import Request, digest_of


@dataclass(slots=True)
class _Blocks:
    """Full blocks of answers that are offered to the pool: keys, and the key and number before each."""

    keys: list[int] = field(default_factory=list)
    before: list[tuple[int | None, int]] = field(default_factory=list)


class DecodeModel:
    """A decode rank: loads a request's KV, then gives one token to each of its requests, over and over.

    batch     the sequences that it decodes
    _puts     number of a PutsWanted -> its keys
    _offers   there is a pool that takes full blocks
    """

    def __init__(self, number: int, slots: int, world: Surroundings) -> None:
        self.number = number
        self.batch = Batch(number, world.clock, world.hardware)
        self._slots = slots
        self._world = world
        self._jobs: dict[tuple[str, int], Job] = {}
        self._puts: dict[int, list[int]] = {}
        self._offers = world.shape.config.has_pool
        self._asked = 0
        self._full = _Blocks()

    def on(self, order: fx.Order) -> None:
        """Carry out an order."""
        match order:
            case fx.StartDecode():
                self._start(order)
            case fx.CancelOn():
                for (name, branch), job in list(self._jobs.items()):
                    is_meant = (name, job.order.attempt) == (order.request_id, order.attempt)
                    if is_meant and order.branch in (-1, branch):
                        self._cancel(job)
            case fx.GrantSwap():
                self._swap(order)
            case fx.GrantPuts():
                keys = self._puts.pop(order.number)
                assert len(order.places) == len(keys), "not a place, or None, for each key"
                places = [ref for ref in order.places if ref is not None]
                self._world.hardware.write(self.number, places, lambda: self._write(order, keys))
            case fx.ForgetPages():
                pass
            case _:
                raise AssertionError(f"a decode rank gets {order}")

    # ------------------------------------------------------------------------------ a request

    def _accept(self, order: fx.StartOrder, branches: Iterable[int]) -> list[Job]:
        """Take a job for each branch of a request."""
        request = self._world.requests[order.request_id]
        jobs = [Job(order, request, branch) for branch in branches]
        for job in jobs:
            assert (order.request_id, job.branch) not in self._jobs, f"{order.request_id} is here already"
            self._jobs[order.request_id, job.branch] = job
        # What failed elsewhere is still cancelled here.
        left = [name for name, _ in self._jobs if not self._world.requests[name].ends]
        assert len(left) <= self._slots, "a rank gets more requests than it has slots"
        return jobs

    def _start(self, order: fx.StartDecode) -> None:
        jobs, world = self._accept(order, order.branches), self._world
        for job in jobs:
            job.request = job.request.parts[job.branch]
        blocks = order.blocks if order.tail is None else [*order.blocks, order.tail]
        began_s = world.clock.now
        if world.dice.random() < world.faults.decode_fails:
            world.hardware.read(self.number, blocks, lambda: self._fail(jobs))
        else:
            world.hardware.read(self.number, blocks, lambda: self._loaded(jobs, len(blocks), began_s))

    def _loaded(self, jobs: list[Job], blocks: int, began_s: float) -> None:
        left = [job for job in jobs if not job.over]
        if not left:
            return
        order, load_s = left[0].order, self._world.clock.now - began_s
        self._world.answer(ev.DecodeLoaded(self.number, 0, order.request_id, order.attempt, load_s, blocks))
        for job in left:
            self._decode(job)

    def _decode(self, job: Job) -> None:
        """Generate the rest of the answer, or as much as there are pages for."""
        world = self._world
        left = job.request.answer_tokens - job.request.answered
        if world.dice.random() < world.faults.preempted:
            left = world.dice.randrange(left)
            self._generate(job, left, preempt=True)
        else:
            self._generate(job, left, preempt=False)

    def _generate(self, job: Job, left: int, preempt: bool) -> None:
        """Go on to the next token after which something happens: a block is full, or this was the last."""
        text = job.request.text
        until_full = text.block_tokens - (text.num_tokens - 1) % text.block_tokens
        steps = min(left, until_full)
        if steps:
            job.sequence = Sequence(
                job.request, steps, lambda: self._generated(job, steps, left - steps, preempt)
            )
            self.batch.join(job.sequence)
        else:
            self._generated(job, 0, left, preempt)

    def _generated(self, job: Job, steps: int, left: int, preempt: bool) -> None:
        request = job.request
        computed = request.text.num_tokens - 1
        if steps and computed % request.text.block_tokens == 0:
            self._offer(request, computed // request.text.block_tokens)
        if left:
            self._generate(job, left, preempt)
        elif preempt and self._world.shape.swaps:
            self._ask_for_swap(job)
        elif preempt:
            self._preempt(job)
        else:
            self._end(job)

    def _preempt(self, job: Job, *, may_still_write: bool = False) -> None:
        if not job.over:
            self._forget(job)
            self._world.answer(ev.Preempted(*self._so_far(job, 0), may_still_write=may_still_write))

    def _so_far(self, job: Job, without: int) -> tuple[int, int, str, int, int, list[int], list[int], int]:
        """Return what a rank tells of prompt and answer so far, without the last tokens."""
        order, request = job.order, job.request
        num_tokens = request.text.num_tokens - without
        keys = request.keys[: num_tokens // request.text.block_tokens]
        digests = [digest_of(key) for key in keys]
        return self.number, 0, order.request_id, order.attempt, num_tokens, keys, digests, job.branch

    # ------------------------------------------------------------------------------ swaps

    def _ask_for_swap(self, job: Job) -> None:
        job.asked = True
        self._world.answer(ev.SwapWanted(*self._so_far(job, 1)))

    def _swap(self, order: fx.GrantSwap) -> None:
        """Write what the pool lacks of a request's KV; if that fails, or there is no space, give it up."""
        job, world = self._jobs.get((order.request_id, order.branch)), self._world
        if job is None or job.order.attempt != order.attempt:
            return  # it was cancelled
        if order.places is None:
            self._preempt(job)
            return
        job.granted = True
        places = [ref for ref in order.places if ref is not None]
        if world.dice.random() < world.faults.put_fails:
            late = world.dice.random() < world.faults.may_still_write
            world.hardware.write(self.number, places, lambda: self._preempt(job, may_still_write=late))
        else:
            world.hardware.write(self.number, places, lambda: self._swapped(job, order))

    def _swapped(self, job: Job, order: fx.GrantSwap) -> None:
        full = (job.request.text.num_tokens - 1) // job.request.text.block_tokens
        for number, place in enumerate(order.places or ()):
            if place is not None:
                own = "own", job.request.request_id, order.attempt, number
                label = tail_of(job.request.request_id, order.attempt) if number == full else own
                self._world.memory.write(place, Content(label, 0))
        self._forget(job)
        self._world.answer(ev.Swapped(*self._so_far(job, 0)))

    def _cancel(self, job: Job) -> None:
        """End a request soon, or at once if nothing is computed for it, unless its KV is being written."""
        if not job.asked:
            self._world.clock.after(CHUNK_S, lambda: None if job.granted else self._end(job))
        elif not job.granted:
            self._end(job)

    def _end(self, job: Job) -> None:
        """End a request that is answered, or whose client has gone."""
        if not job.over:
            self._forget(job)
            order, request = job.order, job.request
            answer_tokens = request.answered if request.answered >= request.answer_tokens else 0
            sums = self.batch.take_steps()
            self._world.answer(
                ev.DecodeEnded(
                    self.number, 0, order.request_id, order.attempt, job.branch, answer_tokens, sums.steps,
                    sums.sequences, sums.context_tokens, sums.seconds,
                )
            )  # fmt: skip

    def _fail(self, jobs: list[Job]) -> None:
        """Give up all branches that are left."""
        left = [job for job in jobs if not job.over]
        for job in left:
            self._forget(job)
        if left:
            order = left[0].order
            failed = ev.RequestFailed(self.number, 0, order.request_id, order.attempt, MOVE_FAILED)
            self._world.answer(failed)

    def _forget(self, job: Job) -> None:
        job.over = True
        del self._jobs[job.order.request_id, job.branch]
        if job.sequence is not None:
            self.batch.leave(job.sequence)

    # ------------------------------------------------------------------------------ blocks

    def _offer(self, request: Request, num_blocks: int) -> None:
        """Ask for a place for the last of these full blocks; sometimes together with the next one."""
        if not (self._offers and request.reuse):
            return
        keys, full = request.keys[:num_blocks], self._full
        full.keys.append(keys[-1])
        full.before.append((keys[-2] if len(keys) > 1 else None, len(keys) - 1))
        if self._world.dice.random() < 0.2 and len(full.keys) < 4:
            return
        self._full = _Blocks()
        self._asked += 1
        self._puts[self._asked] = full.keys
        digests = [digest_of(key) for key in full.keys]
        self._world.answer(ev.PutsWanted(self.number, 0, self._asked, full.keys, digests, full.before))

    def _write(self, order: fx.GrantPuts, keys: list[int]) -> None:
        """Write the blocks for which there is a place."""
        world, memory = self._world, self._world.memory
        written, failed = [], []
        checksums = []
        for key, ref in zip(keys, order.places, strict=True):
            if ref is None:
                continue
            if world.dice.random() < world.faults.put_fails:
                failed.append(ref.object_id)
                continue
            content = Content(key, world.dice.getrandbits(32))
            memory.write(ref, content)
            written.append(ref.object_id)
            checksums.append(memory.sums(content))
        may_still_write = bool(failed) and world.dice.random() < world.faults.may_still_write
        world.answer(ev.PutsEnded(self.number, 0, written, checksums, failed, may_still_write))
