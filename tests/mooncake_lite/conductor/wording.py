"""Messages between processes, made from few facts. Used by the tests of roles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake_lite import messages as m
from store.keys import block_digests, prefix_keys

BLOCK = 64
SUMS = [11, 12]
"""Checksums of a block, by layer."""


def submit(name: str, token_ids: list[int], salt: bytes = b"model", n: int = 1) -> m.Submit:
    """A request of gateway-0 for 16 tokens. Without a salt, nothing may be reused."""
    keys = prefix_keys(token_ids, BLOCK, salt) if salt else []
    digests = block_digests(token_ids, BLOCK) if salt else []
    request = m.RequestArrived(name, len(token_ids), 16, keys, digests, n=n, gateway="gateway-0")
    return m.Submit(request, m.Body("gateway-0", token_ids, salt, m.Sampling(0.0), [0]))


def kind(message: m.Message) -> type:
    """What a message is: a Start is its order, a Report is its event."""
    if isinstance(message, m.Start | m.Report):
        return type(message.order if isinstance(message, m.Start) else message.event)
    return type(message)


def prefilled(
    start: m.Start, first_tokens: Sequence[int] = (7,), finished: Sequence[int] = (), **times: Any
) -> m.Report:
    """The rank of a StartPrefill has stored all of its blocks."""
    order = start.order
    assert isinstance(order, m.StartPrefill)
    values: dict[str, Any] = {"load_s": 0.0, "compute_s": 0.1, "store_s": 0.0} | times
    sums = [SUMS] * len(order.store)
    event = m.PrefillEnded(order.rank, 0, order.request_id, order.attempt, sums, list(finished), **values)
    return m.Report(event, [[token] for token in first_tokens])


def left(
    why: type[m.Preempted] | type[m.Swapped], start: m.Start, token_ids: list[int], branch: int = 0
) -> m.Report:
    """The rank of a StartDecode or StartServe has dropped a branch, with this prompt and answer so far."""
    order, salt = start.order, start.body.salt
    keys = prefix_keys(token_ids, BLOCK, salt) if salt else []
    digests = block_digests(token_ids, BLOCK) if salt else []
    event = why(order.rank, 0, order.request_id, order.attempt, len(token_ids), keys, digests, branch)
    return m.Report(event, [token_ids])
