"""Latencies and goodput of a run, from what became of each request: the same for live and simulated ones.

Called by `replay` and `simulate`. Pure. The names are the field's, and TBT is the paper's: see
docs/reference/glossary.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np

COMPLETED, REJECTED, FAILED = "completed", "rejected", "failed"

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Record:
    """What became of one request. All times are seconds on one clock.

    token_times_s   when each piece of the answer came; at least one when `outcome` is COMPLETED
    outcome         COMPLETED, REJECTED, or FAILED: the answer broke off, or there was none
    cause           of a rejection or a failure, in a few words
    tokens          of the answer, where a piece may have several; None: one per piece
    """

    arrived_s: float
    token_times_s: Sequence[float] = ()
    outcome: str = COMPLETED
    cause: str = ""
    tokens: int | None = None

    @property
    def ttft_s(self) -> float:
        """Return the time to the first token."""
        return self.token_times_s[0] - self.arrived_s

    @property
    def e2e_s(self) -> float:
        """Return the time to the last token."""
        return self.token_times_s[-1] - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """Return the mean gap between tokens after the first one; 0 for one token."""
        gaps = (self.tokens or len(self.token_times_s)) - 1
        return (self.e2e_s - self.ttft_s) / gaps if gaps > 0 else 0.0

    @property
    def tbt_s(self) -> float:
        """Return the mean of the slowest tenth of the gaps, rounded up; 0 without a gap."""
        gaps = np.sort(np.diff(self.token_times_s))
        return float(gaps[-len(gaps) // 10 :].mean()) if len(gaps) else 0.0


def longest_gap_s(record: Record, after_s: float) -> float:
    """Return the longest gap between two tokens that ends after a moment; 0 without one."""
    times = record.token_times_s
    return max((later - one for one, later in pairwise(times) if later > after_s), default=0.0)


def is_within(record: Record, slo_ttft_s: float, slo_tbt_s: float) -> bool:
    """Tell whether a request was completed within both limits."""
    return record.outcome == COMPLETED and record.ttft_s <= slo_ttft_s and record.tbt_s <= slo_tbt_s


def summary(records: Sequence[Record], slo_ttft_s: float, slo_tbt_s: float) -> dict[str, Any]:
    """Sum a run up, for JSON.

    slo_share     share of all requests that were completed within both limits
    goodput_rps   requests within both limits, per second of the run
    span_s        of the run: from the first arrival to the last arrival or token
    rejected      {cause: requests}, the most frequent cause first; failed: likewise
    ttft_s, tpot_s, tbt_s, e2e_s   {mean, p50, p90, p99} over the completed requests; None without any
    itl_s         the same over all gaps of these requests
    """
    done = [one for one in records if one.outcome == COMPLETED]
    moments = [moment for one in records for moment in (one.arrived_s, *one.token_times_s[-1:])]
    span_s = max(moments) - min(moments) if moments else 0.0
    good = sum(is_within(one, slo_ttft_s, slo_tbt_s) for one in done)
    return {
        "requests": len(records),
        "completed": len(done),
        **{
            outcome: dict(Counter(one.cause for one in records if one.outcome == outcome).most_common())
            for outcome in (REJECTED, FAILED)
        },
        "slo": {"ttft_s": slo_ttft_s, "tbt_s": slo_tbt_s},
        "slo_share": good / len(records) if records else None,
        "goodput_rps": good / span_s if span_s else None,
        "span_s": span_s,
        "output_tokens": sum(one.tokens or len(one.token_times_s) for one in done),
        "ttft_s": spread_of(one.ttft_s for one in done),
        "tpot_s": spread_of(one.tpot_s for one in done if len(one.token_times_s) > 1),
        "tbt_s": spread_of(one.tbt_s for one in done if len(one.token_times_s) > 1),
        "itl_s": spread_of(chain.from_iterable(np.diff(one.token_times_s).tolist() for one in done)),
        "e2e_s": spread_of(one.e2e_s for one in done),
    }


def spread_of(values: Iterable[float]) -> dict[str, float | None]:
    """Return {mean, p50, p90, p99} of some values; None for each without any."""
    found, names = np.fromiter(values, float), ["mean", *(f"p{percent}" for percent in PERCENTILES)]
    if not len(found):
        return dict.fromkeys(names)
    mean = float(found.mean())
    return dict(zip(names, [mean, *np.percentile(found, PERCENTILES, overwrite_input=True).tolist()]))
