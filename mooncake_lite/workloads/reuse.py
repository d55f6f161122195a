"""What a cache would have of each prompt of a trace: without a limit, or of so many blocks with LRU.

Used by `workload stats` and by the planner. Pure; a relative of `simulator.replay`, which compares eviction
policies, in blocks. Requests come one after the other: a block is there from the next request on.
"""

from __future__ import annotations

from collections import OrderedDict

from mooncake_lite.workloads.traces import Trace


def cached_tokens(trace: Trace, blocks: int | None = None) -> list[int]:
    """Return the tokens of each prompt whose KV is there when it comes.

    Full blocks alone are kept, those of prompts and of answers that the trace names. Of a prompt that is
    there as a whole the last token is still computed, for its logits.

    blocks   that the cache holds; None: without a limit
    """
    held: OrderedDict[int, None] = OrderedDict()
    found, size = list[int](), trace.block_tokens
    for number, request in enumerate(trace.requests):
        full = request.input_length // size
        ids = [*request.hash_ids[:full], *(trace.answers[number] if trace.answers else ())]
        leading = next((place for place, one in enumerate(ids[:full]) if one not in held), full)
        found.append(min(leading * size, request.input_length - 1))
        for one in reversed(ids):  # the end of a prefix goes first, because it is of no use without its begin
            held[one] = None
            held.move_to_end(one)
        while blocks is not None and len(held) > blocks:
            held.popitem(last=False)
    return found
