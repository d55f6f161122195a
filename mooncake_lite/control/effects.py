"""Effects: the only output of the control plane. The conductor sends them to ranks and gateways.

One struct serves on the wire, in a recording and in the simulator. An order that needs tokens travels with
them; see `mooncake_lite.messages`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

import msgspec

from mooncake_lite.control.message import Message
from scheduler import Terms
from store.objects import BlockRef, BlockRemoved, BlockStored


class Action(Message, frozen=True):
    """Base of all effects but BlockStored and BlockRemoved."""


# ------------------------------------------------------------------------------ to clients


class Reject(Action, frozen=True):
    """Refuse a request (HTTP 429): before any work is spent on it, unless admission is after-prefill."""

    request_id: str
    reason: str
    retry_after_s: float


class Fail(Action, frozen=True):
    """Tell the client why its request cannot be finished."""

    request_id: str
    reason: str


class Forget(Action, frozen=True):
    """End a request. Exactly one Forget follows each RequestArrived.

    outcome   "rejected", "failed", "cancelled" or "finished"
    """

    request_id: str
    outcome: str


class Decided(Action, frozen=True):
    """Report that a policy has placed a request. terms: the numbers that explain the choice."""

    request_id: str
    attempt: int
    prefill: int
    decode: int
    cached_tokens: int
    terms: Terms


class Release(Action, frozen=True):
    """Let a client have its tokens: from here on the request can no longer be refused.

    Only where admission withholds the first token; see scheduler.admission.
    """

    request_id: str


class Moved(Action, frozen=True):
    """Report that a request decodes elsewhere than was decided. tbt_s: predicted between tokens."""

    request_id: str
    attempt: int
    decode: int
    tbt_s: float


# ------------------------------------------------------------------------------ to compute ranks


class Branched(Action, frozen=True):
    """Report that a branch of a request goes on as a request of its own, under this name.

    It has lost its pages, and its siblings have not. A Forget of its own follows.
    """

    request_id: str
    branch: int
    name: str


class Retried(Action, frozen=True):
    """A try of a request has failed: its prompt is computed again, and first tokens are drawn again.

    The gateway passes on no token twice.
    """

    request_id: str
    attempt: int
    reason: str


class StartPrefill(Action, frozen=True):
    """Have a prompt prefilled.

    load        places of the KV of the first blocks, ready in the pool
    store       places for the KV of the full blocks after them
    tail        place for the KV of the partial block at the end, None without one
    cached      reused prompt tokens by tier: {"dram": n, "ssd": m}
    queued_s    seconds since the request arrived or was preempted
    promoted    (rank, seconds, bytes, blocks) of each LoadBlocks that the request waited for
    reads       whether to read `load`, where the rank's pages lack it; otherwise computing is faster
    """

    rank: int
    request_id: str
    attempt: int
    load: list[BlockRef]
    store: list[BlockRef]
    tail: BlockRef | None
    cached: dict[str, int]
    queued_s: float
    promoted: list[tuple[int, float, int, int]]
    reads: bool = True


class StartDecode(Action, frozen=True):
    """Have a prefilled request decoded. blocks: its full blocks in their order; tail as in StartPrefill.

    branches   that go on after their first token
    """

    rank: int
    request_id: str
    attempt: int
    blocks: list[BlockRef]
    tail: BlockRef | None
    branches: list[int]


class StartServe(Action, frozen=True):
    """Have a prompt computed and its answer decoded by one rank.

    load        places of the KV of the first blocks, ready in the pool, leased until PromptComputed
    cached      reused prompt tokens by tier: {"dram": n, "ssd": m}
    queued_s    seconds since the request arrived or was preempted
    promoted    (rank, seconds, bytes, blocks) of each LoadBlocks that the request waited for
    reads       whether to read `load`, where the rank's pages lack it; otherwise computing is faster
    """

    rank: int
    request_id: str
    attempt: int
    load: list[BlockRef]
    cached: dict[str, int]
    queued_s: float
    promoted: list[tuple[int, float, int, int]]
    reads: bool = True


StartOrder = StartPrefill | StartDecode | StartServe
"""Orders that begin work on a request."""


class CancelOn(Action, frozen=True):
    """Have a rank drop a request, or one branch of it. The rank answers with the end of what it drops.

    branch   -1: all
    """

    rank: int
    request_id: str
    attempt: int
    branch: int = -1


class ForgetPages(Action, frozen=True):
    """Have a compute rank reuse nothing that lies in its pages now."""

    rank: int


class ListOpen(Action, frozen=True):
    """Ask a compute rank what it works on. OpenListed answers under the same number."""

    rank: int
    number: int


class GrantPuts(Action, frozen=True):
    """Answer PutsWanted with one place per key, None where the block is not wanted."""

    rank: int
    number: int
    places: list[BlockRef | None]


class GrantSwap(Action, frozen=True):
    """Answer SwapWanted.

    places   one per block, the partial one too: None where the pool has the block. None: there is no space
    """

    rank: int
    request_id: str
    attempt: int
    branch: int
    places: list[BlockRef | None] | None


# ------------------------------------------------------------------------------ to store ranks


class LoadBlocks(Action, frozen=True):
    """Have blocks read from the tier of a rank into the places of `refs`, all in one segment."""

    rank: int
    number: int
    keys: list[int]
    digests: list[int]
    refs: list[BlockRef]


class SaveBlocks(Action, frozen=True):
    """Have visible blocks written behind to the tier of a rank."""

    rank: int
    refs: list[BlockRef]
    keys: list[int]
    digests: list[int]
    checksums: list[list[int]]


class CopyBlocks(Action, frozen=True):
    """Have a store rank read blocks of other ranks into its own segment, one to one."""

    rank: int
    number: int
    sources: list[BlockRef]
    targets: list[BlockRef]


class CheckBlocks(Action, frozen=True):
    """Have a store rank compare blocks with their checksums.

    command   the pool command that needs the comparison
    path      file that the rank writes the bytes of the only block to; "" for none
    """

    rank: int
    number: int
    command: int
    refs: list[BlockRef]
    checksums: list[list[int]]
    path: str = ""


class RemoveBlocks(Action, frozen=True):
    """Have keys removed from the tier of a rank for good. Keys that it does not have are ignored."""

    rank: int
    keys: list[int]


class CompactTier(Action, frozen=True):
    """Have those files of a tier rewritten that are small or half dead."""

    rank: int


# ------------------------------------------------------------------------------ everything else


class DamagedBlock(msgspec.Struct, frozen=True, array_like=True):
    """A visible block whose bytes differ from those that were put."""

    object_id: int
    key: int
    rank: int
    nbytes: int


class AnswerCommand(Action, frozen=True):
    """Report the progress or the end of a pool command to its sender.

    ended    whether the command is over
    problem  why it failed, or ""
    done     blocks compared so far; nbytes: bytes compared since the last answer; bad: blocks that differ
    blocks   number of blocks removed or pinned; kept: number not removed because they are in use
    """

    command: int
    ended: bool
    problem: str = ""
    done: int = 0
    nbytes: int = 0
    bad: list[DamagedBlock] = []
    blocks: int = 0
    kept: int = 0


class Readiness(Action, frozen=True):
    """Report whether the cluster accepts requests, and which ranks are missing."""

    ready: bool
    missing: list[int]


class WakeAt(Action, frozen=True):
    """Ask for a Tick at this time or soon after. A later WakeAt replaces an earlier one."""

    time: float


class Stop(Action, frozen=True):
    """End the cluster within grace_s. lost: a rank or a gateway is gone, and no rank waits for another.

    A rank that gets it flushes, answers Stopped, and waits for a second Stop before it leaves MPI, so that no
    rank spins in MPI_Finalize while others flush.
    """

    reason: str
    grace_s: float
    lost: bool = False


Order = (
    StartOrder | CancelOn | ForgetPages | ListOpen | GrantPuts | GrantSwap | LoadBlocks | SaveBlocks
    | CopyBlocks | CheckBlocks | RemoveBlocks | CompactTier
)  # fmt: skip
"""Effects that are sent to one rank. Undelivered returns an order that could not be sent."""

Effect = (
    Order | Reject | Fail | Forget | Decided | Release | Moved | Branched | Retried | AnswerCommand
    | Readiness | WakeAt | Stop | BlockStored | BlockRemoved
)  # fmt: skip
"""Everything that `Control.on` returns. BlockStored and BlockRemoved are the directory's own events."""
