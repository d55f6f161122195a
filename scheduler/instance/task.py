"""A task: a job on its rank, with its sequence and its progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scheduler.instance.job import Job
from scheduler.instance.sequence import Sequence
from scheduler.instance.step import Draw


@dataclass(slots=True)
class Task:
    """A job and its progress. Times are those of the planner's caller.

        read, landed      blocks of job.load whose transfer has begun; those that are in the pages
        keys              of the first full blocks: those of the job, then those of blocks filled since
        saved             full blocks that are in the pool, or have been offered to it
        copied, written   blocks of job.store that were copied into staging; those whose transfer has ended
        sums              checksums of the copied blocks, opaque
        load_began        when the task was admitted; load_s: seconds until all of its KV was in the pages
        compute_s         seconds of forward passes for its prompt; of a shared pass, its share by tokens
        computed          prompt tokens that they computed
        store_began       when its first token was sampled
        joined            when it joined the running batch
        first_token, finish   what prefill sampled, and why the answer ends with it (None: it goes on)
        problem           why a transfer of job.store failed, "" as long as none did
        may_still_write   bytes of a failed transfer may still reach the pool

    Invariant: landed <= read <= len(job.load) and written <= copied <= len(job.store).
    """

    job: Job
    sequence: Sequence
    read: int = 0
    landed: int = 0
    copied: int = 0
    written: int = 0
    keys: list[int] = field(default_factory=list)
    saved: int = 0
    sums: list[Any] = field(default_factory=list)
    load_began: float = 0.0
    load_s: float = 0.0
    compute_s: float = 0.0
    computed: int = 0
    store_began: float = 0.0
    joined: float = 0.0
    first_token: int = 0
    finish: str | None = None
    problem: str = ""
    may_still_write: bool = False

    @classmethod
    def of(cls, job: Job) -> Task:
        """Make the task of a job that has just arrived."""
        ids = list(job.token_ids)
        sequence = Sequence(ids, job.answered, job.max_tokens, job.max_len, job.stop_ids)
        return cls(job, sequence, keys=list(job.keys))

    @property
    def draw(self) -> Draw:
        """Return how the next token is chosen. It names the sequence's own list, which the result extends."""
        sequence = self.sequence
        return Draw(self.job.sampling, sequence.token_ids, sequence.answered, sequence.stop_ids)

    def check(self) -> None:
        """Assert the invariant."""
        assert 0 <= self.landed <= self.read <= len(self.job.load)
        assert 0 <= self.written <= self.copied <= len(self.job.store)
        assert self.sequence.num_computed <= len(self.sequence.token_ids)
