"""Two scrapes become rates, medians and shares; what is missing stays unknown."""

from __future__ import annotations

import pytest

from mooncake_lite.tools.top.figures import Flow, Lookups, Rank, _buckets, busiest, figures_of, quantile
from tests.mooncake_lite.tools.top.samples import figures, members, ranks, sample

pytestmark = pytest.mark.quick

PREFILL, DECODE, STORE = (
    f'{{rank="{n}",role="{role}"}}' for n, role in enumerate(("prefill", "decode", "store"), 1)
)


def test_rates_are_of_the_time_between_the_scrapes() -> None:
    found = figures(
        f"""prefill_computed_tokens_total{PREFILL} 100
decode_tokens_total{DECODE} 10
request_success_total{{finished_reason="stop"}} 3
request_success_total{{finished_reason="length"}} 1""",
        f"""prefill_computed_tokens_total{PREFILL} 400
decode_tokens_total{DECODE} 50
request_success_total{{finished_reason="stop"}} 4
request_success_total{{finished_reason="length"}} 4""",
    )
    assert (found.seconds, found.requests_per_s) == (2.0, 2.0)
    assert (found.prompt_tokens_per_s, found.answer_tokens_per_s) == (150.0, 20.0)


def test_a_counter_that_went_back_has_begun_again_at_0() -> None:
    moved = 'moved_bytes_total{op="read",peer="store",rank="1",role="prefill"}'
    histogram = 'time_to_first_token_seconds_bucket{{le="{}"}} {}'
    buckets = [
        "\n".join(histogram.format(bound, count) for bound, count in zip(("0.1", "0.2", "+Inf"), counts))
        for counts in ((500, 900, 1000), (0, 8, 8))
    ]
    found = figures(
        f"decode_tokens_total{DECODE} 5000\n{moved} 1e9\n{buckets[0]}",
        f"decode_tokens_total{DECODE} 30\n{moved} 4e6\n{buckets[1]}",
    )
    assert found.answer_tokens_per_s == 15.0
    assert found.flows == [Flow("store", "prefill", 2e6, 4e6)]
    assert found.ttft_s == pytest.approx(0.15)


def test_the_share_of_accepted_drafts_is_of_those_between_the_scrapes() -> None:
    def counted(*counts: tuple[str, str, int]) -> str:
        return "\n".join(f"spec_decode_num_{name}_tokens_total{rank} {n}" for name, rank, n in counts)

    before = counted(("draft", PREFILL, 100), ("draft", DECODE, 10), ("accepted", DECODE, 9))
    now = counted(("draft", PREFILL, 130), ("draft", DECODE, 20), ("accepted", DECODE, 29))
    assert figures(before, now).accepted_share == 0.5
    assert figures(now, now).accepted_share is None
    assert figures("", "").accepted_share is None


def test_a_counter_that_was_not_there_before_has_grown_from_0() -> None:
    assert figures("", f"decode_tokens_total{DECODE} 30").answer_tokens_per_s == 15.0


def test_of_one_scrape_alone_and_of_missing_metrics_nothing_is_claimed() -> None:
    only = sample(5.0, f"decode_tokens_total{DECODE} 30\nkv_cache_pages{DECODE} 8")
    found = figures_of(only, only)
    assert (found.seconds, found.answer_tokens_per_s, found.requests_per_s) == (0.0, None, None)
    assert (found.ttft_s, found.tpot_s, found.cached_share) == (None, None, None)
    assert found.ranks == [Rank(2, "decode", None, 8, None, None, None, 0.0, (2,))]
    assert (found.tiers, found.flows, found.stages) == ([], [], {})
    empty = sample(5.0, "uptime_seconds 3", server="")
    found = figures_of(empty, empty)
    assert (found.model, found.ready, found.uptime_s) == ("", None, 3.0)


