"""Ranks in this process, with a real model: State, Runner and Engine, and what became of their requests.

One rank has both duties, or one prefills and another decodes. What the conductor does for them is done here
at once: a preempted branch comes again as a request of its own, and blocks get places in a pool of bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine.engine import Engine
from mooncake_lite.engine.local import BLOCK_TOKENS
from mooncake_lite.engine.runner import Runner
from mooncake_lite.engine.staging import StagingBlocks
from mooncake_lite.messages import Sampling
from mooncake_lite.model.forward import Model
from scheduler.instance import (
    DECODE,
    PREFILL,
    Arrived,
    Cancelled,
    Forgotten,
    Granted,
    Job,
    JobId,
    Limits,
    Pages,
    Staging,
    State,
    Step,
    SwapAnswered,
    begin,
    new_prefix_cache,
    next_step,
    on,
)
from scheduler.instance import outcomes as out
from scheduler.instance.dealt_pages import DealtPages
from scheduler.instance.drafts import accepted
from scheduler.instance.sequence import Sequence as TokenSequence
from scheduler.instance.state import Preemption
from scheduler.instance.step import NO_TOKEN
from scheduler.instance.task import NewDrafter
from store.keys import next_key
from store.layout import BlockLayout, check_of
from store.objects import BlockRef
from tests.mooncake_lite.engine.byte_pool import BytePool
from tests.mooncake_lite.engine.exact import Case
from tests.mooncake_lite.engine.lockstep import Lockstep
from tests.mooncake_lite.engine.stages import StagedRunner, stage_models

BOTH = frozenset({PREFILL, DECODE})
SALT = b"salt"
CONTEXT = 512
STAGED = 12
"""Blocks that fit into a rank's staging memory."""
UNIT = 256
"""Tokens of a unit, in which members deal out the KV of a sequence."""

Branch = tuple[str, int]
"""(name of the request, number of its answer)."""


class HeardModel:
    """A model that keeps the logits of the draws of its last forward pass."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.heard = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def states(self, *args: Any) -> torch.Tensor:
        """Compute what the model computes."""
        self.heard = torch.empty(0)
        return self._model.states(*args)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Compute what the model computes."""
        logits = self._model.logits(states)
        self.heard = self.heard if len(self.heard) else logits
        return logits


class Rank:
    """The books and the engine of one rank."""

    def __init__(
        self,
        model: Model,
        duties: frozenset[str],
        num_pages: int,
        limits: Limits,
        sharing: str,
        pool: BytePool | None,
        preemption: Preemption,
        stages: int = 1,
        members: int = 1,
        turns: int = 1,
        folder: Path | None = None,
    ) -> None:
        self.model = HeardModel(model)
        engine = Engine(self.model, num_pages, BLOCK_TOKENS)  # type: ignore[arg-type]
        pages, staging = Pages(num_pages, PAGE_TOKENS), Staging(0, 0)
        self.runner: Runner | StagedRunner | Lockstep = Runner(engine)
        if members * turns > 1:
            assert pool is not None
            assert folder is not None
            sizes: Any = {"members": members, "turns": turns, "unit": UNIT, "wrap": self._wrap}
            sizes["batch_invariant"] = model.batch_invariant
            self.runner = Lockstep(folder, num_pages, BLOCK_TOKENS, pool, STAGED, **sizes)
            staging = Staging(self.runner.blocks.half_blocks, self.runner.blocks.num_slots)
            if turns > 1:
                pages = DealtPages(num_pages, PAGE_TOKENS, UNIT, turns)
        elif stages > 1:
            assert pool is not None
            *models, last = stage_models(model, stages)
            self.model = HeardModel(last)
            self.runner = StagedRunner([*models, self.model], num_pages, BLOCK_TOKENS, pool, STAGED)
            staging = Staging(self.runner.blocks.half_blocks, self.runner.blocks.num_slots)
        elif pool is not None:
            config = model.config
            layout = BlockLayout(config.layers, config.kv_heads, BLOCK_TOKENS, config.head_dim, 4)
            blocks = StagingBlocks(np.zeros(STAGED * layout.nbytes, np.uint8), layout, engine)
            staging = Staging(blocks.half_blocks, blocks.num_slots)
            self.runner = Runner(engine, blocks, pool)  # type: ignore[arg-type]
        prefix = new_prefix_cache(sharing, pages, BLOCK_TOKENS)
        self.state = State(
            duties, pages, staging, BLOCK_TOKENS, limits, next_key=next_key, prefix=prefix,
            preemption=preemption,
        )  # fmt: skip

    def _wrap(self, model: Model) -> HeardModel:
        self.model = HeardModel(model)
        return self.model


