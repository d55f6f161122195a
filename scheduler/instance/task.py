"""A task: one sequence of a job on its rank, and its progress."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler.instance.job import PREFETCH, PREFILL, Job, JobId
from scheduler.instance.prefix import Chain
from scheduler.instance.sequence import Drafter, Sequence
from scheduler.instance.step import Draw, Fault, Score

OF_PREDICTIONS = 0.8
"""Acceptance that is expected of drafts from a prediction before any is tried. Of other drafts: a half."""

NewDrafter = Callable[[Job, int], Drafter]
"""(job, number of a branch) -> what makes drafts for it."""


@dataclass(slots=True)
class Task:
    """A sequence of a job, and its progress. Times are those of the planner's caller.

        id                its name on its rank
        branch            number of its answer; a task that is not forked yet stands for all branches
        forked            whether it stands for its own branch alone
        dropped           branches that were cancelled before the fork
        matched           pages of its last prefix match, while it waits; matched_at: Pages.num_cached then
        shared            tokens whose KV lay in pages of this rank when it was admitted
        to_load           leading blocks of job.load that are wanted in the pages; the others are computed
        by_layers         those that are not in pages come with its next pass, layer by layer
        read, landed      blocks of job.load whose transfer has begun; those that are in the pages
        keys              of the first full blocks: those of the job, then those of blocks filled since
        saved             full blocks that are in the pool, or have been offered to it
        out               blocks to be written, of job.store or of a swap: (number in the sequence, place)
        failed_reads      transfers of blocks of job.load that have failed
        asked_at          when a swap was asked for
        granted           the pool has answered a swap: `out` is what it lacks
        copied, written   blocks of `out` that have begun to move; those whose transfer has ended
        sums              block of `out` -> its checksums, opaque, once it is written
        load_began        when the task was admitted; load_s: seconds until all of its KV was in the pages
        compute_s         seconds of forward passes for its prompt; of a shared pass, its share by tokens
        computed          prompt tokens that they computed
        store_began       when its first token was sampled
        joined            when it joined the running batch
        first_tokens, finishes   what prefill drew for each branch, and why its answer ends with it
        drafter           makes its drafts; None until it is asked for some
        acceptance        mean of its drafts: 0 none is accepted, 1 all are
        next_trial        number of answered tokens from which on drafts that do not seem to pay are tried
        scores            logprobs of the prompt's tokens so far, opaque, if the job is scored
        problem           why a transfer of `out` failed, or the task itself; "" as long as neither did
        fault             that its job fails with, once its last transfer has ended
        may_still_write   bytes of a failed transfer may still reach the pool

    Invariant: landed <= read <= to_load <= len(job.load) and written <= copied <= len(out).
    """

    job: Job
    sequence: Sequence
    branch: int = 0
    forked: bool = False
    dropped: set[int] = field(default_factory=set)
    matched: tuple[int, ...] = field(default=(), compare=False)
    matched_at: int = field(default=0, compare=False)
    shared: int = 0
    to_load: int = 0
    by_layers: bool = False
    read: int = 0
    landed: int = 0
    out: list[tuple[int, Any]] = field(default_factory=list)
    failed_reads: int = 0
    asked_at: float = 0.0
    granted: bool = False
    copied: int = 0
    written: int = 0
    keys: list[int] = field(default_factory=list)
    saved: int = 0
    sums: dict[int, Any] = field(default_factory=dict)
    load_began: float = 0.0
    load_s: float = 0.0
    compute_s: float = 0.0
    computed: int = 0
    store_began: float = 0.0
    joined: float = 0.0
    first_tokens: list[int] = field(default_factory=list)
    finishes: list[str | None] = field(default_factory=list)
    drafter: Drafter | None = field(default=None, compare=False)
    acceptance: float = 0.5
    next_trial: int = 0
    scores: list[Any] = field(default_factory=list)
    problem: str = ""
    fault: Fault | None = None
    may_still_write: bool = False
    id: JobId = field(init=False)

    def __post_init__(self) -> None:
        self.id = JobId(self.job.request_id, self.job.attempt, self.branch)

    @classmethod
    def of(cls, job: Job) -> Task:
        """Make the task of a job that has just arrived."""
        sequence = Sequence(job.token_ids[:], job.answered, job.max_tokens, job.max_len, job.stop_ids)
        branches = job.branches
        task = cls(job, sequence, branches[0], len(branches) == 1, to_load=len(job.load), keys=list(job.keys))
        task.acceptance = OF_PREDICTIONS if job.predicted else task.acceptance
        task.out = list(enumerate(job.store, len(job.load)))
        return task.fork(*job.answers[0]) if len(job.answers) == 1 else task

    @property
    def branches(self) -> list[int]:
        """Return the branches that this task stands for."""
        if self.forked:
            return [self.branch]
        return [branch for branch in self.job.branches if branch not in self.dropped]

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences that this task brings into the running batch."""
        return 0 if self.is_prefetch else len(self.branches)

    @property
    def is_prefetch(self) -> bool:
        """Tell whether this task only loads blocks for one that comes later. It gives way to all others."""
        return PREFETCH in self.job.duties

    @property
    def chain(self) -> Chain:
        """Return what the prefix cache must know of this sequence besides its tokens."""
        return Chain(self.job.salt, self.keys)

    @property
    def most_reused(self) -> int:
        """Return how many leading tokens may be reused: the last one is computed, for its logits.

        Of several branches to be decoded, the last tokens are those of their answers.
        """
        computes_last = (self.forked or not self.job.answers) and not self.is_prefetch
        return len(self.sequence.token_ids) - computes_last

    @property
    def tokens_in_pool(self) -> int:
        """Return how many leading tokens job.load covers, if it covers all that it can."""
        return len(self.sequence.token_ids) if PREFILL in self.job.duties else self.most_reused

    def checksums(self) -> tuple[Any, ...]:
        """Return the checksums of `out`, all of which is written."""
        return tuple(self.sums[index] for index in range(len(self.out)))

    def draws(self) -> tuple[Draw, ...]:
        """Return how the next token of each branch is chosen.

        They name the sequence's own list of tokens, which the result extends.
        """
        seq, sampling = self.sequence, self.job.sampling
        return tuple(
            Draw(sampling, seq.token_ids, seq.answered, seq.stop_ids, branch) for branch in self.branches
        )

    def fork(self, branch: int, answer: Seq[int] = ()) -> Task:
        """Make the task of one branch. It has the same pages, which the caller must share."""
        seq = self.sequence
        ids = seq.token_ids[:]
        ids.extend(answer)
        sequence = replace(seq, token_ids=ids, answered=seq.answered + len(answer), pages=list(seq.pages))
        return replace(
            self, sequence=sequence, branch=branch, forked=True, dropped=set(), keys=list(self.keys), sums={},
            first_tokens=[], finishes=[],
        )  # fmt: skip

    def score(self, start: int, end: int) -> Score | None:
        """Return the logprobs that a chunk of tokens start .. end-1 gives; None if none are wanted."""
        if not self.job.scored:
            return None
        return Score(self.job.sampling, self.sequence.token_ids[start + 1 : end + 1])

    def check(self) -> None:
        """Assert the invariant."""
        assert 0 <= self.landed <= self.read <= self.to_load <= len(self.job.load)
        assert 0 <= self.written <= self.copied <= len(self.out)
        assert self.sequence.num_computed <= len(self.sequence.token_ids)