def test_the_median_is_interpolated_in_its_bucket() -> None:
    assert quantile([(0.1, 0.0), (0.2, 10.0), (float("inf"), 10.0)], 0.5) == pytest.approx(0.15)
    assert quantile([(0.1, 4.0), (0.2, 4.0), (float("inf"), 5.0)], 0.5) == pytest.approx(0.0625)
    assert quantile([(0.1, 0.0), (float("inf"), 7.0)], 0.5) == 0.1, "the largest bound that is known"
    assert quantile([(0.1, 0.0), (float("inf"), 0.0)], 0.5) is None
    assert quantile([], 0.5) is None


def test_buckets_without_a_bound_count_for_nothing() -> None:
    name = "time_to_first_token_seconds"
    lines = [f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in (("x", 9), ("0.5", 3), ("+Inf", 4))]
    assert _buckets(sample(0.0, "\n".join(lines)), name) == {0.5: 3.0, float("inf"): 4.0}


def test_a_median_is_of_what_came_between_the_scrapes() -> None:
    gap = 'inter_token_latency_seconds_bucket{{le="{}"}} {}'
    before = "\n".join(gap.format(bound, count) for bound, count in (("0.01", 90), ("0.1", 90), ("+Inf", 90)))
    now = "\n".join(gap.format(bound, count) for bound, count in (("0.01", 90), ("0.1", 94), ("+Inf", 94)))
    assert figures(before, now).tpot_s == pytest.approx(0.055)
    assert figures(now, now).tpot_s is None


def test_a_row_has_the_pages_of_an_engine_or_the_segment_of_a_store() -> None:
    found = figures(
        f"prefill_computed_tokens_total{PREFILL} 0",
        f"""kv_cache_pages{PREFILL} 100
kv_cache_pages_used{PREFILL} 25
prefill_requests_waiting{PREFILL} 3
prefill_requests_running{PREFILL} 1
prefill_computed_tokens_total{PREFILL} 64
pool_segment_bytes{PREFILL} 50
pool_segment_free_bytes{PREFILL} 50
pool_segment_bytes{STORE} 1000
pool_segment_free_bytes{STORE} 400
tier_reader_queued{STORE} 2
tier_writer_queued{STORE} 5
kv_cache_pages{{rank="one",role="no number"}} 7""",
    )
    assert found.ranks == [
        Rank(1, "prefill", 25, 100, 3, 1, 32.0, 0.0, (1,)),
        Rank(3, "store", 600, 1000, 7, None, None, 0.0, (3,)),
    ]


def test_a_rank_of_both_duties_has_one_row_and_a_request_that_waits_for_its_pages_does_not_run() -> None:
    compute = '{rank="1",role="compute"}'
    found = figures(
        f"""prefill_computed_tokens_total{compute} 0
decode_tokens_total{compute} 0""",
        f"""kv_cache_pages{compute} 100
kv_cache_pages_used{compute} 25
prefill_requests_waiting{compute} 1
prefill_requests_running{compute} 3
decode_requests_waiting{compute} 2
decode_requests_running{compute} 4
prefill_computed_tokens_total{compute} 64
decode_tokens_total{compute} 8""",
    )
    assert found.ranks == [Rank(1, "compute", 25, 100, 3, 5, 36.0, 0.0, (1,))]


def test_the_pool_is_shown_by_tier_and_lookups_by_what_they_found() -> None:
    found = figures(
        """pool_blocks_looked_up_total 100
pool_hits_dram_total 40
pool_hits_ssd_total 10""",
        f"""pool_segment_bytes{STORE} 1000
pool_segment_free_bytes{STORE} 400
pool_segment_blocks{STORE} 6
pool_segment_bytes{DECODE} 200
pool_segment_free_bytes{DECODE} 100
pool_segment_blocks{DECODE} 1
tier_capacity_bytes{STORE} 5000
tier_bytes{STORE} 300
tier_open_bytes{STORE} 30
pool_keys_ssd 3
pool_blocks_looked_up_total 120
pool_hits_dram_total 50
pool_hits_ssd_total 15
prefix_cache_queries_total 1000
prefix_cache_hits_total{{tier="dram"}} 500
prefix_cache_hits_total{{tier="ssd"}} 100""",
    )
    shown = [(tier.name, tier.used_bytes, tier.capacity_bytes, tier.blocks) for tier in found.tiers]
    assert shown == [("DRAM", 600, 1000, 6), ("lent DRAM", 100, 200, 1), ("HDF5", 330, 5000, 3)]
    assert (found.recent, found.ever) == (Lookups(20, 10, 5), Lookups(120, 50, 15))
    assert found.cached_share == 0.6


