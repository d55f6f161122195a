"""The record of one open request: what was asked, the present try, and its stage. No decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from mooncake_lite.control.effects import BlockRef
from mooncake_lite.control.events import AnswerSoFar, Preempted, RequestArrived, Swapped
from mooncake_lite.control.life import TRANSITIONS, Stage, Step
from scheduler.classes import ServiceClass
from scheduler.requests import Request

if TYPE_CHECKING:
    from scheduler.state import State

BRANCH_MARK = "#"
"""Separates the client's id of a request from the number of a branch that continues alone."""


TERM_SHIFT = 20
"""A request has fewer than 2**20 attempts under one conductor."""


def first_attempt(term: int) -> int:
    """Return the attempt before the first one under a conductor of this number.

    It is larger than all under earlier conductors, so that gateways tell tokens apart.
    """
    return term << TERM_SHIFT


def client_id_of(request_id: str) -> str:
    """Return the id under which a client knows a request, or the request that a branch belongs to."""
    return request_id.partition(BRANCH_MARK)[0]


@dataclass(frozen=True, slots=True)
class Kept:
    """The place of a preempted sequence's KV in the pool.

    owner    the owner in the directory: it leases the public blocks, and owns the others and the tail
    blocks   its full blocks, in order; tail: its partial block, None without one
    """

    owner: str
    blocks: list[BlockRef]
    tail: BlockRef | None

    @property
    def places(self) -> list[BlockRef]:
        """Return all places."""
        return self.blocks if self.tail is None else [*self.blocks, self.tail]


class Shortage(NamedTuple):
    """The space that a request lacked when it did not fit.

    freed         count of `Directory.space` at that time
    least_bytes   that must be free or evictable before it can fit
    next_key      of the first block that it had to compute, if no other request had; None: unknown
    """

    freed: int = -1
    least_bytes: int = 0
    next_key: int | None = None


class Try(Struct, eq=False):
    """What a request does, or waits for: from its place to the loss of it, or from an end to the next place.

    It is replaced, never emptied by hand: what a loss, a preemption or the next start does not pass on is
    gone with it. The default is a request that waits for a place and has nothing.

        prefill, decode ranks, -1 before it is placed
        fetch           its prefix may come from other nodes and from SSD
        most_blocks     of its prefix to be loaded; None: all that there are
        kept            where its KV is after it was swapped out, until it is resumed
        worker          the rank that works on it, or has sent its last token; -1: none
        grant           of the grant that it waits for: a rank's work, an answer of its gateway, a pause
        started_s       when it took its prefill slot; ordered_s: when its prefill was ordered, after loads
        load            blocks of the reused prefix, in order; to_load: how many of these its rank reads
        store           blocks that prefill writes; load + store are all full blocks
        tail            place of the partial block at the end
        cached          tokens that it reuses: {"dram": tokens, "ssd": tokens}
        hinted          decode rank -> blocks of load + store that it can load already, as it was told
        loads           numbers of the LoadBlocks that the request waits for
        promoted        (rank, seconds, bytes, blocks) of each LoadBlocks that has ended
        bad_blocks      number of blocks that did not come from SSD
        shortage        what it lacked when it did not fit into the pool
    """

    prefill: int = -1
    decode: int = -1
    fetch: bool = True
    most_blocks: int | None = None
    kept: Kept | None = None
    worker: int = -1
    grant: int = 0
    started_s: float = 0.0
    ordered_s: float = 0.0
    load: list[BlockRef] = []
    to_load: int = 0
    store: list[BlockRef] = []
    tail: BlockRef | None = None
    cached: dict[str, int] = {}
    hinted: dict[int, int] = {}
    loads: set[int] = set()
    promoted: list[tuple[int, float, int, int]] = []
    bad_blocks: int = 0
    shortage: Shortage = Shortage()

    def again(self, **known: Any) -> Try:
        """Return the next try at the same place, of which so much is known."""
        return Try(self.prefill, self.decode, self.fetch, self.most_blocks, **known)

    @property
    def places(self) -> list[BlockRef]:
        """Return the places that a rank works with for it: what it loads, and what it writes."""
        return [*self.load, *self.written]

    @property
    def written(self) -> list[BlockRef]:
        """Return the places that its prefill writes."""
        return self.store if self.tail is None else [*self.store, self.tail]


