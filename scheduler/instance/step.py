"""A step: the next work of a rank, as plain data, and its result.

Made by `planner.next_step`, carried out by a runner: torch on a CPU or GPU, a timed wait, or a simulator.
A runner does the parts of a step in the order of its fields. It needs nothing but the step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import msgspec

from scheduler.instance.job import JobId

NO_TOKEN = -1
"""In place of a token whose logits are no numbers, or whose chunk could not be computed."""

LOGITS_NOT_FINITE, ENGINE_ERROR = "logits_not_finite", "engine_error"
"""Why a job has no result: clients read these codes."""


class Admission(msgspec.Struct, frozen=True):
    """A waiting job gets pages for all of its tokens.

    shared   number of leading pages that hold its tokens' KV already; other sequences may use them too
    loads    whether blocks are read from the pool
    by_layers   they are read beside the first forward pass, layer by layer
    """

    job: JobId
    pages: tuple[int, ...]
    shared: int = 0
    loads: bool = False
    by_layers: bool = False


class Growth(msgspec.Struct, frozen=True):
    """A running sequence gets pages for its next token.

    copies   None: the pages are added at its end. Otherwise the one page takes the place of this last page,
             whose KV must be copied first, because other sequences use it too (copy on write)
    """

    job: JobId
    pages: tuple[int, ...]
    copies: int | None = None


class ReadGroup(msgspec.Struct, frozen=True):
    """Begin to read blocks from the pool into a staging half."""

    half: int
    places: Seq[Any]
    job: JobId
    first: int


class LayerLoad(msgspec.Struct, frozen=True):
    """Read blocks from the pool into pages, each layer before the pass of this step needs it.

    halves   that it uses in turn, each for some layers of all blocks. They are free when the step has ended
    pages    of the blocks, one block after the other; the last block may have fewer
    """

    halves: tuple[int, ...]
    places: Seq[Any]
    pages: Seq[int]
    job: JobId


class LandGroup(msgspec.Struct, frozen=True):
    """Copy the blocks of a staging half into pages.

    pages   of the blocks, one block after the other; the last block may have fewer
    """

    half: int
    count: int
    pages: Seq[int]
    job: JobId


class WriteGroup(msgspec.Struct, frozen=True):
    """Copy blocks from pages into a staging half, and then write them to the pool, while steps go on.

    Nothing changes in these pages until the transfer has ended.

    first    number of the first block within Task.out
    behind   the pass of this step fills the blocks: each layer leaves once it is computed
    numbers  of the blocks in their sequence: of a swap, some may be missing, which the pool has
    """

    half: int
    pages: Seq[int]
    places: Seq[Any]
    job: JobId
    first: int
    behind: bool = False
    numbers: Seq[int] = ()


class SaveBlock(msgspec.Struct, frozen=True):
    """Copy a block that this rank has filled from pages into a staging slot, to offer it to the pool.

    index       number of the block in its sequence
    token_ids   of the block
    key         of the block; parent: key of the block before it, None for the first one
    """

    job: JobId
    index: int
    token_ids: Seq[int]
    key: int
    parent: int | None
    pages: Seq[int]
    slot: int


class WritePut(msgspec.Struct, frozen=True):
    """Begin to write blocks from staging slots to the pool."""

    put: int
    slots: Seq[int]
    places: Seq[Any]


class Draw(msgspec.Struct, frozen=True):
    """The facts by which the next token of a sequence is chosen.

    sampling    what the request asks for, opaque
    token_ids   the whole sequence so far, as it is when the step begins
    answered    number of tokens before the drawn one that belong to the answer, those of ahead included
    stop_ids    tokens that end the answer
    branch      number of the answer among those to its prompt
    ahead       drafts between the sequence and the drawn token
    """

    sampling: Any
    token_ids: Seq[int]
    answered: int
    stop_ids: frozenset[int]
    branch: int = 0
    ahead: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Return the position of the drawn token."""
        return len(self.token_ids) + len(self.ahead)

    @property
    def before(self) -> Seq[int]:
        """Return all tokens before the drawn one."""
        return [*self.token_ids, *self.ahead] if self.ahead else self.token_ids


class Score(msgspec.Struct, frozen=True):
    """The tokens of a prompt whose logprobs a forward pass gives.

    sampling   what the request asks for, opaque
    targets    the token after each of the chunk's tokens; the prompt's last token has none after it
    """

    sampling: Any
    targets: Seq[int]


