"""The record of one open request: plain data and its stage, no decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from mooncake_lite.control.effects import BlockRef
from mooncake_lite.control.events import AnswerSoFar, Preempted, RequestArrived, Swapped
from mooncake_lite.control.life import TRANSITIONS, Stage, Step
from scheduler import Request, State
from scheduler.classes import ServiceClass

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


@dataclass(slots=True, eq=False)
class RequestRecord:
    """A request between RequestArrived and Forget.

        num_tokens      tokens to prefill: the prompt, and, after a preemption, the answer so far
        prompt_tokens   of these, tokens of the prompt
        keys, digests   of the full blocks of these tokens; empty when nothing may be reused
        attempt         number of starts; answers to an earlier one change nothing
        n               answers to the one prompt
        branches        those that have not ended; dropped: those of them that the client does not want
        received        those of them of which the gateway has the last token already
        unheard         branches whose rank has sent the last token, and the gateway has not said so
        cancelled_as    its outcome once it is cancelled: "finished" when a stop string has ended its answers
        resumed         part of its answer has been sent, so it can fail but no longer be refused
        since_s         when it arrived, or was preempted
        started_s       when it took its prefill slot; ordered_s: when its prefill was ordered, after loads
        class_id        service class; tenant: that sent it
        slo_ttft_s, slo_tbt_s   limits that the client or the class asks for; inf: none
        prefill, decode ranks, -1 before it is placed
        fetch           its prefix may come from other nodes and from SSD
        most_blocks     of its prefix to be loaded; None: all that there are
        worker          the rank that works on it, -1 when none does
        load            blocks of the reused prefix, in order; to_load: how many of these its rank reads
        store           blocks that prefill writes; load + store are all full blocks
        tail            place of the partial block at the end
        hinted          blocks of load + store that its decode rank can load already, as it was told
        kept            where its KV is after it was swapped out, until it is resumed
        loads           numbers of the LoadBlocks that the request waits for
        promoted        (rank, seconds, bytes, blocks) of each LoadBlocks that has ended
        bad_blocks      number of blocks that did not come from SSD
        avoids_ssd      computes what is on SSD alone: a disk did not answer
        tries           number of tries that have failed; pause_s: before the next one
        losses          of its workers since its client has got a token, see requests.MOST_LOSSES
        lost_by         why the last of them was lost
        grant           of the grant that it waits for: a rank's work, an answer of its gateway, a pause
        gateway         that has the client's connection
        shortage        what it lacked when it last did not fit

    Owner of all its pool objects and leases in the directory: request_id.
    """

    request_id: str
    num_tokens: int
    max_tokens: int
    keys: list[int]
    digests: list[int]
    class_id: int
    wait_limit_s: float
    since_s: float
    n: int
    branches: set[int]
    tenant: str
    slo_ttft_s: float
    slo_tbt_s: float
    stage: Stage = Stage.HELD
    attempt: int = 0
    resumed: bool = False
    dropped: set[int] = field(default_factory=set)
    received: set[int] = field(default_factory=set)
    unheard: set[int] = field(default_factory=set)
    cancelled_as: str = "cancelled"
    prefill: int = -1
    fetch: bool = True
    most_blocks: int | None = None
    decode: int = -1
    worker: int = -1
    load: list[BlockRef] = field(default_factory=list)
    to_load: int = 0
    store: list[BlockRef] = field(default_factory=list)
    tail: BlockRef | None = None
    hinted: int = 0
    kept: Kept | None = None
    cached: dict[str, int] = field(default_factory=dict)
    loads: set[int] = field(default_factory=set)
    promoted: list[tuple[int, float, int, int]] = field(default_factory=list)
    bad_blocks: int = 0
    avoids_ssd: bool = False
    tries: int = 0
    pause_s: float = 0.0
    losses: int = 0
    lost_by: str = ""
    gateway: str = ""
    grant: int = 0
    prompt_tokens: int = 0
    started_s: float = 0.0
    ordered_s: float = 0.0
    shortage: Shortage = field(default_factory=Shortage)

    @classmethod
    def of(cls, event: RequestArrived, service: ServiceClass, now: float, attempt: int = 0) -> RequestRecord:
        """Make the record of a request that has just arrived. service: its class; attempt: before its
        first one."""
        return cls(
            event.request_id, event.num_tokens, event.max_tokens, event.keys, event.digests, event.class_id,
            event.wait_limit_s, now - event.waited_s, event.n, set(range(event.n)), event.tenant,
            event.slo_ttft_s if event.slo_ttft_s < inf else service.slo_ttft_s,
            event.slo_tbt_s if event.slo_tbt_s < inf else service.slo_tbt_s,
            prompt_tokens=event.num_tokens, gateway=event.gateway, attempt=attempt,
        )  # fmt: skip

    def id_alone(self, branch: int) -> str:
        """Return the id under which a branch goes on once it has lost its pages."""
        return self.request_id if self.n == 1 else f"{self.request_id}{BRANCH_MARK}{branch}"

    def branched(self, event: Preempted | Swapped | AnswerSoFar, now: float) -> RequestRecord:
        """Make the record of a branch that goes on alone. Its attempts count on, so that no token is taken
        for one of an earlier attempt."""
        alone = RequestRecord(
            self.id_alone(event.branch), 0, self.max_tokens, [], [], self.class_id, self.wait_limit_s, now, 1,
            {event.branch}, self.tenant, self.slo_ttft_s, self.slo_tbt_s, attempt=self.attempt, resumed=True,
            prompt_tokens=self.prompt_tokens, gateway=self.gateway,
        )  # fmt: skip
        alone.go_on_from(event, now)
        return alone

    def go_on_from(self, event: Preempted | Swapped | AnswerSoFar, now: float) -> None:
        """Take over the tokens that are to be prefilled: the prompt, and the answer so far."""
        before = self.prompt_tokens if isinstance(event, AnswerSoFar) else 0
        self.since_s = now if event.num_tokens else self.since_s
        num_tokens = before + event.num_tokens
        self.losses = self.losses if num_tokens <= self.num_tokens else 0
        self.num_tokens = num_tokens
        self.keys, self.digests = event.keys, event.digests

    @property
    def ended(self) -> set[int]:
        """Return those of several branches that have ended, or go on alone."""
        return set(range(self.n)) - self.branches if self.n > 1 else set()

    @property
    def client_id(self) -> str:
        """Return the id under which the client knows this request."""
        return client_id_of(self.request_id)

    def reset(self) -> None:
        """Forget everything allocated, leased or under way."""
        self.worker = -1
        self.load, self.store, self.tail, self.kept, self.cached = [], [], None, None, {}
        self.loads, self.promoted = set(), []
        self.bad_blocks = self.grant = self.hinted = self.to_load = 0

    @property
    def places(self) -> list[BlockRef]:
        """Return the places that a rank works with for it: what it loads, and what it writes."""
        return [*self.load, *self.written]

    @property
    def written(self) -> list[BlockRef]:
        """Return the places that its prefill writes."""
        return self.store if self.tail is None else [*self.store, self.tail]

    def may(self, step: Step) -> bool:
        """Tell whether this step can happen in the current stage."""
        return (self.stage, step) in TRANSITIONS

    def move(self, step: Step) -> None:
        """Move to the next stage. An impossible step is a bug of ours and raises KeyError."""
        self.stage = TRANSITIONS[self.stage, step]

    def as_request(self, state: State, block_tokens: int) -> Request:
        """Return the part of the record that policies may see, with the predicted rest of its answer."""
        predicted = state.costs.lengths.predicted(
            self.class_id, self.prompt_tokens, self.max_tokens, self.num_tokens - self.prompt_tokens
        )
        return Request(
            self.request_id, self.num_tokens, self.keys, block_tokens, self.max_tokens, self.class_id,
            self.wait_limit_s, self.n, self.tenant, self.slo_ttft_s, self.slo_tbt_s, self.since_s, predicted,
        )  # fmt: skip
