"""Events: the only input of the control plane. Ranks and gateways send them to the conductor.

One struct serves on the wire, in a recording and in the simulator. Events are plain data: lengths, keys and
digests, never tokens. Tokens travel beside their event; see `mooncake_lite.messages`.
Explained in docs/explain/control.md.

    Event
      RankEvent       a rank causes it: rank, epoch
        RequestEvent  about a request that the rank was given: request_id, attempt
          BranchEvent about a branch of it that has to leave the rank's pages

The control plane ignores an event of another epoch or another attempt. The conductor drops an event that
names another rank than the connection that it came on.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from mooncake_lite.control.asked import CommandAbandoned, HintArrived, PoolCommand
from mooncake_lite.control.effects import Order
from mooncake_lite.control.message import Event
from store.objects import HeldBlock


class RankEvent(Event, frozen=True):
    """Base of the events that a rank causes. epoch: number of the conductor that it has joined."""

    rank: int
    epoch: int


class RequestEvent(RankEvent, frozen=True):
    """Base of the events about a request on a rank. attempt: of the order that the rank was given."""

    request_id: str
    attempt: int


class BranchEvent(RequestEvent, frozen=True):
    """Base of the events about a branch that has to leave the pages of a rank that decodes it.

    num_tokens     tokens of prompt and answer so far
    keys, digests  of each full block of these tokens; empty when nothing may be reused
    """

    num_tokens: int
    keys: list[int]
    digests: list[int]
    branch: int = 0


# ------------------------------------------------------------------------------ members


class RankJoined(RankEvent, frozen=True):
    """A rank has loaded its model, compiled its kernels and created its segment.

    instance        the unit on which policies place work; several ranks may form one
    duties          of "prefill", "decode" and "store"
    slots           requests that the instance serves at once under each duty (0 for a store rank)
    segment_bytes   DRAM that the rank lends to the pool
    tier            whether a store rank has an SSD tier; TierIndexed lists its blocks
    """

    instance: int
    duties: tuple[str, ...]
    node: int
    slots: int = 0
    segment_bytes: int = 0
    tier: bool = False


class RankLost(RankEvent, frozen=True):
    """A rank is dead, or cannot be reached. ended: its process was seen to end, so it writes nothing more."""

    reason: str
    ended: bool = True


class TierIndexed(RankEvent, frozen=True):
    """Some blocks of the SSD tier of a store rank, most useful last. `last` ends the list."""

    keys: list[int]
    digests: list[int]
    last: bool


class Inventory(RankEvent, frozen=True):
    """Some blocks that a store rank was told to hold by an earlier conductor. `last` ends the list."""

    blocks: list[HeldBlock]
    last: bool


class GatewayReady(Event, frozen=True):
    """A gateway can be reached by every rank that sends tokens."""

    gateway: str


class GatewayLost(Event, frozen=True):
    """A gateway has ended, for this reason, and its clients' connections with it. final: none follows it."""

    gateway: str
    reason: str
    final: bool = False


# ------------------------------------------------------------------------------ requests


class AnswerSoFar(msgspec.Struct, frozen=True, array_like=True):
    """What a gateway has of one branch.

    num_tokens     of the answer; the last one is not computed yet, so that its KV is nowhere
    whole          no more tokens are to come
    keys, digests  of each full block of the prompt and these tokens; empty when nothing may be reused
    """

    branch: int
    num_tokens: int
    whole: bool
    keys: list[int] = []
    digests: list[int] = []


