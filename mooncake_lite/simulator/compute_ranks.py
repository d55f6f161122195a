"""Models of the ranks that compute: orders in, answers out after modelled times.

Used by `world.py`. A rank works on all requests that it has. What they read and write is kept in `memory.py`,
and what lies in pages in `held_pages.py`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.simulator.custody import labels_of, tail_of
from mooncake_lite.simulator.held_pages import HeldPages
from mooncake_lite.simulator.memory import Content
from mooncake_lite.simulator.surroundings import Surroundings
from mooncake_lite.simulator.workload import Request, digest_of

PREFILL_S_PER_TOKEN = 0.002
TRANSFER_S_PER_BLOCK = 0.001
STEP_S = 0.02
CHUNK_S = 0.05
"""How soon a rank notices that a request is cancelled."""

MOVE_FAILED = "KV could not be moved: connection reset"


@dataclass(slots=True, eq=False)
class _Job:
    """A request on a rank, or one branch of it.

    asked     it computes nothing, and waits for a GrantSwap; granted: its KV is being written to the pool
    over      its answer has been sent, and nothing about it happens any more
    """

    order: fx.StartOrder
    request: Request
    branch: int = 0
    asked: bool = False
    granted: bool = False
    over: bool = False


def _first_tokens(request: Request, world: Surroundings) -> list[int]:
    """Add the first token of each answer. Returns the branches that end with it."""
    request.fork(world.dice)
    for part in request.parts.values():
        part.text.append()
        part.answered += 1
    return [branch for branch, part in request.parts.items() if part.answered >= part.answer_tokens]


class PrefillModel:
    """A prefill rank: loads, computes, stores."""

    def __init__(self, number: int, world: Surroundings) -> None:
        self.number = number
        self.pages = HeldPages(number, world)
        self._world = world
        self._jobs: list[_Job] = []

    def on(self, order: fx.Order) -> None:
        """Carry out an order."""
        match order:
            case fx.StartPrefill():
                assert all(job.order.request_id != order.request_id for job in self._jobs)
                job = _Job(order, self._world.requests[order.request_id])
                self._jobs.append(job)
                assert len(self._jobs) <= self._world.shape.prompts, "a rank gets more prompts than slots"
                self._start(job)
            case fx.CancelOn():
                for job in self._jobs:
                    if (job.order.request_id, job.order.attempt) == (order.request_id, order.attempt):
                        self._world.clock.after(CHUNK_S, partial(self._fail, job, "cancelled", False))
            case fx.ForgetPages():
                self.pages.forget()
            case _:
                raise AssertionError(f"a prefill rank gets {order}")

    def _start(self, job: _Job) -> None:
        world, order = self._world, job.order
        assert isinstance(order, fx.StartPrefill)
        size = job.request.text.block_tokens
        computed = job.request.text.num_tokens - len(order.load) * size
        seconds = max(1, computed) * PREFILL_S_PER_TOKEN * (0.5 + world.dice.random())
        seconds += (len(order.load) + len(order.store)) * TRANSFER_S_PER_BLOCK
        if world.dice.random() < world.faults.prefill_fails:
            may_still_write = world.dice.random() < world.faults.may_still_write
            seconds *= world.dice.random()
            world.clock.after(seconds, lambda: self._fail(job, MOVE_FAILED, may_still_write))
        else:
            world.clock.after(seconds, lambda: self._end(job, seconds))

    def _end(self, job: _Job, seconds: float) -> None:
        """Store all KV, add the first token of the answer, and report."""
        if job.over:
            return
        job.over = True
        self._jobs.remove(job)
        order, request, memory = job.order, job.request, self._world.memory
        assert isinstance(order, fx.StartPrefill)
        labels = labels_of(request, order.attempt, len(order.load) + len(order.store))
        checksums = []
        for ref, label in zip(order.store, labels[len(order.load) :], strict=True):
            content = Content(label, self._world.dice.getrandbits(32))
            memory.write(ref, content)
            checksums.append(memory.sums(content))
        if order.tail is not None:
            memory.write(order.tail, Content(tail_of(order.request_id, order.attempt), 0))
        if request.reuse:
            self.pages.use(request.keys[: request.text.num_tokens // request.text.block_tokens])
        finished = _first_tokens(request, self._world)
        load_s = len(order.load) * TRANSFER_S_PER_BLOCK
        store_s = len(order.store) * TRANSFER_S_PER_BLOCK
        self._world.answer(
            ev.PrefillEnded(
                self.number,
                0,
                order.request_id,
                order.attempt,
                checksums,
                finished,
                load_s,
                max(0.0, seconds - load_s - store_s),
                store_s,
                max(1, request.text.num_tokens - len(order.load) * request.text.block_tokens),
                len(order.load),
            )
        )

    def _fail(self, job: _Job, reason: str, may_still_write: bool) -> None:
        if job.over:
            return
        job.over = True
        self._jobs.remove(job)
        order = job.order
        failed = ev.RequestFailed(self.number, 0, order.request_id, order.attempt, reason, may_still_write)
        self._world.answer(failed)


@dataclass(slots=True)
class _Blocks:
    """Full blocks of answers that are offered to the pool: keys, and the key and number before each."""

    keys: list[int] = field(default_factory=list)
    before: list[tuple[int | None, int]] = field(default_factory=list)


class DecodeModel:
    """A decode rank: loads a request's KV, then gives one token to each of its requests, over and over.

    _puts     number of a PutsWanted -> its keys
    _offers   there is a pool that takes full blocks
    """

    def __init__(self, number: int, slots: int, world: Surroundings) -> None:
        self.number = number
        self._slots = slots
        self._world = world
        self._jobs: dict[tuple[str, int], _Job] = {}
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
                seconds = self._world.dice.random() * 0.1
                self._world.clock.after(seconds, lambda: self._write(order, keys))
            case fx.ForgetPages():
                pass
            case _:
                raise AssertionError(f"a decode rank gets {order}")

    # ------------------------------------------------------------------------------ a request

    def _accept(self, order: fx.StartOrder, branches: Iterable[int]) -> list[_Job]:
        """Take a job for each branch of a request."""
        request = self._world.requests[order.request_id]
        jobs = [_Job(order, request, branch) for branch in branches]
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
        seconds = (1 + len(order.blocks)) * TRANSFER_S_PER_BLOCK * (0.5 + world.dice.random())
        if world.dice.random() < world.faults.decode_fails:
            world.clock.after(seconds, lambda: self._fail(jobs))
        else:
            world.clock.after(seconds, lambda: self._loaded(jobs))

    def _loaded(self, jobs: list[_Job]) -> None:
        left = [job for job in jobs if not job.over]
        if not left:
            return
        order = left[0].order
        assert isinstance(order, fx.StartDecode)
        blocks = len(order.blocks) + (order.tail is not None)
        load_s = blocks * TRANSFER_S_PER_BLOCK
        self._world.answer(ev.DecodeLoaded(self.number, 0, order.request_id, order.attempt, load_s, blocks))
        for job in left:
            self._decode(job)

    def _decode(self, job: _Job) -> None:
        """Generate the rest of the answer, or as much as there are pages for."""
        world = self._world
        left = job.request.answer_tokens - job.request.answered
        if world.dice.random() < world.faults.preempted:
            left = world.dice.randrange(left)
            self._generate(job, left, preempt=True)
        else:
            self._generate(job, left, preempt=False)

    def _generate(self, job: _Job, left: int, preempt: bool) -> None:
        """Go on to the next token after which something happens: a block is full, or this was the last."""
        if job.over:
            return
        text = job.request.text
        until_full = text.block_tokens - (text.num_tokens - 1) % text.block_tokens
        steps = min(left, until_full)
        self._world.clock.after(steps * STEP_S, lambda: self._generated(job, steps, left - steps, preempt))

    def _generated(self, job: _Job, steps: int, left: int, preempt: bool) -> None:
        if job.over:
            return
        request = job.request
        for _ in range(steps):
            request.text.append()
            request.answered += 1
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

    def _preempt(self, job: _Job, *, may_still_write: bool = False) -> None:
        if not job.over:
            self._forget(job)
            self._world.answer(ev.Preempted(*self._so_far(job, 0), may_still_write=may_still_write))

    def _so_far(self, job: _Job, without: int) -> tuple[int, int, str, int, int, list[int], list[int], int]:
        """Return what a rank tells of prompt and answer so far, without the last tokens."""
        order, request = job.order, job.request
        num_tokens = request.text.num_tokens - without
        keys = request.keys[: num_tokens // request.text.block_tokens]
        digests = [digest_of(key) for key in keys]
        return self.number, 0, order.request_id, order.attempt, num_tokens, keys, digests, job.branch

    # ------------------------------------------------------------------------------ swaps

    def _ask_for_swap(self, job: _Job) -> None:
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
        seconds = len(order.places) * TRANSFER_S_PER_BLOCK * (0.5 + world.dice.random())
        if world.dice.random() < world.faults.put_fails:
            late = world.dice.random() < world.faults.may_still_write
            world.clock.after(seconds, lambda: self._preempt(job, may_still_write=late))
        else:
            world.clock.after(seconds, lambda: self._swapped(job, order))

    def _swapped(self, job: _Job, order: fx.GrantSwap) -> None:
        full = (job.request.text.num_tokens - 1) // job.request.text.block_tokens
        for number, place in enumerate(order.places or ()):
            if place is not None:
                own = "own", job.request.request_id, order.attempt, number
                label = tail_of(job.request.request_id, order.attempt) if number == full else own
                self._world.memory.write(place, Content(label, 0))
        self._forget(job)
        self._world.answer(ev.Swapped(*self._so_far(job, 0)))

    def _cancel(self, job: _Job) -> None:
        """End a request soon, or at once if nothing is computed for it, unless its KV is being written."""
        if not job.asked:
            self._world.clock.after(CHUNK_S, lambda: None if job.granted else self._end(job))
        elif not job.granted:
            self._end(job)

    def _end(self, job: _Job) -> None:
        """End a request that is answered, or whose client has gone."""
        if not job.over:
            self._forget(job)
            order, request = job.order, job.request
            steps, context_tokens = request.answered, request.answered * request.text.num_tokens
            answer_tokens = steps if steps >= request.answer_tokens else 0
            self._world.answer(
                ev.DecodeEnded(
                    self.number, 0, order.request_id, order.attempt, job.branch, answer_tokens, steps, steps,
                    context_tokens, steps * STEP_S,
                )
            )  # fmt: skip

    def _fail(self, jobs: list[_Job]) -> None:
        """Give up all branches that are left."""
        left = [job for job in jobs if not job.over]
        for job in left:
            self._forget(job)
        if left:
            order = left[0].order
            failed = ev.RequestFailed(self.number, 0, order.request_id, order.attempt, MOVE_FAILED)
            self._world.answer(failed)

    def _forget(self, job: _Job) -> None:
        job.over = True
        del self._jobs[job.order.request_id, job.branch]

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


class ComputeModel(DecodeModel):
    """A rank of both duties: loads what the pool has of a prompt, computes the rest, and decodes on."""

    def __init__(self, number: int, slots: int, world: Surroundings) -> None:
        super().__init__(number, slots, world)
        self.pages = HeldPages(number, world)

    def on(self, order: fx.Order) -> None:
        """Carry out an order."""
        if isinstance(order, fx.StartServe):
            self._serve(order)
        elif isinstance(order, fx.ForgetPages):
            self.pages.forget()
        else:
            super().on(order)

    def _serve(self, order: fx.StartServe) -> None:
        world = self._world
        request = world.requests[order.request_id]
        branches = range(request.n) if request.n > 1 else (request.branch,)
        jobs, text = self._accept(order, branches), request.text
        computed = max(1, text.num_tokens - len(order.load) * text.block_tokens)
        seconds = computed * PREFILL_S_PER_TOKEN * (0.5 + world.dice.random())
        seconds += len(order.load) * TRANSFER_S_PER_BLOCK
        if world.dice.random() < world.faults.prefill_fails:
            world.clock.after(seconds * world.dice.random(), lambda: self._fail(jobs))
        elif request.n == 1 and world.dice.random() < world.faults.preempted:
            world.clock.after(seconds * world.dice.random(), lambda: self._preempt(jobs[0]))
        else:
            world.clock.after(seconds, lambda: self._computed(request, jobs, computed, seconds))

    def _computed(self, request: Request, jobs: list[_Job], computed: int, seconds: float) -> None:
        """Add the first token of each answer, offer the blocks that were computed, and decode on."""
        left = [job for job in jobs if not job.over]
        if not left:
            return
        order = left[0].order
        assert isinstance(order, fx.StartServe)
        full = request.text.num_tokens // request.text.block_tokens
        if request.reuse:
            self.pages.use(request.keys[:full])
        finished = _first_tokens(request, self._world)
        load_s = len(order.load) * TRANSFER_S_PER_BLOCK
        self._world.answer(
            ev.PromptComputed(
                self.number, 0, order.request_id, order.attempt, computed, seconds - load_s, load_s,
                len(order.load),
            )
        )  # fmt: skip
        for num_blocks in range(len(order.load) + 1, full + 1):
            self._offer(request, num_blocks)
        for job in left:
            job.request = request.parts[job.branch]
            if job.branch in finished:
                self._end(job)
            else:
                self._decode(job)
