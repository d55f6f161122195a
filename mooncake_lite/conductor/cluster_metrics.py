"""Metrics of the cluster: the conductor's own, and the last report of each rank."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Literal

import msgspec

from mooncake_lite.control import Control
from mooncake_lite.control.life import Stage
from mooncake_lite.messages import Metric, RankStats
from mooncake_lite.messages.pool import SegmentFigures
from scheduler.classes import ServiceClass
from scheduler.state import PrefillInstance

DECISION_BOUNDS_S = [1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, math.inf]
"""Around the promise of 100 us a decision."""

RATIO_BOUNDS = [0.1, 0.2, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 5.0, 10.0, math.inf]
"""Of predicted / measured: finer where they are nearly equal."""

MOST_SAMPLES = 20_000
"""In one MetricsReply: about 4 MB, half of what a message may have. 400 ranks have fewer."""

HELP = {
    "schedule_decision_seconds": "Time of one scheduling decision",
    "predicted_ttft_ratio": "Predicted / measured time to first token of a request, by what the ranks report",
    "predicted_tbt_ratio": "Predicted / measured time between tokens of an answer, by what the ranks report",
    "requests_rejected_total": "Requests refused with 429 or 503",
    "requests_finished_total": "Requests that were answered to their end",
    "ranks_lost_total": "Ranks that were lost, and without which the others went on",
    "requests_recalled_total": "Times that the answer so far of a request was asked for, to go on elsewhere",
    "class_requests_total": "Requests that have ended, by service class and outcome",
    "events_ignored_total": "Answers of an earlier attempt or epoch, and others that changed nothing",
    "conductor_term": "How many conductors this one has replaced, one after the other",
    "num_requests_waiting": "Requests accepted whose prefill has not begun",
    "num_requests_running": "Requests in prefill or decode",
    "requests_by_stage": "Open requests by the stage of their life",
    "queue_wait_seconds_total": "Waits for decode slots of the requests that the bound of the queue counts",
    "queue_wait_bound_seconds_total": "What these waits may be at most, with --queue predicted",
    "queue_bound_exceeded_total": "Requests that began later than the bound of the queue says: none",
    "prefill_requests_waiting": "Requests in the queue of a prefill rank",
    "prefill_requests_running": "Requests that occupy a prefill slot of a rank",
    "hints_total": "Hints about the use of prefixes, by verb and by what became of them",
    "rank_up": "1 while a rank works, 0 before it has joined and once it is lost; first: of its instance",
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


def class_samples(classes: Sequence[ServiceClass], blocks: Sequence[int]) -> list[Metric]:
    """Return the blocks of each service class in DRAM; nothing when these are not counted."""
    words = "Blocks in DRAM that count for a service class"
    return [
        Metric("pool_class_blocks", "gauge", words, {"class": service.name}, float(count))
        for service, count in zip(classes, blocks)
    ]


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


def bound_samples(control: Control) -> list[Metric]:
    """Return the bound of the queue as of the last event, and what it bounds; nothing where there is none."""
    if (bound := control.state.held.bound()) is None:
        return []
    names = ("queue_wait_seconds_total", "queue_wait_bound_seconds_total", "queue_bound_exceeded_total")
    values = (bound.waited_s, bound.most_s, bound.late)
    return [Metric(name, "counter", HELP[name], {}, float(value)) for name, value in zip(names, values)]


def rank_samples(control: Control) -> list[Metric]:
    """Return whether each rank works, and which rank is the first one of its instance. Rank 0 is left out."""
    found, members, words = [], control.members, HELP["rank_up"]
    for rank, role in enumerate(members.roles):
        if rank:
            up = members.has(rank) and rank not in members.lost
            labels = {"rank": str(rank), "role": role, "first": str(control.config.instance_of(rank)[0])}
            found.append(Metric("rank_up", "gauge", words, labels, float(up)))
    return found


def bounded(samples: list[Metric]) -> list[Metric]:
    """Return these samples or, if they are too many for a message, their sums over the ranks of each role.

    Shares (names that end in _perc) become means.
    """
    if len(samples) <= MOST_SAMPLES:
        return samples
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[Metric]] = {}
    for sample in samples:
        kept = sample.labels.keys() - {"rank", "first"}
        labels = tuple((name, value) for name, value in sample.labels.items() if name in kept)
        groups.setdefault((sample.name, labels), []).append(sample)
    return [_summed(group, dict(labels)) for (_, labels), group in groups.items()]


def _summed(group: Sequence[Metric], labels: dict[str, str]) -> Metric:
    """Return one sample for several of one name. A histogram is the conductor's own, and alone."""
    if len(group) == 1:
        return msgspec.structs.replace(group[0], labels=labels)
    value = sum(sample.value for sample in group)
    if group[0].name.endswith("_perc"):
        value /= len(group)
    return msgspec.structs.replace(group[0], labels=labels, value=value)


