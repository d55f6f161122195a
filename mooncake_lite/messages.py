"""Every message between the processes of one cluster, and nothing else.

Sent by the gateway, the conductor (rank 0) and the prefill, decode and store ranks through
`transport.channel`; encoded there (MessagePack, one version byte, a size limit). A message never
carries KV: it names where KV lies (`BlockRef`), and `transport.engine` moves the bytes over MPI.
Explained in docs/lifecycle.md, which follows these messages in their order.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages: a tagged, positional MessagePack array."""


class Plain(msgspec.Struct, frozen=True, array_like=True):
    """Base of the parts of messages."""


# --------------------------------------------------------------------------------------- parts


class Sampling(Plain, frozen=True):
    """How the next token is chosen. Greedy when temperature is 0.

    seed makes the draw of the token at position i a function of (seed, i) alone, so that any
    rank can continue a request and get the same tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


class BlockRef(Plain, frozen=True):
    """One KV object in the pool: `nbytes` at `offset` in the segment of `rank`.

    object_id   the directory's id of this object, unique in the life of a cluster
    """

    object_id: int
    rank: int
    offset: int
    nbytes: int


class Span(Plain, frozen=True):
    """One stage of a request, as measured by the rank that did it (a duration, never a clock time)."""

    stage: str
    rank: int
    seconds: float
    nbytes: int = 0
    count: int = 0


class Metric(Plain, frozen=True):
    """One sample of one metric, in the form that Prometheus wants.

    buckets   histograms only: (upper bound, cumulative count) pairs, the last bound is inf
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: dict[str, str]
    value: float = 0.0
    buckets: list[tuple[float, int]] = []
    sum: float = 0.0


# ------------------------------------------------------------------- gateway -> conductor


class GatewayHello(Message, frozen=True):
    """A gateway presents itself; `token_endpoints` are where ranks send it tokens (ipc first)."""

    gateway: str
    token_endpoints: list[str]


class Submit(Message, frozen=True):
    """A tokenised request.

    token_ids    the whole prompt
    keys         prefix key of each full block of the prompt; empty when reuse is off
    digests      second digest of each full block's tokens, same length as keys
    salt         what the key chain started from; decode ranks continue the chain with it
    stop_ids     token ids that end the answer (the model's end tokens, unless ignore_eos)
    """

    request_id: str
    gateway: str
    token_ids: list[int]
    keys: list[int]
    digests: list[int]
    salt: bytes
    sampling: Sampling
    max_tokens: int
    stop_ids: list[int]


class Cancel(Message, frozen=True):
    """Forget a request: the client left, or a stop string was found by the gateway."""

    request_id: str


class MetricsRequest(Message, frozen=True):
    """Ask the conductor for all metrics of the cluster."""

    number: int


# ------------------------------------------------------------------- conductor -> gateway


class ClusterStatus(Message, frozen=True):
    """Sent when the state changes. `ready` turns true once, when every rank has registered."""

    ready: bool
    detail: str


class Rejected(Message, frozen=True):
    """A request is refused before any work is spent on it."""

    request_id: str
    reason: str
    retry_after_s: float


class Failed(Message, frozen=True):
    """A request that had been accepted cannot be finished."""

    request_id: str
    reason: str


class MetricsReply(Message, frozen=True):
    """All metrics of the cluster, in answer to the MetricsRequest of this number."""

    number: int
    metrics: list[Metric]


class OpenTokens(Message, frozen=True):
    """Some ranks are on other hosts: bind a TCP endpoint on `host` with CURVE, and say hello again."""

    host: str


# --------------------------------------------------------------- prefill, decode -> gateway


class Tokens(Message, frozen=True):
    """Tokens `index .. index+len(token_ids)-1` of a request's answer.

    finish          None while more will come, else "stop" (an end token, not included in
                    token_ids) or "length"
    cached_tokens   prompt tokens whose KV was reused, by tier: {"dram": n, "ssd": m}; only in
                    the message that carries index 0
    spans           where the time went; only in the first and in the last message
    """

    request_id: str
    index: int
    token_ids: list[int]
    finish: str | None = None
    cached_tokens: dict[str, int] = {}
    spans: list[Span] = []


# ------------------------------------------------------------------- conductor <-> ranks


class RankHello(Message, frozen=True):
    """A rank has loaded, compiled and made its segment; sent once.

    pages           KV pages this rank's engine has (0 for a store rank)
    segment_bytes   DRAM that a store rank gives to the pool (0 for the others)
    tier            a store rank with an SSD tier; it says in TierIndex what that holds
    """

    rank: int
    role: str
    node: int
    pages: int = 0
    segment_bytes: int = 0
    tier: bool = False


class GatewayAt(Message, frozen=True):
    """Tells a rank how to reach a gateway; tokens go there directly."""

    gateway: str
    endpoint: str


class Prefill(Message, frozen=True):
    """Conductor -> prefill: compute the KV of a prompt, and its first token.

    load     the KV of the first len(load) * block_tokens tokens, ready in the pool
    store    where the KV of the following full blocks goes
    tail     where the KV of the last, partial block goes (None when there is none)
    answered tokens of the answer that the client has already seen; they are the last ones of
             token_ids, and stand there when a request is resumed after a preemption
    """

    request_id: str
    gateway: str
    token_ids: list[int]
    load: list[BlockRef]
    store: list[BlockRef]
    tail: BlockRef | None
    sampling: Sampling
    max_tokens: int
    stop_ids: list[int]
    answered: int
    cached_tokens: dict[str, int]
    spans: list[Span]


