"""One answer of `/metrics`: text in Prometheus's format in, a Sample out.

Used by `scrape.py`. Pure. The text may come from a foreign or hostile server: only what `figures.py` uses is
parsed, long samples and impossible values are refused, and labels are made harmless for a terminal.
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "mooncake_lite_"

MOST_LINE = 512
"""Characters of one sample. Ours have at most 200; the parser is slow with very long ones."""

MOST_LABEL = 64
"""Characters of a label's value; the rest is cut."""

MOST_VALUE = 1e18
"""A larger value is an error: no counter of ours comes near it."""

READ = {
    *("server_info", "uptime_seconds", "cluster_metrics_age_seconds", "ready", "degraded"),
    *("conductor_term", "rank_up"),
    *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", "request_success_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("requests_by_stage", "prefill_requests_waiting", "prefill_requests_running"),
    *("decode_requests_waiting", "decode_requests_running"),
    *("kv_cache_pages", "kv_cache_pages_used", "prefill_computed_tokens_total", "decode_tokens_total"),
    *("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    *("pool_segment_bytes", "pool_segment_free_bytes", "pool_segment_blocks"),
    *("pool_blocks_looked_up_total", "pool_hits_dram_total", "pool_hits_ssd_total", "pool_keys_ssd"),
    *("moved_bytes_total", "tier_bytes_written_total", "tier_bytes_loaded_total"),
    *("tier_bytes", "tier_open_bytes", "tier_capacity_bytes", "tier_reader_queued", "tier_writer_queued"),
}
"""Names of the samples that `figures.py` uses, without the prefix. All others are left unread."""


class NoAnswer(Exception):
    """The metrics could not be read; the message says why in a few words."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of `/metrics`.

    at_s     what time it is of, in seconds of a clock that never moves backwards
    values   name, without the prefix -> (labels, value) of each of its samples
    """

    at_s: float
    values: Mapping[str, list[tuple[dict[str, str], float]]]

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the sums of a metric by the values of these labels. Empty when there is no such metric."""
        sums: dict[tuple[str, ...], float] = defaultdict(float)
        for found, value in self.values.get(name, []):
            sums[tuple(found.get(label, "") for label in labels)] += value
        return dict(sums)

    def total(self, name: str) -> float | None:
        """Return the sum of a metric over all labels. None: there is no such metric."""
        return self.by(name).get(())


def read_samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return the samples of the names in READ, by name.

    Raises NoAnswer when the text is not in Prometheus's format, or has no metric of mooncake-lite.
    """
    lines = [line for line in text.split("\n") if line.startswith(PREFIX)]
    if not lines:
        raise NoAnswer("it is no mooncake-lite server: /metrics has none of its metrics")
    values: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    try:
        for name, labels, value in _parse(lines):
            if 0 <= value <= MOST_VALUE:  # which excludes NaN
                values[name].append(({key: harmless(text) for key, text in labels.items()}, value))
    except Exception as error:  # the parser is not written for hostile text, and fails in many ways
        raise NoAnswer(f"/metrics is not in Prometheus's format: {harmless(str(error))}") from None
    return dict(values)


def _parse(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of each line whose name is in READ."""
    for line in lines:
        name = line[len(PREFIX) :].partition("{")[0].partition(" ")[0]
        if name not in READ:
            continue
        if len(line) > MOST_LINE:
            raise ValueError(f"a sample of {name} has {len(line)} characters")
        for family in text_string_to_metric_families(line):
            for sample in family.samples:
                yield name, sample.labels, sample.value


def harmless(text: str, most: int = MOST_LABEL) -> str:
    """Return a text without what a terminal would obey, on one line, cut to `most` characters.

    Control characters, line separators and marks of writing direction become question marks.
    """
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join("?" if unicodedata.category(c) in _OBEYED else c for c in cut)


_OBEYED = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
