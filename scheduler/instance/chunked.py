"""Chunked prefill: the number of tokens of each prompt in the next forward pass.

Called by `continuous.next_batch`. Sarathi-Serve (Agrawal et al., OSDI 2024, section 4) cuts prompts into
chunks, so that an iteration that also decodes never takes longer than its token budget allows ("stall-free").
Pure arithmetic: it knows no requests. Explained in docs/explain/batching.md.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq


def chunk_sizes(budget: int, wanted: Seq[int]) -> list[int]:
    """Share `budget` tokens among prompts by max-min fairness.

        budget   tokens of the next forward pass that are left for prompts, at least 1
        wanted   tokens that each prompt still needs, at least 1 each; not changed. It may be empty

    No prompt gets more than it needs, and what a short prompt leaves over goes to the longer ones. The whole
    budget is used if the prompts need as much. A short prompt therefore never waits for all of a long one,
    and each of n prompts gets at least budget // n tokens per iteration as long as it needs them.

    Prompts that get less than they need get equally much. Where that does not come out even, some of them get
    one token more than the others, no matter which.

    Returns the tokens of each prompt, in the order of `wanted`.
    """
    # labs:begin 5c
    sizes = [0] * len(wanted)
    shortest_first = sorted(range(len(wanted)), key=lambda prompt: wanted[prompt])
    for served, prompt in enumerate(shortest_first):
        share = budget // (len(wanted) - served)
        sizes[prompt] = min(wanted[prompt], share)
        budget -= sizes[prompt]
    return sizes
    # labs:end 5c


def even_budget(budget: int, context: int, even: int) -> int:
    """Return how many tokens after `context` tokens take as long as `budget` tokens without context.

    even   context at which attention costs as much as all else

    The stages of a pipeline work on successive chunks. Where one takes longer than the others, they wait.
    """
    return max(1, budget * even // (even + context))


def whole_prompts(budget: int, wanted: Seq[int]) -> list[int]:
    """Use no chunks: whole prompts, oldest first, as many as fit into `budget`, but at least one.

    A long prompt then stalls the running batch for as long as it takes (Orca, Yu et al., OSDI 2022).
    """
    sizes = [0] * len(wanted)
    for prompt, tokens in enumerate(wanted):
        if prompt and tokens > budget:
            break
        sizes[prompt] = tokens
        budget -= tokens
    return sizes
