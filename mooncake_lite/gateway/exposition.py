"""The samples of /metrics: the cluster's, as the conductor sends them, and the gateway's own.

Used by `endpoints` (renders) and `answer` (observes). Names and units follow vLLM's meaning, under the
prefix mooncake_lite_. Knows no request and no socket.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

import mooncake_lite
from mooncake_lite.gateway.cluster_view import ClusterState, ClusterView
from mooncake_lite.messages import Metric

PREFIX = "mooncake_lite_"

TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
GAP_BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
LATENCY_BOUNDS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
"""Bounds of the histograms: each about twice the one before, from a fast answer to a timeout."""

_KINDS = ("counter", "gauge", "histogram")


class GatewayMetrics:
    """The gateway's own metrics.

    registry   what is rendered, in the order of registration
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", TTFT_BOUNDS_S
        )
        self._gap = self._histogram(
            "inter_token_latency_seconds", "Gaps between the tokens of one answer", GAP_BOUNDS_S
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its last token", LATENCY_BOUNDS_S
        )
        self._answers = self._counter(
            "request_success", "Answers by the reason of their end", "finished_reason"
        )
        self._http = self._counter(
            "http_requests", "HTTP requests by status; 499: the client left", "path", "status"
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests")
        self._generation_tokens = self._counter("generation_tokens", "Tokens of finished answers")

    def observe_tokens(self, ttft_s: float | None, gap_s: float) -> None:
        """Tokens of one answer came; ttft_s is set for the first ones."""
        if ttft_s is None:
            self._gap.observe(gap_s)
        else:
            self._ttft.observe(ttft_s)

    def observe_end(self, finish: str, latency_s: float, num_tokens: int) -> None:
        """An answer of so many tokens ended."""
        self._latency.observe(latency_s)
        self._answers.labels(finish).inc()
        self._generation_tokens.inc(num_tokens)

    def observe_prompts(self, num_tokens: int) -> None:
        """All answers to a request ended, whose prompts have so many tokens together."""
        self._prompt_tokens.inc(num_tokens)

    def observe_http(self, path: str, status: int) -> None:
        """A request over HTTP was answered."""
        self._http.labels(path, str(status)).inc()

    def attach(self, cluster: ClusterView, model: str) -> None:
        """Also show what the cluster reports, and the state of this gateway. model: its served id."""
        self.registry.register(GatewayGauges(cluster, model))
        taken = {family.name for family in self.registry.collect()}
        self.registry.register(ClusterSamples(cluster, taken))

    def render(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, bounds: Iterable[float]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=tuple(bounds), registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)


class GatewayGauges(Collector):
    """Samples that are read when asked for, not counted."""

    def __init__(self, cluster: ClusterView, model: str):
        self._cluster = cluster
        self._labels = {"model": model, "version": mooncake_lite.__version__}
        self._began = time.monotonic()

    def collect(self) -> Iterator[Family]:
        """Read the state of the cluster, the sockets' counters and the number of open requests now."""
        names = list(self._labels)
        info = GaugeMetricFamily(PREFIX + "server_info", "What is served: always 1", labels=names)
        info.add_metric(list(self._labels.values()), 1)
        yield info
        cluster, now = self._cluster, time.monotonic()
        age_s = now - cluster.report.asked_at_s
        for name, text, value in (
            ("uptime_seconds", "Seconds since the start of the gateway", now - self._began),
            ("cluster_metrics_age_seconds", "Seconds since the conductor was asked for its metrics", age_s),
            ("ready", "1 when requests are served, else 0", cluster.state is ClusterState.READY),
            ("degraded", "Number of things that do not work as they should", len(cluster.degraded)),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        text = "Bytes of messages over ZeroMQ at the gateway"
        wire = CounterMetricFamily(PREFIX + "gateway_zmq_bytes", text, labels=("channel", "direction"))
        for labels, count in self._cluster.sockets.bytes.items():
            wire.add_metric(labels, count)
        yield wire
        text = "Messages that could not be decoded, or came from no rank"
        yield CounterMetricFamily(PREFIX + "gateway_zmq_dropped", text, value=self._cluster.sockets.dropped)
        text = "Requests between their admission and their last token"
        yield GaugeMetricFamily(PREFIX + "gateway_open_requests", text, value=self._cluster.open_requests)


class ClusterSamples(Collector):
    """The samples of MetricsReply as families; a name that Prometheus would not take is left out.

    taken   names that belong to the gateway
    """

    def __init__(self, cluster: ClusterView, taken: set[str]):
        self._cluster = cluster
        self._taken = taken

    def collect(self) -> Iterator[Family]:
        """The conductor's last MetricsReply, one family for each name."""
        families: dict[str, Family] = {}
        for sample in self._cluster.report.metrics:
            name = sample.name if sample.name.startswith(PREFIX) else PREFIX + sample.name
            base = name.removesuffix("_total") if sample.kind == "counter" else name
            if base in self._taken or sample.kind not in _KINDS:
                continue
            try:
                family = families.get(base) or Family(base, sample.help or base, sample.kind)
            except ValueError:
                continue
            if family.type == sample.kind:
                families[base] = family
                _add(family, sample)
        yield from families.values()


def _add(family: Family, sample: Metric) -> None:
    if sample.kind == "histogram":
        for bound, count in sample.buckets:
            edge = "+Inf" if math.isinf(bound) else str(float(bound))
            family.add_sample(f"{family.name}_bucket", {**sample.labels, "le": edge}, count)
        family.add_sample(
            f"{family.name}_count", sample.labels, sample.buckets[-1][1] if sample.buckets else 0
        )
        family.add_sample(f"{family.name}_sum", sample.labels, sample.sum)
    else:
        suffix = "_total" if sample.kind == "counter" else ""
        family.add_sample(family.name + suffix, sample.labels, sample.value)
