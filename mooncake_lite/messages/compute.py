"""Between the conductor and the ranks that compute: prefill, decode, and blocks that decode gives back.

Explained in docs/lifecycle.md.
"""

from __future__ import annotations

from mooncake_lite.messages.parts import BlockRef, Message, Sampling, Span


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

    keys, digests, tokens   of each block; number numbers this rank's askings
    before                  for each block, the key of the block before it in its prefix (None: it is the
                            first), and how many are before it
    """

    number: int
    rank: int
    keys: list[int]
    digests: list[int]
    tokens: list[list[int]]
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
