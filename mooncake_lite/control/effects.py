"""Effects: the only output of the control plane. The conductor sends them to ranks and gateways.

One struct serves on the wire, in a recording and in the simulator. An order that needs tokens travels with
them; see `mooncake_lite.messages`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from mooncake_lite.control.message import Message
from scheduler import Terms
from store.objects import BlockRef, BlockRemoved, BlockStored, HeldBlock


class Action(Message, frozen=True):
    """Base of all effects but BlockStored and BlockRemoved."""


class RequestAction(Action, frozen=True):
    """Base of what clients, gateways and traces hear about a request."""

    request_id: str


class RankOrder(Action, frozen=True):
    """Base of the orders to one rank."""

    rank: int


class RequestOrder(RankOrder, frozen=True):
    """Base of the orders about a request. attempt: counts its tries; events of another one are ignored."""

    request_id: str
    attempt: int


# ------------------------------------------------------------------------------ to clients


Refusal = Literal["overload", "unavailable"]
"""Why a request is refused: there are too many (HTTP 429), or the cluster cannot serve any (HTTP 503)."""


class Reject(RequestAction, frozen=True):
    """Refuse a request: before any work is spent on it, unless admission is after-prefill."""

    reason: str
    retry_after_s: float
    kind: Refusal = "overload"


class Fail(RequestAction, frozen=True):
    """Tell the client why its request cannot be finished.

    code   "ranks_lost", or that of a scheduler.instance.Fault; "" for another reason
    """

    reason: str
    code: str = ""


class Forget(RequestAction, frozen=True):
    """End a request. Exactly one Forget follows each RequestArrived.

    outcome   "rejected", "failed", "cancelled" or "finished"
    """

    outcome: str


class Decided(RequestAction, frozen=True):
    """Report that a policy has placed a request. terms: the numbers that explain the choice."""

    attempt: int
    prefill: int
    decode: int
    cached_tokens: int
    terms: Terms


class Release(RequestAction, frozen=True):
    """Let a client have its tokens: from here on the request can no longer be refused.

    Only where admission withholds the first token; see scheduler.admission.
    """


class Moved(RequestAction, frozen=True):
    """Report that a request decodes elsewhere than was decided. tbt_s: predicted between tokens."""

    attempt: int
    decode: int
    tbt_s: float


class Branched(RequestAction, frozen=True):
    """Report that a branch of a request goes on as a request of its own, under this name.

    It has lost its pages, and its siblings have not. A Forget of its own follows.
    """

    branch: int
    name: str


class Recall(RequestAction, frozen=True):
    """Ask a gateway for the answer so far of these branches: what their rank was doing is lost.

    Recalled answers it. From then on the gateway drops tokens of this attempt and of earlier ones.
    """

    attempt: int
    branches: list[int]
    reason: str


# ------------------------------------------------------------------------------ to compute ranks


class StartPrefill(RequestOrder, frozen=True):
    """Have a prompt prefilled.

    load        places of the KV of the first blocks, ready in the pool
    store       places for the KV of the full blocks after them
    tail        place for the KV of the partial block at the end, None without one
    cached      reused prompt tokens by tier: {"dram": n, "ssd": m}
    queued_s    seconds since the request arrived or was preempted
    promoted    (rank, seconds, bytes, blocks) of each LoadBlocks that the request waited for
    reads       whether to read `load`, where the rank's pages lack it; otherwise computing is faster
    """

    load: list[BlockRef]
    store: list[BlockRef]
    tail: BlockRef | None
    cached: dict[str, int]
    queued_s: float
    promoted: list[tuple[int, float, int, int]]
    reads: bool = True


class StartDecode(RequestOrder, frozen=True):
    """Have a prefilled request decoded. blocks: its full blocks in their order; tail as in StartPrefill.

    branches   that go on after their first token
    """

    blocks: list[BlockRef]
    tail: BlockRef | None
    branches: list[int]


class StartServe(RequestOrder, frozen=True):
    """Have a prompt computed and its answer decoded by one rank.

    load        places of the KV of the first blocks, ready in the pool, leased until PromptComputed
    cached      reused prompt tokens by tier: {"dram": n, "ssd": m}
    queued_s    seconds since the request arrived or was preempted
    promoted    (rank, seconds, bytes, blocks) of each LoadBlocks that the request waited for
    reads       whether to read `load`, where the rank's pages lack it; otherwise computing is faster
    """

    load: list[BlockRef]
    cached: dict[str, int]
    queued_s: float
    promoted: list[tuple[int, float, int, int]]
    reads: bool = True


class Prefetch(RequestOrder, frozen=True):
    """Tell a decode rank which blocks of a prompt it can load while the rest is computed.

    A hint: it may be lost, has no answer, and holds no lease. The rank compares each block with its check.

    blocks   the first full blocks, in order; num_tokens: tokens that they hold
    """

    blocks: list[BlockRef]
    num_tokens: int


StartOrder = StartPrefill | StartDecode | StartServe
"""Orders that begin work on a request."""


class CancelOn(RequestOrder, frozen=True):
    """Have a rank drop a request, or one branch of it. The rank answers with the end of what it drops.

    branch   -1: all
    """

    branch: int = -1


class ForgetPages(RankOrder, frozen=True):
    """Have a compute rank reuse nothing that lies in its pages now."""


class ListOpen(RankOrder, frozen=True):
    """Ask a compute rank what it works on. OpenListed answers under the same number."""

    number: int


class GrantPuts(RankOrder, frozen=True):
    """Answer PutsWanted with one place per key, None where the block is not wanted."""

    number: int
    places: list[BlockRef | None]


class GrantSwap(RequestOrder, frozen=True):
    """Answer SwapWanted.

    places   one per block, the partial one too: None where the pool has the block. None: there is no space
    """

    branch: int
    places: list[BlockRef | None] | None


# ------------------------------------------------------------------------------ to store ranks


class LoadBlocks(RankOrder, frozen=True):
    """Have blocks read from the tier of a rank into the places of `refs`, all in one segment."""

    number: int
    keys: list[int]
    digests: list[int]
    refs: list[BlockRef]


class HoldBlocks(RankOrder, frozen=True):
    """Have a store rank remember what has become visible in its segment, or in one that it keeps.

    It tells a later conductor in Inventory.
    """

    blocks: list[HeldBlock]


class SaveBlocks(RankOrder, frozen=True):
    """Have visible blocks written behind to the tier of a rank."""

    refs: list[BlockRef]
    keys: list[int]
    digests: list[int]
    checksums: list[list[int]]


class CopyBlocks(RankOrder, frozen=True):
    """Have a store rank read blocks of other ranks into its own segment, one to one."""

    number: int
    sources: list[BlockRef]
    targets: list[BlockRef]


class CheckBlocks(RankOrder, frozen=True):
    """Have a store rank compare blocks with their checksums.

    command   the pool command that needs the comparison
    path      file that the rank writes the bytes of the only block to; "" for none
    """

    number: int
    command: int
    refs: list[BlockRef]
    checksums: list[list[int]]
    path: str = ""


class RemoveBlocks(RankOrder, frozen=True):
    """Have keys removed from the tier of a rank for good. Keys that it does not have are ignored."""

    keys: list[int]


class CompactTier(RankOrder, frozen=True):
    """Have those files of a tier rewritten that are small or half dead."""


# ------------------------------------------------------------------------------ everything else


class MarkLost(Action, frozen=True):
    """Tell ranks and gateways that a rank is lost. Transfers with it fail at once from then on."""

    rank: int
    reason: str


class EndRank(Action, frozen=True):
    """Have the process of a rank killed. RankLost follows."""

    rank: int
    reason: str


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


HintOutcome = Literal["accepted", "clipped", "deferred", "rejected"]
"""What becomes of a hint: all of it, only the first blocks of its prefix, all of it later, or nothing."""


class HintAnswered(Action, frozen=True):
    """Tell a gateway what became of a hint.

    blocks    of the prefix; affected: how many of them the hint applies to, the first ones
    lasts_s   seconds for which they are retained or pinned, or until a prefetch begins; 0.0: neither
    reason    what was done, or why not, in one line
    """

    hint_id: str
    gateway: str
    outcome: HintOutcome
    blocks: int
    affected: int
    lasts_s: float
    reason: str


class Readiness(Action, frozen=True):
    """Report whether the cluster was ready once, which ranks are missing, and whether it serves.

    closed   why requests that come now will not be served, because of lost ranks; "" while they will
    """

    ready: bool
    missing: list[int]
    closed: str = ""


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
    StartOrder | Prefetch | CancelOn | ForgetPages | ListOpen | GrantPuts | GrantSwap | LoadBlocks
    | SaveBlocks | CopyBlocks | CheckBlocks | RemoveBlocks | CompactTier | HoldBlocks
)  # fmt: skip
"""Effects that are sent to one rank. Undelivered returns an order that could not be sent."""

Effect = (
    Order | Reject | Fail | Forget | Decided | Release | Moved | Branched | Recall | MarkLost | EndRank
    | AnswerCommand | HintAnswered | Readiness | WakeAt | Stop | BlockStored | BlockRemoved
)  # fmt: skip
"""Everything that `Control.on` returns. BlockStored and BlockRemoved are the directory's own events."""