def test_kv_flows_from_the_rank_that_is_read_to_the_reader_and_from_the_writer_to_the_rank_written() -> None:
    lines = """moved_bytes_total{op="read",peer="store",rank="2",role="decode"} 4
moved_bytes_total{op="write",peer="store",rank="2",role="decode"} 6
moved_bytes_total{op="read",peer="prefill",rank="2",role="decode"} 8
moved_bytes_total{op="read",peer="prefill",rank="4",role="decode"} 8
moved_bytes_total{op="write",peer="store",rank="1",role="prefill"} 0
tier_bytes_written_total{rank="3",role="store"} 10
tier_bytes_loaded_total{rank="3",role="store"} 2"""
    found = figures("", lines)
    assert [(flow.source, flow.target, flow.bytes_per_s) for flow in found.flows] == [
        ("prefill", "decode", 8.0),
        ("decode", "store", 3.0),
        ("store", "decode", 2.0),
        ("store", "HDF5", 5.0),
        ("HDF5", "store", 1.0),
    ]


def test_an_instance_is_one_row_with_what_all_its_ranks_have_moved() -> None:
    found = figures("", members())
    assert [(one.name, one.role, one.moved_bytes, one.trouble) for one in found.ranks] == [
        ("1", "prefill", 100, ""), ("2-4", "decode", 200 + 300 + 400, ""), ("5-7", "decode", 1800, ""),
    ]  # fmt: skip
    flows = [(flow.source, flow.target, flow.total_bytes) for flow in found.flows]
    assert flows == [("store", "prefill", 100), ("store", "decode", 2700), ("store", "store", 800)]


def test_a_member_that_is_lost_shows_and_so_does_an_instance_that_has_died() -> None:
    found = figures("", members(6))
    assert [(one.name, one.total, one.trouble) for one in found.ranks if one.role == "decode"] == [
        ("2-4", 10, ""), ("5-7", 10, "6 down"),
    ]  # fmt: skip
    assert [one.number for one in busiest(found.ranks, 2)] == [1, 5]
    found = figures("", members(5, 6, 7, 8))
    assert [(one.name, one.role, one.total, one.trouble) for one in found.ranks if one.number > 2] == [
        ("5-7", "decode", None, "down"), ("8", "store", None, "down"),
    ]  # fmt: skip


def test_the_stages_of_a_pipeline_are_one_row_and_hidden_states_go_from_stage_to_stage() -> None:
    of = 'rank="{}",role="{}"'
    first, second = of.format(1, "prefill"), of.format(2, "stage")
    found = figures(
        "",
        f"""rank_up{{{first},first="1"}} 1
rank_up{{{second},first="1"}} 1
kv_cache_pages{{{first}}} 10
moved_bytes_total{{{second},op="read",peer="prefill"}} 7""",
    )
    assert [(one.name, one.role, one.moved_bytes) for one in found.ranks] == [("1-2", "prefill", 7)]
    assert [(flow.source, flow.target) for flow in found.flows] == [("prefill", "stage")]


def test_the_busiest_ranks_of_each_role_are_chosen_in_turn() -> None:
    found = figures("", ranks(64, 64)).ranks
    assert [rank.number for rank in busiest(found, 5)] == [62, 63, 64, 127, 128]
    assert busiest(found, 1000) == found