class RequestArrived(Event, frozen=True):
    """A client has sent a request.

    num_tokens     tokens of the prompt
    max_tokens     longest answer, in tokens
    keys, digests  of each full block of the prompt; empty when nothing may be reused
    wait_limit_s   longest time that the gateway waits for the first token
    n              answers (branches) to the one prompt, numbered from 0
    class_id       service class, an index of ControlConfig.classes
    tenant         that sent it; "" if none was named
    slo_ttft_s     time to first token that the client asks for; inf: the limit of its class
    slo_tbt_s      likewise, time between tokens
    gateway        that has the client's connection
    answers        what the client has of each branch, of a request that an earlier conductor had taken
    waited_s       since it came to that one; resumed: its client may have tokens, so it cannot be refused
    session        of the tenant, whose latest prompt this is; hints may name it. "": none
    """

    request_id: str
    num_tokens: int
    max_tokens: int
    keys: list[int]
    digests: list[int]
    class_id: int = 0
    wait_limit_s: float = float("inf")
    n: int = 1
    tenant: str = ""
    slo_ttft_s: float = float("inf")
    slo_tbt_s: float = float("inf")
    gateway: str = ""
    answers: list[AnswerSoFar] = []
    waited_s: float = 0.0
    resumed: bool = False
    session: str = ""


class RequestCancelled(Event, frozen=True):
    """The client has left, or needs no more tokens: of one branch, or with -1 of all.

    answered   the client has all that it asked for: a stop string has ended its answers
    """

    request_id: str
    branch: int = -1
    answered: bool = False


class AnswerReceived(Event, frozen=True):
    """The gateway has every token of a branch."""

    request_id: str
    branch: int


class Recalled(Event, frozen=True):
    """Answer Recall, under the same request id and attempt."""

    request_id: str
    attempt: int
    answers: list[AnswerSoFar]


class PrefillEnded(RequestEvent, frozen=True):
    """Every byte of `store` and `tail` of a StartPrefill is in the pool.

    checksums               one list for each object of `store`: XXH3-64 of each layer's range
    finished                branches whose first token was the last one, so there is nothing to decode
    load_s, compute_s, store_s   seconds for each part
    computed_tokens         prompt tokens that were computed and not reused
    loaded_blocks           blocks that load_s was spent on: the last ones of `load`
    tail_checksums          of `tail`, by layer
    """

    checksums: list[list[int]]
    finished: list[int]
    load_s: float
    compute_s: float
    store_s: float
    computed_tokens: int = 0
    loaded_blocks: int = 0
    tail_checksums: list[int] = []


class ChunkStored(RequestEvent, frozen=True):
    """Blocks from number `first` of `store` on are in the pool, while the rest of the prompt is computed.

    PrefillEnded names them again, so that nothing is lost with this report. checksums: as there.
    """

    first: int
    checksums: list[list[int]]


class RequestFailed(RequestEvent, frozen=True):
    """A rank cannot finish a request. for_good: another try would fail as well; may_still_write: bytes may
    still land in its places; code: of a scheduler.instance.Fault."""

    reason: str
    may_still_write: bool = False
    for_good: bool = False
    code: str = ""


class OpenListed(RankEvent, frozen=True):
    """Answer ListOpen, under the same number. work: each request that the rank has, and its attempt."""

    number: int
    work: list[tuple[str, int]]


class DecodeLoaded(RequestEvent, frozen=True):
    """All KV of a StartDecode is in the decode rank's pages. load_s, loaded_blocks: as in PrefillEnded."""

    load_s: float = 0.0
    loaded_blocks: int = 0


class PromptComputed(RequestEvent, frozen=True):
    """A prompt is computed, and its loaded blocks are no longer read. The rank can compute the next one: that
    of a StartPrefill stores this one's last blocks meanwhile. Fields: as in PrefillEnded.
    """

    computed_tokens: int
    compute_s: float
    load_s: float = 0.0
    loaded_blocks: int = 0


class DecodeEnded(RequestEvent, frozen=True):
    """A branch has left the rank that decodes it, because it is answered or was cancelled.

    answer_tokens   tokens of its answer
    steps, sequences, context_tokens, steps_s   decode steps of the rank since its last DecodeEnded: their
                    number, and sums over them of rows (of sequences and drafts), context and seconds
    """

    branch: int = 0
    answer_tokens: int = 0
    steps: int = 0
    sequences: int = 0
    context_tokens: int = 0
    steps_s: float = 0.0


class Preempted(BranchEvent, frozen=True):
    """A rank that decodes had no free page and has dropped a branch: all of its tokens are to be prefilled.

    may_still_write  bytes may still land in the places of a swap that has failed
    """

    may_still_write: bool = False