class OneRank:
    """All ranks of one test, and their requests. `state` is that of the one that decodes.

    num_pages  of each rank, or of the one that prefills and of the one that decodes
    split      one rank prefills, another decodes; needs a pool
    stages     ranks of a pipeline that prefills in place of the one rank, if limits.late
    members    of each rank, the one that decodes last: it is an instance of so many, of the model in `folder`
    turns      members with all heads that hold the KV of decoded sequences together
    pool       where blocks go; None: nowhere
    reuses     whether blocks in the pool are reused by other requests

    answers    tokens of each branch
    ended      how each branch ended: "finished", "cancelled" or "failed"
    faults     request -> code of the fault that it failed with
    seen       how often each kind of event happened
    logits     of each draw, by (branch, its number within the answer), if they are kept
    new_drafter   makes drafts for the running batch
    """

    def __init__(
        self,
        model: Model,
        num_pages: int | Sequence[int],
        limits: Limits,
        sharing: str = "off",
        *,
        split: bool = False,
        pool: BytePool | None = None,
        reuses: bool = False,
        preemption: Preemption = "recompute",
        keep_logits: bool = False,
        stages: int = 1,
        members: Sequence[int] = (1, 1),
        turns: int = 1,
        folder: Path | None = None,
        new_drafter: NewDrafter | None = None,
    ) -> None:
        duties = [frozenset({PREFILL}), frozenset({DECODE})] if split else [BOTH]
        pages = [num_pages] * len(duties) if isinstance(num_pages, int) else num_pages
        self.ranks = [
            Rank(
                model,
                some,
                has,
                limits,
                "off" if turns > 1 and decodes else sharing,
                pool,
                preemption,
                1 if decodes else stages,
                size,
                turns if decodes else 1,
                folder,
            )
            for some, has, size in zip(duties, pages, members[-len(duties) :], strict=True)
            for decodes in [DECODE in some]
        ]
        if new_drafter is not None:
            self.draft_with(new_drafter)
        self.split, self.pool, self.reuses, self.context = split, pool, reuses, model.config.max_position
        self.jobs: dict[str, Job] = {}
        self.answers: dict[Branch, list[int]] = defaultdict(list)
        self.ended: dict[Branch, str] = {}
        self.faults: dict[str, str] = {}
        self.seen: Counter[str] = Counter()
        self.keep_logits = keep_logits
        self.logits: dict[tuple[Branch, int], torch.Tensor] = {}
        self._resumed: dict[Branch, JobId] = {}
        self._prefilling: dict[JobId, Job] = {}

    @property
    def state(self) -> State:
        """Return the books of the rank that decodes."""
        return self.ranks[-1].state

    def draft_with(self, new_drafter: NewDrafter) -> None:
        """Let the running batch have drafts wherever there is room: rows cost next to nothing."""
        self.state.new_drafter = new_drafter
        self.state.limits = dataclasses.replace(self.state.limits, row_costs=((1, 1.0), (32, 1.001)))

    def ask(
        self,
        name: str,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        n: int = 1,
        branch: int = 0,
        answered: int = 0,
    ) -> None:
        """Let a request arrive; with `answered`, the prompt ends with so many tokens of its answer."""
        job = Job(
            name, 0, BOTH, list(prompt), answered, max_tokens, self.context, frozenset(), sampling, n,
            branch, salt=SALT,
        )  # fmt: skip
        self.jobs[name] = job
        self._prefill(job)

    def cancel(self, name: str, branch: int | None = None) -> None:
        """Give up a request or one branch of it."""
        self._on(self.ranks[-1], Cancelled(name, 0, branch))
        for (request, number), job in list(self._resumed.items()):
            if request == name and branch in (None, number):
                self._on(self.ranks[-1], Cancelled(job.request_id, job.attempt))

    def forget(self) -> None:
        """Forget the prefixes in pages."""
        for rank in self.ranks:
            on(rank.state, Forgotten(), 0.0)

    @property
    def busy(self) -> bool:
        """Tell whether a rank has work to do."""
        return any(rank.state.busy for rank in self.ranks)

    def step(self) -> None:
        """Let each rank take one step."""
        for rank in self.ranks:
            if rank.state.busy or len(self.ranks) == 1:
                self._step(rank)

    def _step(self, rank: Rank) -> None:
        step = next_step(rank.state, 0.0)
        begin(rank.state, step)
        self.seen["evicted"] += bool(step.evict)
        self.seen["copied"] += sum(growth.copies is not None for growth in step.grow)
        self.seen["mixed"] += len({chunk.prompt for chunk in step.chunks}) == 2
        self.seen["blocks read"] += sum(land.count for land in step.lands)
        self.seen["came by layers"] += step.ahead is not None
        self.seen["left by layers"] += any(write.behind for write in step.writes)
        result = rank.runner.run(step)
        tokens = iter(result.tokens)
        for chunk in step.chunks:
            drawn = [*itertools.islice(tokens, len(chunk.draws))]
            if len(chunk.rows) > 1:
                self.seen["drafts"] += len(drawn) - 1
                self.seen["accepted"] += accepted(chunk, drawn)
        if self.keep_logits:
            self._keep(rank, step, list(result.tokens))
        self._hear(rank, on(rank.state, result, 0.0))

    def settle(self) -> None:
        """Work until nothing is left."""
        while self.busy:
            self.step()

    def close(self) -> None:
        """End the threads of members."""
        for rank in self.ranks:
            if isinstance(rank.runner, Lockstep):
                rank.runner.close()

    def assert_at_rest(self) -> None:
        """Assert that every page is free or idle, and that every branch ended once."""
        for rank in self.ranks:
            state, pages = rank.state, rank.state.pages
            state.check()
            assert not state.tasks
            assert not pages.used
            assert not state.puts
            assert len(pages.free) + len(pages.idle) == pages.num_pages
        asked = {(name, branch) for name, job in self.jobs.items() for branch in job.branches}
        assert self.ended.keys() == asked, "a branch has no end"

    def cases(self) -> list[Case]:
        """Return the answers that came to their end, to be compared."""
        found = []
        for (name, branch), how in self.ended.items():
            job, answer = self.jobs[name], self.answers[name, branch]
            if how == "finished":
                assert len(answer) == job.max_tokens
                found.append(Case(tuple(job.token_ids), job.sampling, tuple(answer), branch))
        return found

    def _keep(self, rank: Rank, step: Step, tokens: list[int]) -> None:
        """Keep the logits of each draw but those behind wrong drafts; a row serves all draws of its chunk."""
        drawing = [row for chunk in step.chunks if chunk.draws for row in chunk.rows]
        drawn = iter(tokens)
        said = {id(draw): next(drawn, NO_TOKEN) for row in drawing for draw in row.draws}
        before: list[int] = []
        for row, logits in zip(drawing, rank.model.heard[: len(drawing)], strict=True):
            before = before * bool(row.draws[0].ahead)
            if tuple(before) == row.draws[0].ahead:
                for draw in row.draws:
                    name = _branch_of(row.job._replace(branch=draw.branch))
                    self.logits[name, draw.answered] = logits.clone()
            before.append(said[id(row.draws[0])])

    # ------------------------------------------------------------------------------ the conductor's part

    def _prefill(self, job: Job) -> None:
        """Send a job to the rank that computes prompts, with the blocks that the pool has."""
        job = replace(job, offers=self.reuses and not self.split)
        if self.pool is not None and self.reuses:
            job = replace(job, load=self.pool.leading(_keys(job.token_ids)))
        if self.split:
            blocks = -(-len(job.token_ids) // BLOCK_TOKENS)
            store = [self.pool.new_place() for _ in range(blocks - len(job.load))]
            job = replace(job, duties=frozenset({PREFILL}), store=store)
        self._send(self.ranks[0], job)

    def _send(self, rank: Rank, job: Job) -> None:
        if PREFILL in job.duties and self.split:
            self._prefilling[job.id] = job
        self._on(rank, Arrived(job))

    def _on(self, rank: Rank, event: Any) -> None:
        self._hear(rank, on(rank.state, event, 0.0))

    def _hear(self, rank: Rank, said: list[out.Outcome]) -> None:
        for outcome in said:
            match outcome:
                case out.Token():
                    self._token(outcome)
                case out.Ended():
                    branch = _branch_of(outcome.job)
                    assert branch not in self.ended, "a branch ended twice"
                    self.ended[branch] = outcome.finish
                    self._resumed.pop(branch, None)
                    self.seen[outcome.finish] += 1
                case out.Loaded():
                    self.seen["shared"] += outcome.shared > 0
                case out.Computed():
                    self.seen["reused tokens"] += outcome.loaded
                    self.seen["computed tokens"] += outcome.tokens
                case out.Failed():
                    self._fail(outcome)
                case out.Prefilled():
                    self._decode(outcome)
                case out.Preempted() | out.Swapped():
                    self._resume(outcome)
                case out.Saved() | out.PutFinished() | out.SwapWanted():
                    self._place(rank, outcome)

    def _token(self, token: out.Token) -> None:
        name, branch = _branch_of(token.job)
        answer = self.answers[name, branch]
        assert self.jobs[name].answered + len(answer) == token.index, "a token is missing, or came twice"
        answer.append(token.token)

    def _fail(self, failed: out.Failed) -> None:
        """Note a fault, which ends all branches of a request that go on."""
        assert failed.code, f"{failed.job}: {failed.reason}"
        name, _ = _branch_of(failed.job)
        assert name not in self.faults, "a request failed twice"
        self.faults[name] = failed.code
        for branch in self.jobs[name].branches:
            self.ended.setdefault((name, branch), "failed")

    def _decode(self, done: out.Prefilled) -> None:
        """Send what a prefill rank has computed to the rank that decodes."""
        job = self._prefilling.pop(done.job._replace(branch=0))
        job = replace(job, store=_checked(job.store, done.checksums))
        if self.reuses:
            self.pool.publish(_keys(job.token_ids)[len(job.load) :], job.store)
        going = []
        for branch, token, finish in zip(job.branches, done.first_tokens, done.finishes, strict=True):
            if finish is None:
                going.append((branch, [token]))
            else:
                self.ended[_branch_of(JobId(job.request_id, job.attempt, branch))] = "finished"
                self.seen["finished"] += 1
        if going:
            places = [*job.load, *job.store]
            decode = replace(job, duties=frozenset({DECODE}), load=places, store=(), answers=going)
            self._send(self.ranks[-1], decode)

    def _resume(self, preempted: out.Preempted | out.Swapped) -> None:
        swapped = isinstance(preempted, out.Swapped)
        self.seen["swapped" if swapped else "preempted"] += 1
        name, branch = _branch_of(preempted.job)
        attempt = preempted.job.attempt + 1
        job = replace(
            self.jobs[name], request_id=f"{name}#{branch}", attempt=attempt, n=1, branch=branch,
            token_ids=preempted.token_ids, answered=preempted.answered,
        )  # fmt: skip
        self._resumed[name, branch] = JobId(job.request_id, attempt, branch)
        if not swapped:
            self._prefill(job)
            return
        load = self.pool.swaps.pop(preempted.job)
        written = len(load) - len(preempted.checksums)
        load = [*load[:written], *_checked(load[written:], preempted.checksums)]
        self._send(self.ranks[-1], replace(job, duties=frozenset({DECODE}), load=load))

    def _place(self, rank: Rank, said: out.Saved | out.PutFinished | out.SwapWanted) -> None:
        """Answer an offer, and note what has been written."""
        pool = self.pool
        if isinstance(said, out.PutFinished):
            assert not said.problem
            places = _checked(said.places, said.checksums)
            pool.publish(pool.offers.pop((id(rank), said.put)), places)
        elif isinstance(said, out.Saved):
            new = [block.key not in pool.keys for block in said.blocks]
            granted = [pool.new_place() if wanted else None for wanted in new]
            pool.offers[id(rank), said.put] = [block.key for block, wanted in zip(said.blocks, new) if wanted]
            self._on(rank, Granted(said.put, granted))
        else:
            has: list[BlockRef] = pool.leading(said.keys)
            count = -(-len(said.token_ids) // BLOCK_TOKENS)
            new_places = [pool.new_place() for _ in range(count - len(has))]
            pool.swaps[said.job] = [*has, *new_places]
            self._on(rank, SwapAnswered(said.job, [*[None] * len(has), *new_places]))


class Knows:
    """Drafts what is known to come, but for each seventh token. answers: of the branches, by their names."""

    def __init__(self, answers: dict[Branch, list[int]], job: Job, branch: int) -> None:
        self._answer = answers[_branch_of(JobId(job.request_id, 0, branch))]

    def after(self, sequence: TokenSequence, most: int) -> tuple[list[int], bool]:
        """Return the next tokens."""
        first = sequence.answered
        known = enumerate(self._answer[first : first + most], first)
        return [abs(token - (index % 7 == 6)) for index, token in known], False


def go_on(model: Model, cases: Sequence[Case]) -> list[tuple[int, ...]]:
    """Compute whole answers whose first tokens are given; every request has the rank to itself."""
    rank = OneRank(model, CONTEXT // PAGE_TOKENS, Limits(CONTEXT, sequences=1))
    for number, case in enumerate(cases):
        given = case.answer[: case.agreed]
        text = (*case.prompt, *given)
        rank.ask(str(number), text, case.sampling, len(case.answer), 1, case.branch, case.agreed)
    rank.settle()
    return [
        (*case.answer[: case.agreed], *rank.answers[str(number), case.branch])
        for number, case in enumerate(cases)
    ]


def _branch_of(job: JobId) -> Branch:
    return job.request_id.partition("#")[0], job.branch


def _checked(places: Sequence[BlockRef], sums: Sequence[list[int]]) -> list[BlockRef]:
    """Have places compared with the checksums of what was put there whenever they are read."""
    return [replace(ref, check=check_of(some)) for ref, some in zip(places, sums, strict=True)]


def _keys(token_ids: Sequence[int]) -> list[int]:
    """Keys of the full blocks of a text."""
    keys: list[int] = []
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        keys.append(next_key(SALT, keys[-1] if keys else None, token_ids[end - BLOCK_TOKENS : end]))
    return keys
