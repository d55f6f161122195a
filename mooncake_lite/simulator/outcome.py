"""What a run came to: the latency of each request, and the load of the cluster over time.

Used by `experiment.py`, and by the modules that print and draw results. Explained in
docs/explain/experiments.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, nan

import numpy as np

from mooncake_lite.simulator.workload import Request


@dataclass(frozen=True, slots=True)
class Latency:
    """One request: when it was sent, and its latencies. Both are inf when it was refused or failed."""

    arrived_s: float
    ttft_s: float
    tbt_s: float

    @classmethod
    def of(cls, request: Request) -> Latency:
        """Measure a request that has ended. TBT is the mean gap between its tokens; 0 without a gap.

        TTFT ends when the prefill rank has the first token, also where admission withholds this token.
        """
        if request.ends != ["finished"]:
            return cls(request.sent_s, inf, inf)
        first, last = request.token_times_s[0], request.token_times_s[-1]
        return cls(request.sent_s, first - request.sent_s, (last - first) / max(1, request.answered - 1))


@dataclass(slots=True)
class Loads:
    """Loads over time, each as a multiple of its limit (arXiv 2407.00079, 7.1).

    prefill   mean of the instances: seconds until a new prompt could begin, over the limit on TTFT
    decode    mean of the instances: seconds of the present step, over the limit on TBT
    """

    times_s: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)

    def after(self, begin_s: float, end_s: float) -> Loads:
        """Return the loads in a span of time, its ends included."""
        kept = [n for n, at in enumerate(self.times_s) if begin_s <= at <= end_s]
        return Loads(*([column[n] for n in kept] for column in (self.times_s, self.prefill, self.decode)))

    def correlation(self) -> float:
        """Return Pearson's coefficient of the two loads; nan when one of them never changes."""
        if min(np.ptp(self.prefill), np.ptp(self.decode)) == 0:
            return nan
        return float(np.corrcoef(self.prefill, self.decode)[0, 1])


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run, without the requests of its first part, which warms the cluster up.

    latencies    of the requests that count, by arrival
    loads        while they arrived
    refused      share of these requests that were refused
    wasted       share of these requests that were refused after their prefill
    """

    latencies: list[Latency]
    loads: Loads
    refused: float
    wasted: float

    @classmethod
    def of(cls, requests: Iterable[Request], loads: Loads, warm_up: float) -> Outcome:
        """Measure a run. warm_up: share of its requests that do not count."""
        in_order = sorted(requests, key=lambda request: request.sent_s)
        counted = in_order[int(warm_up * len(in_order)) :]
        begin_s, end_s = counted[0].sent_s, counted[-1].sent_s
        refused = [one for one in counted if one.ends == ["rejected"]]
        wasted = sum(bool(one.token_times_s) for one in refused)
        latencies = [Latency.of(one) for one in counted]
        return cls(latencies, loads.after(begin_s, end_s), len(refused) / len(counted), wasted / len(counted))

    @property
    def mean_ttft_s(self) -> float:
        """Return the mean TTFT of the requests that were answered; nan when none was."""
        answered = [one.ttft_s for one in self.latencies if one.ttft_s < inf]
        return sum(answered) / len(answered) if answered else float("nan")

    def share_within(self, ttft_s: float, tbt_s: float) -> float:
        """Return the share of all requests that met both limits; a refused one met none."""
        return sum(one.ttft_s <= ttft_s and one.tbt_s <= tbt_s for one in self.latencies) / len(
            self.latencies
        )