class SwapWanted(BranchEvent, frozen=True):
    """A rank that decodes has no free page. It asks where the KV of a request, num_tokens of it, may go."""


class Swapped(BranchEvent, frozen=True):
    """The rank has written the blocks with places in GrantSwap, and dropped the request."""

    checksums: list[list[int]] = []


# ------------------------------------------------------------------------------ blocks


class PutsWanted(RankEvent, frozen=True):
    """A rank that decodes has filled blocks and asks for places.

    number    chosen by the rank; GrantPuts answers under the same number
    before    for each block: (key of the block before it or None, number of blocks before it)
    requests  for each block: that filled it
    """

    number: int
    keys: list[int]
    digests: list[int]
    before: list[tuple[int | None, int]]
    requests: list[str]


class PutsEnded(RankEvent, frozen=True):
    """Granted objects are written, or could not be. number: of the PutsWanted.

    checksums         of each object of object_ids, by layer
    failed            objects that were not written
    may_still_write   bytes may still land in the failed objects
    """

    number: int
    object_ids: list[int]
    checksums: list[list[int]]
    failed: list[int] = []
    may_still_write: bool = False


class BlocksBad(RankEvent, frozen=True):
    """A rank has read other bytes from these objects than were put there."""

    object_ids: list[int]


class PagesChanged(RankEvent, frozen=True):
    """Blocks have come into the pages of a rank, and have left them. Sent once per step.

    stored, removed   keys of these blocks: a hint, because the pages may be evicted before a request comes
    """

    stored: list[int]
    removed: list[int]


class BlocksLoaded(RankEvent, frozen=True):
    """A LoadBlocks has ended.

    ok                by block: whether it was loaded; False without a problem means a bad block
    checksums         by block: the verified checksums
    problem           why the other blocks could not be loaded, or ""
    may_still_write   bytes may still land in the blocks that are not ok
    """

    number: int
    ok: list[bool]
    checksums: list[list[int]]
    seconds: float
    problem: str = ""
    may_still_write: bool = False


class BlocksSaved(RankEvent, frozen=True):
    """The state of blocks that a SaveBlocks named has changed.

    state   "written" to the open segment file; "durable" in a sealed one; "dropped": DRAM has the only copy;
            "bad": the bytes in DRAM are not those that were put
    """

    keys: list[int]
    state: Literal["written", "durable", "dropped", "bad"]


class TierEvicted(RankEvent, frozen=True):
    """A full tier has evicted these blocks."""

    keys: list[int]


class BlocksRemoved(RankEvent, frozen=True):
    """A tier has removed these blocks. for_good: no restart brings them back."""

    keys: list[int]
    for_good: bool


class BlocksCopied(RankEvent, frozen=True):
    """A CopyBlocks has ended. checksums: of each copied block, by layer; empty if it failed."""

    number: int
    checksums: list[list[int]]
    may_still_write: bool = False


class BlocksChecked(RankEvent, frozen=True):
    """A CheckBlocks has ended. good: by block. problem: why the command cannot continue, or ""."""

    number: int
    good: list[bool]
    problem: str = ""


class Undelivered(Event, frozen=True):
    """An order could not be sent, for this reason. Its rank will never receive it."""

    order: Order
    reason: str


class Tick(Event, frozen=True):
    """The time of a WakeAt has come."""


class StopRequested(Event, frozen=True):
    """The cluster is asked to end within grace_s."""

    reason: str
    grace_s: float


AnyEvent = (
    RankJoined | RankLost | TierIndexed | Inventory | GatewayReady | GatewayLost | RequestArrived | Recalled
    | RequestCancelled | AnswerReceived | ChunkStored | PrefillEnded | RequestFailed | DecodeLoaded
    | PromptComputed | DecodeEnded | Preempted | SwapWanted | Swapped | OpenListed | PutsWanted | PutsEnded
    | PagesChanged | BlocksLoaded | BlocksBad | BlocksSaved | TierEvicted | BlocksRemoved | BlocksCopied
    | BlocksChecked | PoolCommand | CommandAbandoned | HintArrived | Undelivered | Tick | StopRequested
)  # fmt: skip
"""For decoders."""
