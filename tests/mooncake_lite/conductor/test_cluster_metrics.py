"""The samples of a cluster, however many ranks it has, fit into a message."""

import pytest

from mooncake_lite import messages as m
from mooncake_lite.conductor.cluster_metrics import MOST_SAMPLES, bounded, rank_samples
from tests.mooncake_lite.control.test_pipelines import ROLES, Cluster
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


def ups(cluster: Cluster) -> dict[str, tuple[str, float]]:
    """Rank -> (the first one of its instance, whether it works)."""
    return {one.labels["rank"]: (one.labels["first"], one.value) for one in rank_samples(cluster.control)}


def test_each_rank_tells_the_first_one_of_its_instance_and_whether_it_works() -> None:
    cluster = Cluster()
    firsts = ["1", "1", "1", "4", "4", "4", "7", "8"]
    assert ups(cluster) == {str(rank): (first, 1.0) for rank, first in enumerate(firsts, 1)}
    assert [one.labels["role"] for one in rank_samples(cluster.control)] == ROLES[1:]
    cluster.lose(5)
    assert [rank for rank, (_, up) in ups(cluster).items() if not up] == ["5"]
    cluster.lose(4)
    assert [rank for rank, (_, up) in ups(cluster).items() if not up] == ["4", "5"]
    assert ups(cluster).keys() == set("12345678"), "a rank that is lost stays there"


def test_ranks_that_work_are_counted_by_role_where_there_are_too_many() -> None:
    metrics = of_ranks(MOST_SAMPLES // 51 + 1)
    for rank in range(1, 9):
        labels = {"rank": str(rank), "role": "member", "first": str(rank // 4 * 4)}
        metrics.append(m.Metric("rank_up", "gauge", HELP, labels, float(rank != 5)))
    (found,) = [one for one in bounded(metrics) if one.name == "rank_up"]
    assert (found.labels, found.value) == ({"role": "member"}, 7.0)
