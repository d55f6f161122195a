"""Outcomes, which `planner.on` returns for the role to report.

Every job has exactly one end: Prefilled, Ended, Failed, Preempted, Swapped or Prefetched. A job that decodes
has one per branch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import msgspec

from scheduler.instance.job import JobId
from scheduler.instance.step import SaveBlock


class JobOutcome(msgspec.Struct, frozen=True):
    """Base of the outcomes of one job."""

    job: JobId


class Loaded(JobOutcome, frozen=True):
    """All blocks of Job.load are in the job's pages. The decode duty begins, or the prompt is computed.

    shared   tokens whose KV lay in pages of this rank already
    blocks   number of blocks that were read: the last ones of Job.load, or none
    beside   they were read beside a forward pass: load_s is what that had to wait for them
    """

    load_s: float
    shared: int = 0
    blocks: int = 0
    beside: bool = False


class Prefetched(JobOutcome, frozen=True):
    """The end of a prefetch. blocks: number of blocks that it has read into pages."""

    blocks: int


class Stored(JobOutcome, frozen=True):
    """Blocks of Job.store are in the pool, while the rest of the prompt is computed.

    first       number of the first one within Job.store
    checksums   of each of them, opaque
    """

    first: int
    checksums: Seq[Any]


class Computed(JobOutcome, frozen=True):
    """The prompt of a job is computed: `tokens` of them, the others had been loaded."""

    compute_s: float
    tokens: int
    loaded: int


class Scored(JobOutcome, frozen=True):
    """Logprobs of the prompt's tokens but the first, opaque. Comes before the first token."""

    scores: Seq[Any]


class Token(JobOutcome, frozen=True):
    """A job's next token of the answer.

    index     its number within the answer
    finish    why the answer ends with it ("stop": the token is not part of the answer), or None
    logprobs  of the token, opaque; None where the request does not ask for them
    predicted   it was a draft from the request's prediction
    """

    index: int
    token: int
    finish: str | None
    logprobs: Any = None
    predicted: bool = False


class Run(JobOutcome, frozen=True):
    """Several tokens of an answer that goes on, from the passes of a leap.

    index     number of the first one within the answer
    times_s   when each was drawn
    """

    index: int
    tokens: Seq[int]
    times_s: Seq[float]


class Iterated(msgspec.Struct, frozen=True):
    """Iterations of the running batch gave `tokens` tokens each; more than one of them in a leap alone.

    rows             tokens that each computed: one for each sequence, and drafts
    drafts, drafted, accepted   sequences with drafts, their drafts, and those that are in the answer now
    compute_s        seconds of each forward pass
    seconds          of each, from the forward pass before to it, as clients see it; those of this pass alone
                     where the batch did not run before
    context_tokens   tokens that all of these attend to, themselves included
    alone            the forward passes had no prompt in them
    """

    tokens: int
    compute_s: Seq[float]
    seconds: Seq[float]
    context_tokens: int
    alone: bool
    rows: int
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0


class Decoded(JobOutcome, frozen=True):
    """A job has left the running batch because its answer is complete."""

    decode_s: float
    answered: int


class Prefilled(JobOutcome, frozen=True):
    """The end of a job whose KV is in the pool.

    first_tokens   drawn for each branch
    finishes       of each branch: why its answer ends with its first token; None when it goes on
    checksums      of each block of Job.store, opaque
    """

    first_tokens: Seq[int]
    finishes: Seq[str | None]
    checksums: Seq[Any]
    load_s: float
    compute_s: float
    store_s: float


class Ended(JobOutcome, frozen=True):
    """The end of a job that decoded, or that was cancelled.

    finish   "finished" or "cancelled"
    """

    finish: str
    answered: int


class Failed(JobOutcome, frozen=True):
    """The end of a job that cannot be finished, with all branches that are left.

    may_still_write   bytes of a failed transfer may still reach the places of Job.store
    for_good          another try here would fail as well
    code              of the fault that is the reason; "" without one
    """

    reason: str
    may_still_write: bool = False
    for_good: bool = False
    code: str = ""


class Preempted(JobOutcome, frozen=True):
    """The end of a job whose pages other jobs need. Its KV must be computed again.

    keys             of the full blocks of token_ids; empty when nothing may be reused
    may_still_write   bytes of a failed transfer may still reach the places of a swap
    """

    token_ids: Seq[int]
    answered: int
    keys: Seq[int] = ()
    may_still_write: bool = False


class SwapWanted(JobOutcome, frozen=True):
    """A job must leave its pages, and asks for a place in the pool for its KV.

    token_ids   whose KV is in the pages: all but the last one
    keys        of their full blocks; empty when nothing may be reused
    """

    token_ids: Seq[int]
    keys: Seq[int]


class Swapped(JobOutcome, frozen=True):
    """The end of a job whose pages other jobs need. All of its KV is in the pool: any rank may resume it.

    keys        of the full blocks of token_ids; empty when nothing may be reused
    checksums   of each place that was written
    """

    token_ids: Seq[int]
    answered: int
    keys: Seq[int] = ()
    checksums: Seq[Any] = ()


class Saved(msgspec.Struct, frozen=True):
    """Blocks that this rank has filled wait in staging slots for places in the pool.

    put   number of the offer
    """

    put: int
    blocks: Seq[SaveBlock]


class PutFinished(msgspec.Struct, frozen=True):
    """Blocks with places in the pool are written, or could not be.

    checksums   of each of the written places
    """

    put: int
    places: Seq[Any]
    checksums: Seq[Any]
    problem: str = ""
    may_still_write: bool = False


class BadBlocks(msgspec.Struct, frozen=True):
    """These places hold other bytes than were put there."""

    places: Seq[Any]


Outcome = (
    BadBlocks | Loaded | Prefetched | Stored | Computed | Scored | Token | Run | Iterated | Decoded
    | Prefilled | Ended | Failed | Preempted | SwapWanted | Swapped | Saved | PutFinished
)  # fmt: skip
