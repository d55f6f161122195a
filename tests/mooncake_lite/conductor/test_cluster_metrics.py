"""The samples of a cluster, however many ranks it has, fit into a message."""

import pytest

from mooncake_lite import messages as m
from mooncake_lite.conductor.cluster_metrics import MOST_SAMPLES, bounded
from transport.wire import DEFAULT_MAX_BYTES, encode

pytestmark = pytest.mark.quick

HELP = "decode iterations of the running batch, in words"


def of_ranks(count: int) -> list[m.Metric]:
    """Fifty counters and a share of each of so many decode ranks."""
    labels = [{"rank": str(rank), "role": "decode"} for rank in range(1, count + 1)]
    counters = [
        m.Metric(f"tokens_{n}_total", "counter", HELP, each, 2.0) for n in range(50) for each in labels
    ]
    return counters + [m.Metric("kv_cache_usage_perc", "gauge", HELP, each, 0.25) for each in labels]


def test_samples_of_a_few_hundred_ranks_keep_their_rank_and_fit() -> None:
    samples = bounded(of_ranks(MOST_SAMPLES // 51))
    assert {"rank", "role"} == samples[0].labels.keys()
    assert len(encode(m.MetricsReply(1, samples))) < DEFAULT_MAX_BYTES // 2


def test_samples_of_a_thousand_ranks_are_summed_by_role_and_shares_averaged() -> None:
    samples = {sample.name: sample for sample in bounded(of_ranks(1000))}
    assert len(samples) == 51
    assert samples["tokens_0_total"] == m.Metric(
        "tokens_0_total", "counter", HELP, {"role": "decode"}, 2000.0
    )
    assert samples["kv_cache_usage_perc"].value == 0.25
