"""Between the conductor and the ranks that compute: prefill, decode or both, and blocks given to the pool.

`attempt` numbers the tries of one request: a rank copies it from the job into every answer. `epoch` numbers
the lives of a rank. An answer of another attempt or epoch is out of date.
Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

from mooncake_lite.messages.parts import BlockRef, Message, Plain, Sampling, Span


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
    keys     prefix key of each full block of token_ids; salt: start of the chain. Both empty: no reuse
    n        number of first tokens to draw, one per branch
    branch   number of the first branch
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
    attempt: int = 0
    keys: list[int] = []
    salt: bytes = b""
    n: int = 1
    branch: int = 0


class PrefillDone(Message, frozen=True):
    """Prefill -> conductor: every byte of store and tail is in the pool.

    checksums   one list per object of Prefill.store: XXH3-64 of each layer's range
    first_tokens, finishes   of each branch; finish is set when the first token was already the last one
    compute_s   time of the forward passes alone; load_s, store_s: until all KV was in the pages, and from the
                first token until all KV was in the pool
    computed_tokens   of the prompt, not reused
    loaded_blocks     blocks that load_s was spent on: the last ones of Prefill.load
    """

    request_id: str
    first_tokens: list[int]
    finishes: list[str | None]
    checksums: list[list[int]]
    spans: list[Span]
    compute_s: float
    load_s: float = 0.0
    store_s: float = 0.0
    attempt: int = 0
    epoch: int = 0
    computed_tokens: int = 0
    loaded_blocks: int = 0


class RequestFailed(Message, frozen=True):
    """Any of these ranks -> conductor: this rank gives the request up.

    writing   a transfer failed, and its bytes may still arrive in the pool: its ranges stay unused
    """

    request_id: str
    reason: str
    writing: bool = False
    attempt: int = 0
    epoch: int = 0


class Answer(Plain, frozen=True):
    """A branch of a request, and the tokens of its answer so far."""

    branch: int
    token_ids: list[int]


class Decode(Message, frozen=True):
    """Conductor -> decode: load the KV of token_ids[:-1] and continue.

    token_ids    prompt and every token of the answer so far; the KV of the last one is not
                 computed yet
    blocks,tail  where the KV of the others lies, in order
    branch       number of the one branch
    answers      instead of it, several branches: token_ids is then the prompt, and all of its KV is loaded
    offers       whether blocks that are filled while decoding are offered to the pool
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
    attempt: int = 0
    branch: int = 0
    answers: list[Answer] = []
    offers: bool = True


class Serve(Message, frozen=True):
    """Conductor -> compute: compute a prompt and decode its answer, on this rank alone.

    token_ids    prompt and every token of the answer so far
    load         the KV of the first len(load) * block_tokens tokens, ready in the pool
    offers       whether full blocks that are not in `load` are offered to the pool
    answered, keys, salt, n, branch   as in Prefill
    """

    request_id: str
    gateway: str
    token_ids: list[int]
    load: list[BlockRef]
    offers: bool
    sampling: Sampling
    max_tokens: int
    stop_ids: list[int]
    answered: int
    cached_tokens: dict[str, int]
    spans: list[Span]
    attempt: int = 0
    keys: list[int] = []
    salt: bytes = b""
    n: int = 1
    branch: int = 0


class PromptComputed(Message, frozen=True):
    """Compute -> conductor: the prompt of a Serve is computed and its first token drawn; leases may go.

    computed_tokens   prompt tokens that were computed; compute_s: time of the forward passes for them
    load_s, loaded_blocks   as in PrefillDone
    """

    request_id: str
    computed_tokens: int
    compute_s: float
    attempt: int = 0
    epoch: int = 0
    load_s: float = 0.0
    loaded_blocks: int = 0


class DecodeLoaded(Message, frozen=True):
    """Decode -> conductor: the KV is in this rank's pages; the tail and the leases may go.

    load_s          until all KV was in the pages
    loaded_blocks   blocks that it was spent on: the last ones of Decode.blocks and tail
    """

    request_id: str
    attempt: int = 0
    epoch: int = 0
    load_s: float = 0.0
    loaded_blocks: int = 0


class DecodeDone(Message, frozen=True):
    """Decode or compute -> conductor: a branch of the request has ended and its pages are free.

    answer_tokens   tokens of its whole answer; 0 if it was cancelled
    steps, sequences, context_tokens, steps_s   decode steps of this rank since its last DecodeDone: their
                    number, and sums over them of the batch, the context and the seconds
    """

    request_id: str
    attempt: int = 0
    epoch: int = 0
    branch: int = 0
    answer_tokens: int = 0
    steps: int = 0
    sequences: int = 0
    context_tokens: int = 0
    steps_s: float = 0.0


class Preempted(Message, frozen=True):
    """Decode or compute -> conductor: no page was left. `token_ids` is prompt and answer of the branch.

    writing   a swap failed, and its bytes may still arrive in the pool: its ranges stay unused
    """

    request_id: str
    token_ids: list[int]
    answered: int
    attempt: int = 0
    epoch: int = 0
    branch: int = 0
    writing: bool = False


class SwapWanted(Message, frozen=True):
    """Decode or compute -> conductor: no page is left; where in the pool can the KV of this branch go?

    num_tokens      tokens whose KV this rank has
    keys, digests   of their full blocks; empty when nothing may be reused
    """

    request_id: str
    num_tokens: int
    keys: list[int]
    digests: list[int]
    attempt: int = 0
    epoch: int = 0
    branch: int = 0


class SwapGranted(Message, frozen=True):
    """Conductor -> decode or compute: where the KV of this branch goes, or that it has to be given up.

    places   one per block, the partial one too: None where the pool has the block. None: there is no space
    """

    request_id: str
    attempt: int
    branch: int
    places: list[BlockRef | None] | None


class Swapped(Message, frozen=True):
    """Decode or compute -> conductor: the pool has all KV of this branch, and its pages are free.

    token_ids   prompt and answer so far; the KV of the last token is not computed yet
    """

    request_id: str
    token_ids: list[int]
    answered: int
    attempt: int = 0
    epoch: int = 0
    branch: int = 0


class PutWanted(Message, frozen=True):
    """Decode or compute -> conductor: these blocks have become full; where may they go?

    keys, digests, tokens   of each block; number numbers this rank's askings
    before                  for each block, the key of the block before it in its prefix (None: it is the
                            first), and how many are before it
    requests                of each block: the one that filled it
    """

    number: int
    rank: int
    keys: list[int]
    digests: list[int]
    tokens: list[list[int]]
    before: list[tuple[int | None, int]]
    epoch: int = 0
    requests: list[str] = []


class PutGranted(Message, frozen=True):
    """Conductor -> decode: one place per key asked for, None where it is not wanted (already there, full)."""

    number: int
    places: list[BlockRef | None]


class PagesHeld(Message, frozen=True):
    """Prefill or compute -> conductor: blocks that came into the rank's pages, and those that left them.

    Sent once per step. A hint, without a promise: the pages may be evicted before a request comes.
    """

    stored: list[int]
    removed: list[int]
    epoch: int = 0


class ForgetPages(Message, frozen=True):
    """Conductor -> prefill, decode or compute: reuse nothing that lies in pages now."""


class PutEnded(Message, frozen=True):
    """Decode -> conductor: these objects are written, or could not be.

    checksums         of object_ids, as in PrefillDone
    failed            objects that could not be written
    may_still_write   bytes may still arrive in the ranges of failed
    """

    object_ids: list[int]
    checksums: list[list[int]]
    failed: list[int] = []
    may_still_write: bool = False
    epoch: int = 0
