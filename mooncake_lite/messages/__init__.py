"""Every message between the processes of one cluster, and nothing else.

Sent by the gateway, the conductor (rank 0) and the ranks that compute or store through
`transport.channel`; encoded there (MessagePack, one version byte, a size limit). A message never
carries KV: it names where KV lies (`BlockRef`), and `transport.engine` moves the bytes over MPI.
One file for each boundary; this one says which process may receive which message. docs/explain/lifecycle.md
follows these messages in their order.
"""

from __future__ import annotations

from mooncake_lite.messages.compute import (
    Answer,
    Decode,
    DecodeDone,
    DecodeLoaded,
    ForgetPages,
    GatewayAt,
    PagesHeld,
    Preempted,
    Prefill,
    PrefillDone,
    PromptComputed,
    PutEnded,
    PutGranted,
    PutWanted,
    RequestFailed,
    Serve,
    SwapGranted,
    Swapped,
    SwapWanted,
)
from mooncake_lite.messages.explain import Explain, Explained
from mooncake_lite.messages.gateway import (
    Cancel,
    ClusterStatus,
    Failed,
    GatewayHello,
    MetricsReply,
    MetricsRequest,
    OpenTokens,
    Rejected,
    Released,
    Submit,
    Tokens,
)
from mooncake_lite.messages.parts import (
    BlockRef,
    Logprobs,
    Message,
    Metric,
    Plain,
    Sampling,
    Span,
)
from mooncake_lite.messages.pool import (
    BlocksChecked,
    CheckBlocks,
    CompactTier,
    PoolEnded,
    PoolQuery,
)
from mooncake_lite.messages.ranks import (
    Degraded,
    RankError,
    RankHello,
    RankStats,
    Stop,
    Stopped,
    TraceLines,
)
from mooncake_lite.messages.store import (
    BlocksCopied,
    BlocksLoaded,
    BlocksRemoved,
    BlocksSaved,
    CopyBlocks,
    LoadBlocks,
    RemoveBlocks,
    SaveBlocks,
    TierEvicted,
    TierIndex,
)

__all__ = [
    "TO_COMPUTE",
    "TO_CONDUCTOR",
    "TO_GATEWAY",
    "TO_GATEWAY_TOKENS",
    "TO_LAUNCHER",
    "TO_STORE",
    "Answer",
    "BlockRef",
    "BlocksChecked",
    "BlocksCopied",
    "BlocksLoaded",
    "BlocksRemoved",
    "BlocksSaved",
    "Cancel",
    "CheckBlocks",
    "ClusterStatus",
    "CompactTier",
    "CopyBlocks",
    "Decode",
    "DecodeDone",
    "DecodeLoaded",
    "Degraded",
    "Explain",
    "Explained",
    "Failed",
    "ForgetPages",
    "GatewayAt",
    "GatewayHello",
    "LoadBlocks",
    "Logprobs",
    "Message",
    "Metric",
    "MetricsReply",
    "MetricsRequest",
    "OpenTokens",
    "PagesHeld",
    "Plain",
    "PoolEnded",
    "PoolQuery",
    "Preempted",
    "Prefill",
    "PrefillDone",
    "PromptComputed",
    "PutEnded",
    "PutGranted",
    "PutWanted",
    "RankError",
    "RankHello",
    "RankStats",
    "Rejected",
    "Released",
    "RemoveBlocks",
    "RequestFailed",
    "Sampling",
    "SaveBlocks",
    "Serve",
    "Span",
    "Stop",
    "Stopped",
    "Submit",
    "SwapGranted",
    "SwapWanted",
    "Swapped",
    "TierEvicted",
    "TierIndex",
    "Tokens",
    "TraceLines",
]

TO_CONDUCTOR = (
    GatewayHello
    | Submit
    | Cancel
    | MetricsRequest
    | RankHello
    | PrefillDone
    | RequestFailed
    | DecodeLoaded
    | PromptComputed
    | DecodeDone
    | Preempted
    | SwapWanted
    | Swapped
    | PutWanted
    | PutEnded
    | PagesHeld
    | RankStats
    | RankError
    | Degraded
    | Stop
    | Stopped
    | TierIndex
    | BlocksSaved
    | TierEvicted
    | BlocksRemoved
    | BlocksLoaded
    | BlocksCopied
    | BlocksChecked
    | PoolQuery
    | Explain
    | TraceLines
)
TO_GATEWAY = ClusterStatus | Rejected | Released | Failed | MetricsReply | OpenTokens | PoolEnded | Stop
TO_GATEWAY_TOKENS = Tokens
TO_COMPUTE = Prefill | Decode | Serve | Cancel | PutGranted | SwapGranted | ForgetPages | GatewayAt | Stop
TO_STORE = SaveBlocks | LoadBlocks | CopyBlocks | CheckBlocks | RemoveBlocks | CompactTier | Stop
TO_LAUNCHER = ClusterStatus | Stop
