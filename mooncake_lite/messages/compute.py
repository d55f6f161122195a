"""Between the conductor and the ranks that compute: orders and events that travel with tokens.

Orders and events without tokens are those of `mooncake_lite.control` as they are.
Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

from mooncake_lite.control.effects import Prefetch, StartOrder
from mooncake_lite.control.events import Preempted, PrefillEnded, PutsWanted, Recalled, Swapped
from mooncake_lite.messages.parts import Body, Message, Span


class GatewayAt(Message, frozen=True):
    """Tells a rank how to reach a gateway; tokens go there directly."""

    gateway: str
    endpoint: str


class Start(Message, frozen=True):
    """Conductor -> compute rank: an order that begins work on a request, with the request's body.

    A StartDecode loads the KV of token_ids[:-1], or, if the body has several answers, of all token_ids.
    """

    order: StartOrder
    body: Body


class PrefetchTokens(Message, frozen=True):
    """Conductor -> decode rank: a Prefetch, with the tokens of its blocks. salt, keys: as in Body."""

    order: Prefetch
    token_ids: list[int]
    salt: bytes
    keys: list[int]


class Report(Message, frozen=True):
    """Compute rank or gateway -> conductor: an event, with the tokens that the control plane does not see.

        PrefillEnded         the first token of each branch
        Preempted, Swapped   one list: prompt and answer so far
        PutsWanted           the tokens of each block, for listeners
        Recalled             the answer so far of each branch

    spans   where the time of the request went so far
    """

    event: PrefillEnded | Preempted | Swapped | PutsWanted | Recalled
    token_ids: list[list[int]]
    spans: list[Span] = []