class _Histogram:
    """Counts of values up to each bound, and the sum of the values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * len(bounds), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def sample(self, name: str) -> Metric:
        buckets = list(zip(self._bounds, accumulate(self._counts)))
        return Metric(name, "histogram", HELP[name], {}, float(buckets[-1][1]), buckets, self._sum)


class ClusterMetrics:
    """Counters and histograms. Everything else is read when a scrape asks for it."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._histograms = {
            "schedule_decision_seconds": _Histogram(DECISION_BOUNDS_S),
            "predicted_ttft_ratio": _Histogram(RATIO_BOUNDS),
            "predicted_tbt_ratio": _Histogram(RATIO_BOUNDS),
        }
        self._ranks: dict[int, list[Metric]] = {}

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter. The name has no project prefix."""
        key = (name, tuple(labels.items()))
        self._counts[key] = self._counts.get(key, 0.0) + amount

    def count_end(self, classes: Sequence[ServiceClass], class_id: int, outcome: str) -> None:
        """Count a request that has ended, by the name of its service class."""
        service = classes[class_id].name if 0 <= class_id < len(classes) else "unknown"
        self.count("class_requests_total", 1.0, **{"class": service, "outcome": outcome})
        if outcome == "finished":
            self.count("requests_finished_total")

    def observe_decision(self, seconds: float) -> None:
        """Add the time of one scheduling decision to the histogram."""
        self._histograms["schedule_decision_seconds"].observe(seconds)

    def observe_prediction(self, what: str, ratio: float) -> None:
        """Add predicted / measured of one request. what: "ttft" or "tbt"."""
        self._histograms[f"predicted_{what}_ratio"].observe(ratio)

    def from_rank(self, stats: RankStats) -> None:
        """Keep the newest report of a rank."""
        self._ranks[stats.rank] = stats.metrics

    def lose_rank(self, rank: int) -> None:
        """Count a lost rank. Of its last report the counters stay, and what it had then does not."""
        self.count("ranks_lost_total")
        self._ranks[rank] = [sample for sample in self._ranks.get(rank, ()) if sample.kind != "gauge"]

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
        found += [histogram.sample(name) for name, histogram in self._histograms.items()]
        for metrics in self._ranks.values():
            found += metrics
        return found


def cluster_samples(
    metrics: ClusterMetrics, control: Control, segments: Sequence[SegmentFigures],
    channel: Mapping[str, float], ignored: int,
) -> list[Metric]:  # fmt: skip
    """Return every sample of a cluster.

    segments   what each rank lends; channel: counters of the conductor's hub
    ignored    events that changed nothing
    """
    state, directory, config = control.state, control.directory, control.config
    gauges = {"num_requests_waiting": state.num_waiting, "num_requests_running": state.num_running}
    gauges["conductor_term"] = config.term
    counted = directory.counters
    pool = {f"{n}_total" if n in counted else n: v for n, v in directory.stats().items()}
    samples = metrics.samples(gauges, pool, channel)
    samples += segment_samples(segments) + class_samples(config.classes, directory.class_blocks())
    samples += rank_samples(control)
    samples += request_samples(control.requests.stages, state.prefills.values(), config.roles)
    samples += bound_samples(control)
    for (verb, outcome), count in control.hints.counts.items():
        labels = {"verb": verb, "outcome": outcome}
        samples.append(Metric("hints_total", "counter", HELP["hints_total"], labels, count))
    samples.append(Metric("events_ignored_total", "counter", HELP["events_ignored_total"], {}, ignored))
    return bounded(samples)