class Chunk(msgspec.Struct, frozen=True):
    """Tokens of one job that a forward pass computes.

    token_ids   tokens start .. start+len-1 of the sequence; in the running batch its last token, then drafts
    pages       of the whole sequence
    draws       of a prompt: how each branch's token after the last of them is chosen; empty: none is. In the
                running batch: how the token after each of them is chosen
    prompt      whether they belong to a prefill; otherwise the job is in the running batch
    score       the logprobs that are wanted besides; None: none are
    predicted   the drafts are from the request's prediction
    """

    job: JobId
    token_ids: Seq[int]
    start: int
    pages: Seq[int]
    draws: tuple[Draw, ...]
    prompt: bool
    score: Score | None = None
    predicted: bool = False

    @property
    def end(self) -> int:
        """Return the position after the last token."""
        return self.start + len(self.token_ids)

    @property
    def rows(self) -> Seq[Chunk]:
        """Return the chunk, in the running batch as one chunk for each of its tokens."""
        if self.prompt or len(self.token_ids) == 1:
            return (self,)
        return [
            Chunk(self.job, (token,), self.start + row, self.pages, (draw,), False)
            for row, (token, draw) in enumerate(zip(self.token_ids, self.draws))
        ]


class Step(msgspec.Struct, frozen=True):
    """The next work of a rank.

    now       the time at which it was decided
    admit     waiting jobs that begin
    evict     pages that leave the prefix cache before anything else happens
    preempt   jobs that lose their pages and leave the rank
    grow      pages that the sequences of `chunks` need in addition
    reads, writes, puts   transfers that begin; their ends come back in a later result or in this one
    lands, saves          copies within the rank's memory, done within the step
    ahead     blocks that come in by layers ahead of the pass; None: all are there
    chunks    one forward pass
    steps     forward passes that the step stands for, at most; see leap.py
    later     (number of the pass, from 2 on; page that a sequence needs before it) of a leap
    """

    now: float
    admit: tuple[Admission, ...] = ()
    evict: tuple[int, ...] = ()
    preempt: tuple[JobId, ...] = ()
    grow: tuple[Growth, ...] = ()
    reads: tuple[ReadGroup, ...] = ()
    lands: tuple[LandGroup, ...] = ()
    writes: tuple[WriteGroup, ...] = ()
    saves: tuple[SaveBlock, ...] = ()
    puts: tuple[WritePut, ...] = ()
    ahead: LayerLoad | None = None
    chunks: tuple[Chunk, ...] = ()
    steps: int = 1
    later: tuple[tuple[int, Growth], ...] = ()

    @property
    def only_waits(self) -> bool:
        """Tell whether the rank has nothing to do but wait for transfers."""
        return not (self.admit or self.preempt or self.lands or self.writes or self.saves or self.chunks)


class TransferEnded(msgspec.Struct, frozen=True):
    """A transfer has ended.

    number           of the half, or of the put
    problem          why it failed, "" when it did not
    may_still_land   bytes of a failed transfer may still reach its destination: the pool, or the half
    bad              places that were read and hold other bytes than were put there; it has failed then
    sums             checksums of each block of a WriteGroup, opaque; empty when it failed
    """

    number: int
    problem: str = ""
    may_still_land: bool = False
    bad: Seq[Any] = ()
    sums: Seq[Any] = ()


class Late(msgspec.Struct, frozen=True):
    """What the last stage of a pipeline makes of a chunk, after the result of the chunk's step.

    tokens, logprobs   one for each draw of the chunk; a NO_TOKEN fails the job
    scores             of the targets, if the chunk has a score; opaque
    """

    job: JobId
    tokens: Seq[int] = ()
    logprobs: Seq[Any] = ()
    scores: Seq[Any] = ()


class Fault(msgspec.Struct, frozen=True):
    """A job that the engine cannot compute, although it can compute others.

    code   LOGITS_NOT_FINITE or ENGINE_ERROR
    """

    job: JobId
    code: str
    reason: str


class Result(msgspec.Struct, frozen=True):
    """The outcome of a step.

    tokens      one per draw of the chunks, in their order; of a leap, pass by pass. A draft with NO_TOKEN
                after it is not accepted
    saved       checksums of each of `saves`, in their order; opaque
    halves      transfers of halves that have ended, of this step or of an earlier one
    puts        likewise of puts
    compute_s   seconds of the forward pass
    lost        the failure of `ahead`, whose number is of no meaning: the pass has computed nothing then
    logprobs    of each of `tokens`, opaque; None where the request does not ask for them
    scores      of the targets of each chunk that has a score, in their order; opaque
    late        what earlier passes of a pipeline gave, in place of tokens, logprobs and scores
    passes      (its end, its seconds) of each pass but the last one that a leap has done
    faults      jobs that could not be computed. Their chunks have NO_TOKEN for each draw, and no scores
    """

    step: Step
    tokens: Seq[int] = ()
    saved: Seq[Any] = ()
    halves: Seq[TransferEnded] = ()
    puts: Seq[TransferEnded] = ()
    compute_s: float = 0.0
    logprobs: Seq[Any] = ()
    scores: Seq[Seq[Any]] = ()
    passes: Seq[tuple[float, float]] = ()
    lost: TransferEnded | None = None
    late: Seq[Late] = ()
    faults: Seq[Fault] = ()
