"""What is read of `/metrics`, and what a foreign or hostile server cannot do with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mooncake_lite.tools.top.sample import MOST_LABEL, READ, NoAnswer, harmless, read_samples
from tests.mooncake_lite.tools.top.samples import sample

pytestmark = pytest.mark.quick

METRICS = Path(__file__).parents[4] / "docs/reference/metrics.md"


def test_each_metric_that_is_read_is_documented() -> None:
    documented = set(re.findall(r"`(\w+)`", METRICS.read_text(encoding="utf-8")))
    assert {name.removesuffix("_bucket") for name in READ} <= documented


def test_samples_are_summed_by_the_labels_that_are_asked_for() -> None:
    one = sample(5.0, 'moved_bytes_total{op="read",role="a"} 1\nmoved_bytes_total{op="write",role="a"} 2.5')
    assert one.by("moved_bytes_total", "role", "op") == {("a", "read"): 1, ("a", "write"): 2.5}
    assert one.by("moved_bytes_total", "role") == {("a",): 3.5}
    assert one.total("moved_bytes_total") == 3.5
    assert one.total("kv_cache_pages") is None


def test_impossible_values_are_left_out() -> None:
    one = sample(5.0, "\n".join(f'tier_bytes{{rank="{n}"}} {n}' for n in ("-1", "NaN", "+Inf", "1e30", "3")))
    assert one.by("tier_bytes", "rank") == {("3",): 3}


def test_a_label_reaches_no_terminal_as_a_command() -> None:
    hostile = "\x1b]0;title\x07\x1b[2J\u202eabc\u2028\x9b31m"
    assert harmless(hostile) == "?]0;title??[2J?abc??31m"
    assert harmless("汉字 é") == "汉字 é"
    assert len(harmless("x" * 1000)) == MOST_LABEL
    one = sample(1.0, f'requests_by_stage{{stage="{hostile}"}} 1')
    assert one.by("requests_by_stage", "stage") == {(harmless(hostile),): 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no mooncake-lite server"),
        ("<html>mooncake_lite_ready 1</html>", "no mooncake-lite server"),
        ("process_cpu_seconds_total 3\nvllm:num_requests_running 1", "no mooncake-lite server"),
        ("mooncake_lite_ready one", "not in Prometheus's format"),
        ("mooncake_lite_ready", "not in Prometheus's format"),
        ('mooncake_lite_ready{a="b",a="c"} 1', "not in Prometheus's format"),
        ('mooncake_lite_ready{a="' + "x" * 10_000 + '"} 1', "a sample of ready has 10027 characters"),
    ],
)
def test_what_is_not_ours_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(NoAnswer, match=why) as caught:
        read_samples(text)
    assert len(str(caught.value)) < 150
