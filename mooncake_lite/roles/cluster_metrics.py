"""Metrics of the cluster: the conductor's own, and the last report of each rank."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from mooncake_lite.control.life import Stage
from mooncake_lite.messages import Metric, RankStats
from mooncake_lite.messages.pool import SegmentFigures
from scheduler.state import PrefillInstance

DECISION_BOUNDS_S = [1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, math.inf]
"""Around the promise of 100 us a decision."""

HELP = {
    "requests_rejected_total": "Requests refused with 429",
    "requests_finished_total": "Requests that were answered to their end or cancelled while decoding",
    "num_requests_waiting": "Requests accepted whose prefill has not begun",
    "num_requests_running": "Requests in prefill or decode",
    "requests_by_stage": "Open requests by the stage of their life",
    "prefill_requests_waiting": "Requests in the queue of a prefill rank",
    "prefill_requests_running": "Requests that occupy a prefill slot of a rank",
}


def segment_samples(segments: Iterable[SegmentFigures]) -> list[Metric]:
    """Return the size, the free bytes and the blocks of the memory that each rank lends."""
    found = []
    for segment in segments:
        labels = {"rank": str(segment.rank), "role": segment.role}
        for name, words, value in (
            ("pool_segment_bytes", "DRAM that a rank gives to the pool", segment.capacity_bytes),
            ("pool_segment_free_bytes", "How much of it is free", segment.free_bytes),
            ("pool_segment_blocks", "Blocks that can be read there", segment.blocks),
        ):
            found.append(Metric(name, "gauge", words, labels, float(value)))
    return found


def request_samples(
    stages: Mapping[Stage, int], prefills: Iterable[PrefillInstance], roles: Sequence[str]
) -> list[Metric]:
    """Return the open requests by stage, and the queue of each prefill rank. roles: of all ranks."""
    found = [("requests_by_stage", {"stage": stage.value}, count) for stage, count in stages.items()]
    for prefill in prefills:
        labels = {"rank": str(prefill.instance), "role": roles[prefill.instance]}
        found.append(("prefill_requests_waiting", labels, len(prefill.queue)))
        found.append(("prefill_requests_running", labels, len(prefill.running)))
    return [Metric(name, "gauge", HELP[name], labels, float(value)) for name, labels, value in found]


class ClusterMetrics:
    """Counters and one histogram. Everything else is read when a scrape asks for it."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._decisions = [0] * len(DECISION_BOUNDS_S)
        self._decisions_s = 0.0
        self._ranks: dict[int, list[Metric]] = {}

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter. The name has no project prefix."""
        key = (name, tuple(labels.items()))
        self._counts[key] = self._counts.get(key, 0.0) + amount

    def observe_decision(self, seconds: float) -> None:
        """Add the time of one scheduling decision to the histogram."""
        self._decisions[bisect_left(DECISION_BOUNDS_S, seconds)] += 1
        self._decisions_s += seconds

    def from_rank(self, stats: RankStats) -> None:
        """Keep the newest report of a rank."""
        self._ranks[stats.rank] = stats.metrics

    def samples(
        self, gauges: Mapping[str, float], pool: Mapping[str, float], channel: Mapping[str, float]
    ) -> list[Metric]:
        """Return every sample of the cluster, for MetricsReply."""
        found = [
            Metric(name, "counter", HELP.get(name, name), dict(labels), value)
            for (name, labels), value in self._counts.items()
        ]
        found += [Metric(name, "gauge", HELP.get(name, name), {}, value) for name, value in gauges.items()]
        for name, value in pool.items():
            kind: Literal["counter", "gauge"] = "counter" if name.endswith("_total") else "gauge"
            words = f"KVCache pool: {name.replace('_', ' ')}"
            found.append(Metric(f"pool_{name.removeprefix('pool_')}", kind, words, {}, value))
        for name, value in channel.items():
            found.append(
                Metric(f"control_{name}_total", "counter", f"Conductor's ZeroMQ hub: {name}", {}, value)
            )
        found.append(self._decision_histogram())
        for metrics in self._ranks.values():
            found += metrics
        return found

    def _decision_histogram(self) -> Metric:
        cumulative = 0
        buckets = []
        for bound, count in zip(DECISION_BOUNDS_S, self._decisions):
            cumulative += count
            buckets.append((bound, cumulative))
        return Metric(
            "schedule_decision_seconds", "histogram", "Time of one scheduling decision", {},
            float(cumulative), buckets, self._decisions_s,
        )  # fmt: skip
