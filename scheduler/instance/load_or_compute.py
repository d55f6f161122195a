"""Load or compute: whether blocks that the pool offers are worth loading.

Called by `continuous.next_admissions`. Reuse saves computing and costs a transfer. On a slow link, with a
small model, computing can be faster. The Mooncake paper derives the condition from bandwidth and FLOP rate
(FAST'25, section 3.1); FlexGen (Sheng et al., ICML 2023) places data by measured costs. A rank measures both
of its rates as it works. Explained in docs/explain/paged-memory.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.costs.refine import Average

WEIGHT = 0.3
"""Of a new measurement in the mean: about the last six count."""

FULL_WEIGHT_TOKENS = 256
"""Each step of a model takes a fixed time, mostly to read its weights, so that a full hit, which computes one
token, can take a hundred times as long per token as a prompt."""

PROBE_EVERY = 16
"""After so many decisions to compute, blocks are loaded once: the rate of loading may have changed."""


@dataclass(slots=True)
class Rates:
    """Measured costs of reuse on one rank.

    load_s_per_block   from a job's admission until all of its blocks were in pages, per block; None before
                       the first measurement
    prefill            seconds of computing per token of a prompt
    computed           decisions to compute since the last load
    """

    load_s_per_block: float | None = None
    prefill: Average = field(default_factory=Average)
    computed: int = 0

    def loaded(self, blocks: int, seconds: float) -> None:
        """Add a measurement of blocks that were loaded together."""
        new, old = seconds / blocks, self.load_s_per_block
        self.load_s_per_block = new if old is None else (1 - WEIGHT) * old + WEIGHT * new
        self.computed = 0

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Add a measurement of a prompt's computed tokens. It has its full weight from 256 tokens."""
        if seconds > 0:
            self.prefill.add(seconds / tokens, tokens / FULL_WEIGHT_TOKENS)


def worth_loading(rates: Rates, block_tokens: int) -> bool:
    """Tell whether to load blocks rather than compute their tokens. Without measurements: load.

    Both costs grow with the number of blocks, so that the answer is the same for one block and for many.
    """
    if rates.load_s_per_block is None or not rates.prefill.is_measured:
        return True
    if rates.computed >= PROBE_EVERY:
        return True
    return rates.load_s_per_block <= rates.prefill.value * block_tokens