class PrefillDone(Message, frozen=True):
    """Prefill -> conductor: every byte of store and tail is in the pool.

    checksums   one list per object of Prefill.store: XXH3-64 of each layer's range
    finish      set when the first token was already the last one
    """

    request_id: str
    first_token: int
    finish: str | None
    checksums: list[list[int]]
    spans: list[Span]
    seconds: float


class RequestFailed(Message, frozen=True):
    """Prefill or decode -> conductor: this rank gives the request up.

    writing   a transfer failed, so that bytes may still arrive in the pool: its ranges stay unused
    """

    request_id: str
    reason: str
    writing: bool = False


class Decode(Message, frozen=True):
    """Conductor -> decode: load the KV of token_ids[:-1] and continue.

    token_ids    prompt and every token of the answer so far; the KV of the last one is not
                 computed yet
    blocks,tail  where the KV of the others lies, in order
    """

    request_id: str
    gateway: str
    token_ids: list[int]
    answered: int
    blocks: list[BlockRef]
    tail: BlockRef | None
    keys: list[int]
    salt: bytes
    sampling: Sampling
    max_tokens: int
    stop_ids: list[int]
    spans: list[Span]


class DecodeLoaded(Message, frozen=True):
    """Decode -> conductor: the KV is in this rank's pages; the tail and the leases may go."""

    request_id: str
    spans: list[Span]


class DecodeDone(Message, frozen=True):
    """Decode -> conductor: the request has ended and its pages are free."""

    request_id: str
    finish: str
    tokens: int


class Preempted(Message, frozen=True):
    """Decode -> conductor: no page was left. `token_ids` is prompt and answer so far."""

    request_id: str
    token_ids: list[int]
    answered: int


class PutWanted(Message, frozen=True):
    """Decode -> conductor: these blocks became full while decoding; where may they go?

    keys, digests   of each block; number numbers this rank's askings
    before          for each block, the key of the block before it in its prefix, and how many are before it
    """

    number: int
    rank: int
    keys: list[int]
    digests: list[int]
    before: list[tuple[int | None, int]]


class PutGranted(Message, frozen=True):
    """Conductor -> decode: one place per key asked for, None where it is not wanted (already there, full)."""

    number: int
    places: list[BlockRef | None]


class PutEnded(Message, frozen=True):
    """Decode -> conductor: these objects are written, or could not be. checksums as in PrefillDone."""

    object_ids: list[int]
    checksums: list[list[int]]
    failed: list[int] = []


class RankStats(Message, frozen=True):
    """Rank -> conductor, every quarter of a second at most (REPORT_EVERY_S): this rank's metrics."""

    rank: int
    metrics: list[Metric]


class Stop(Message, frozen=True):
    """Conductor -> ranks and gateways, or launcher -> conductor: end within grace_s.

    A rank flushes, answers Stopped, and waits for a second Stop before it leaves MPI, so that nobody spins
    in MPI_Finalize while others flush. lost: a rank is gone; nobody waits for anybody.
    """

    reason: str
    grace_s: float
    lost: bool = False


class Stopped(Message, frozen=True):
    """Rank -> conductor: I have stopped taking work and have flushed. `dropped`: blocks not saved."""

    rank: int
    dropped: int


class RankError(Message, frozen=True):
    """Rank -> conductor: this rank cannot go on."""

    rank: int
    reason: str


# --------------------------------------------------------------------- conductor <-> store


class TierIndex(Message, frozen=True):
    """Store -> conductor, at the start: what its SSD tier holds, hottest last (equal-length lists)."""

    rank: int
    keys: list[int]
    digests: list[int]
    last: bool


class SaveBlocks(Message, frozen=True):
    """Conductor -> store: these objects became visible; write them behind to the tier."""

    refs: list[BlockRef]
    keys: list[int]
    digests: list[int]
    checksums: list[list[int]]


class BlocksSaved(Message, frozen=True):
    """Store -> conductor: what became of blocks that were to be written behind.

    state   "written" to the open segment file, so the DRAM copy is no longer needed; "durable" in a sealed
            one; "dropped": not written (queue or disk full, bad bytes), so DRAM has the only copy
    """

    rank: int
    keys: list[int]
    state: Literal["written", "durable", "dropped"]


class TierEvicted(Message, frozen=True):
    """Store -> conductor: these blocks are no longer in the tier."""

    rank: int
    keys: list[int]
    reason: str


class LoadBlocks(Message, frozen=True):
    """Conductor -> store: read these keys from the tier into the objects allocated for them."""

    number: int
    keys: list[int]
    digests: list[int]
    refs: list[BlockRef]


class BlocksLoaded(Message, frozen=True):
    """Store -> conductor: LoadBlocks is done; `ok[i]` false where a block was bad (a miss, and counted).
    checksums[i] are those verified for block i."""

    number: int
    ok: list[bool]
    checksums: list[list[int]]
    seconds: float


TO_CONDUCTOR = (
    GatewayHello
    | Submit
    | Cancel
    | MetricsRequest
    | RankHello
    | PrefillDone
    | RequestFailed
    | DecodeLoaded
    | DecodeDone
    | Preempted
    | PutWanted
    | PutEnded
    | RankStats
    | RankError
    | Stop
    | Stopped
    | TierIndex
    | BlocksSaved
    | TierEvicted
    | BlocksLoaded
)
TO_GATEWAY = ClusterStatus | Rejected | Failed | MetricsReply | OpenTokens | Stop
TO_GATEWAY_TOKENS = Tokens
TO_PREFILL = Prefill | Cancel | GatewayAt | Stop
TO_DECODE = Decode | Cancel | PutGranted | GatewayAt | Stop
TO_STORE = SaveBlocks | LoadBlocks | Stop
TO_LAUNCHER = ClusterStatus | Stop
