"""Every message between the processes of one cluster, and nothing else.

Sent by the gateway, the conductor and the ranks that compute or store through
`transport.channel`; encoded there (MessagePack, one version byte, a size limit). A message never
carries KV: it names where KV lies (`BlockRef`), and `transport.engine` moves the bytes over MPI.

Most messages are the events and effects of `mooncake_lite.control` as they are. The others are here, one file
for each boundary. This file says which process may receive which message. docs/explain/lifecycle.md follows
these messages in their order.
"""

from __future__ import annotations

from mooncake_lite.control.asked import Verb
from mooncake_lite.control.effects import (
    CancelOn,
    CheckBlocks,
    CompactTier,
    CopyBlocks,
    EndRank,
    Fail,
    ForgetPages,
    GrantPuts,
    GrantSwap,
    HintAnswered,
    HintOutcome,
    HoldBlocks,
    ListOpen,
    LoadBlocks,
    MarkLost,
    Readiness,
    Recall,
    Reject,
    Release,
    RemoveBlocks,
    SaveBlocks,
    StartDecode,
    StartOrder,
    StartPrefill,
    StartServe,
    Stop,
)
from mooncake_lite.control.events import (
    AnswerReceived,
    AnswerSoFar,
    BlocksBad,
    BlocksChecked,
    BlocksCopied,
    BlocksLoaded,
    BlocksRemoved,
    BlocksSaved,
    ChunkStored,
    DecodeEnded,
    DecodeLoaded,
    GatewayLost,
    HintArrived,
    Inventory,
    OpenListed,
    PagesChanged,
    Preempted,
    PrefillEnded,
    PromptComputed,
    PutsEnded,
    PutsWanted,
    RankLost,
    Recalled,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    StopRequested,
    Swapped,
    SwapWanted,
    TierEvicted,
    TierIndexed,
)
from mooncake_lite.control.request import client_id_of, first_attempt
from mooncake_lite.messages.compute import GatewayAt, PrefetchTokens, Report, Start
from mooncake_lite.messages.explain import Explain, Explained
from mooncake_lite.messages.gateway import (
    ClusterStatus,
    GatewayHello,
    MetricsReply,
    MetricsRequest,
    OpenTokens,
    Submit,
    Tokens,
)
from mooncake_lite.messages.parts import Body, BranchAnswer, Logprobs, Message, Metric, Sampling, Span
from mooncake_lite.messages.pool import PoolEnded, PoolQuery
from mooncake_lite.messages.ranks import (
    Conducting,
    Degraded,
    RankHello,
    RankStats,
    StewardHello,
    Stopped,
    TraceLines,
)
from store.objects import BlockRef

TO_CONDUCTOR = (
    GatewayHello | Submit | RequestCancelled | AnswerReceived | HintArrived | MetricsRequest | PoolQuery
    | Explain | StopRequested | StewardHello | GatewayLost | RankHello | RankStats | Degraded | RankLost
    | Stopped | TraceLines
    | Report | ChunkStored | RequestFailed | DecodeLoaded | PromptComputed | DecodeEnded | SwapWanted
    | PutsEnded | PagesChanged | OpenListed | BlocksBad
    | TierIndexed | Inventory | BlocksSaved | TierEvicted | BlocksRemoved | BlocksLoaded | BlocksCopied
    | BlocksChecked
)  # fmt: skip
TO_GATEWAY = (
    ClusterStatus | Reject | Release | Fail | Recall | HintAnswered | MetricsReply | OpenTokens | PoolEnded
    | Stop
)  # fmt: skip
TO_GATEWAY_TOKENS = Tokens
TO_COMPUTE = (
    Start | PrefetchTokens | CancelOn | ListOpen | GrantPuts | GrantSwap | ForgetPages | GatewayAt | MarkLost
    | Stop
)  # fmt: skip
TO_STORE = (
    HoldBlocks | SaveBlocks | LoadBlocks | CopyBlocks | CheckBlocks | RemoveBlocks | CompactTier | MarkLost
    | Stop
)  # fmt: skip
TO_STEWARD = Conducting | Readiness | EndRank | Stop
TO_LAUNCHER = ClusterStatus | Stop
