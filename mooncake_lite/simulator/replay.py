"""Plays a trace against eviction policies: which blocks would have been there?

Called by `simulator/command.py`. Pure; the policies are the objects that the live directory uses, called as
`store.policies.contract` says. Explained in docs/explain/eviction.md.

One pool; requests in the order of the file, the blocks of each from the front. A block that is there is
refreshed. One that is not comes in, and when the pool then holds too many, a victim goes at once. A block
counts as a hit only while all before it in its request were hits: the KV of a block is of no use without
that of its prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake_lite.workloads.traces import Trace
from store.policies import BlockFacts, Policy

KV_BYTES_PER_TOKEN = 320 * 1024
"""Of LLaMA3-70B in bfloat16, the paper's model."""

REPORT_EVERY = 256
"""Requests between two reports of progress."""


def prefill_s(tokens: int) -> float:
    """Seconds to compute a prompt on the paper's eight A800: a fit of its measurements within 2 %."""
    return 1.143e-4 * tokens + 7.22e-10 * tokens**2


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace as a pool sees it.

    requests     (seconds, ids of the blocks) of each, in order
    facts        id -> what a policy may know of the block
    references   ids in all requests together
    """

    requests: list[tuple[float, Sequence[int]]]
    facts: dict[int, BlockFacts]
    references: int

    def order(self) -> list[int]:
        """The ids of all references, in the order in which a replay makes them."""
        return [item for _, ids in self.requests for item in ids]


def workload_of(trace: Trace, *, complete_only: bool = False) -> Workload:
    """complete_only: partial last blocks are left out altogether.

    The cost of a block is what prefill takes longer with it than without, so that it grows along a prompt.
    """
    requests: list[tuple[float, Sequence[int]]] = []
    facts: dict[int, BlockFacts] = {}
    size = trace.block_tokens
    for request in trace.requests:
        ids = request.hash_ids[: request.input_length // size] if complete_only else request.hash_ids
        requests.append((request.timestamp / 1000, ids))
        for position, item in enumerate(ids):
            if item not in facts:
                begin, end = size * position, size * (position + 1)
                parent = ids[position - 1] if position else None
                cost_s = prefill_s(end) - prefill_s(begin)
                facts[item] = BlockFacts(size * KV_BYTES_PER_TOKEN, cost_s, 0, parent, position)
    return Workload(requests, facts, sum(len(ids) for _, ids in requests))


@dataclass(frozen=True, slots=True)
class Counted:
    """What one replay came to, in blocks: hits as the paper's table counts them; misses were not there.

    by_request   the hits of each request, in order
    """

    references: int
    hits: int
    misses: int
    evictions: int
    by_request: Sequence[int] = ()

    @property
    def hit_rate(self) -> float:
        """Share of all references; 0 when there were none."""
        return self.hits / self.references if self.references else 0.0


def replay(
    workload: Workload, policy: Policy, blocks: int, told: Callable[[int], None] = lambda references: None
) -> Counted:
    """Play all requests. blocks: what the pool holds; told: of the references made since the last call."""
    present: set[int] = set()
    facts = workload.facts
    hits = misses = evictions = untold = 0
    by_request = list[int]()
    for number, (now, ids) in enumerate(workload.requests):
        leading, before = True, hits
        for item in ids:
            if item in present:
                policy.on_access(item, now)
                hits += leading
                continue
            leading = False
            misses += 1
            if not policy.admits(item, facts[item], now):
                continue
            policy.on_insert(item, facts[item], now)
            present.add(item)
            if len(present) > blocks:
                victim = next(policy.victims(now))
                policy.on_remove(victim, evicted=True)
                present.remove(victim)
                evictions += 1
        by_request.append(hits - before)
        untold += len(ids)
        if number % REPORT_EVERY == REPORT_EVERY - 1:
            told(untold)
            untold = 0
    told(untold)
    return Counted(workload.references, hits, misses, evictions, by_request)