@dataclass(slots=True, eq=False)
class RequestRecord:
    """A request between RequestArrived and Forget: what was asked, the present try, and what outlives tries.

        asked           by the client; fixed. The limits on latency are its class's where it named none
        present         the present try

    The rest is neither. It is known or counted over all tries, and the next one goes on from it:

        stage           says what the present try does, and the end of one leads to the next
        num_tokens      tokens to prefill: the prompt, and the answer so far, which the client has
        keys, digests   of the full blocks of these tokens; empty when nothing may be reused
        since_s         when it arrived, or was preempted
        branches        those that have not ended; dropped: those of them that the client does not want
        received        those of them of which the gateway has the last token already
        unheard         branches whose rank has sent the last token, and the gateway has not said so
        attempt         number of starts; answers to an earlier one change nothing, so it never goes back
        resumed         part of its answer has been sent, so it can fail but no longer be refused
        cancelled_as    its outcome once it is cancelled: "finished" when a stop string has ended its answers
        tries           number of tries that have failed; pause_s: before the next one
        losses          of its workers since its client has got a token, see requests.MOST_LOSSES
        lost_by         why the last of them was lost
        avoids_ssd      computes what is on SSD alone: a disk did not answer, and may not answer again

    Owner of all its pool objects and leases in the directory: request_id. Its place in a queue is kept in
    `State`, by the same name.
    """

    request_id: str
    asked: RequestArrived
    num_tokens: int
    keys: list[int]
    digests: list[int]
    since_s: float
    branches: set[int]
    attempt: int = 0
    resumed: bool = False
    stage: Stage = Stage.HELD
    present: Try = field(default_factory=Try)
    dropped: set[int] = field(default_factory=set)
    received: set[int] = field(default_factory=set)
    unheard: set[int] = field(default_factory=set)
    cancelled_as: str = "cancelled"
    tries: int = 0
    pause_s: float = 0.0
    losses: int = 0
    lost_by: str = ""
    avoids_ssd: bool = False

    @classmethod
    def of(cls, asked: RequestArrived, service: ServiceClass, now: float, attempt: int = 0) -> RequestRecord:
        """Make the record of a request that has just arrived. service: its class; attempt: before its
        first one."""
        ttft_s = asked.slo_ttft_s if asked.slo_ttft_s < inf else service.slo_ttft_s
        tbt_s = asked.slo_tbt_s if asked.slo_tbt_s < inf else service.slo_tbt_s
        return cls(
            asked.request_id, replace(asked, slo_ttft_s=ttft_s, slo_tbt_s=tbt_s), asked.num_tokens,
            asked.keys, asked.digests, now - asked.waited_s, set(range(asked.n)), attempt,
        )  # fmt: skip

    def id_alone(self, branch: int) -> str:
        """Return the id under which a branch goes on once it has lost its pages."""
        return self.request_id if self.asked.n == 1 else f"{self.request_id}{BRANCH_MARK}{branch}"

    def branched(
        self, event: Preempted | Swapped | AnswerSoFar, now: float, kept: Kept | None = None
    ) -> RequestRecord:
        """Make the record of a branch that goes on alone. Its attempts count on, so that no token is taken
        for one of an earlier attempt."""
        name = self.id_alone(event.branch)
        asked = replace(self.asked, request_id=name, n=1)
        alone = RequestRecord(
            name, asked, 0, [], [], now, {event.branch}, self.attempt, True, present=Try(kept=kept)
        )
        alone.go_on_from(event, now)
        return alone

    def go_on_from(self, event: Preempted | Swapped | AnswerSoFar, now: float) -> None:
        """Take over the tokens that are to be prefilled: the prompt, and the answer so far."""
        before = self.asked.num_tokens if isinstance(event, AnswerSoFar) else 0
        self.since_s = now if event.num_tokens else self.since_s
        num_tokens = before + event.num_tokens
        self.losses = self.losses if num_tokens <= self.num_tokens else 0
        self.num_tokens = num_tokens
        self.keys, self.digests = event.keys, event.digests

    @property
    def ended(self) -> set[int]:
        """Return those of several branches that have ended, or go on alone."""
        return set(range(self.asked.n)) - self.branches if self.asked.n > 1 else set()

    def may(self, step: Step) -> bool:
        """Tell whether this step can happen in the current stage."""
        return (self.stage, step) in TRANSITIONS

    def move(self, step: Step) -> None:
        """Move to the next stage. An impossible step is a bug of ours and raises KeyError."""
        self.stage = TRANSITIONS[self.stage, step]

    def as_request(self, state: State, block_tokens: int) -> Request:
        """Return the part of the record that policies may see, with the predicted rest of its answer."""
        asked = self.asked
        predicted = state.costs.lengths.predicted(
            asked.class_id, asked.num_tokens, asked.max_tokens, self.num_tokens - asked.num_tokens
        )
        return Request(
            self.request_id, self.num_tokens, self.keys, block_tokens, asked.max_tokens, asked.class_id,
            asked.wait_limit_s, asked.n, asked.tenant, asked.slo_ttft_s, asked.slo_tbt_s, self.since_s,
            predicted,
        )  # fmt: skip
