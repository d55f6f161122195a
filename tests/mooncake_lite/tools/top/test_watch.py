"""What a watch keeps: samples of the last seconds, and since when the server is silent."""

from __future__ import annotations

import pytest

from mooncake_lite.tools.top.watch import WINDOW_S, Watch
from tests.mooncake_lite.tools.top.samples import sample

pytestmark = pytest.mark.quick


def test_figures_are_of_the_last_seconds() -> None:
    watch = Watch("here", "", sample(0.0, ""))
    assert watch.figures().seconds == 0
    for second in range(1, 31):
        watch.take(sample(float(second), f'decode_tokens_total{{rank="1",role="decode"}} {second**2}'))
        assert watch.figures().seconds == min(second, WINDOW_S)
    assert watch.figures().answer_tokens_per_s == (30**2 - 25**2) / WINDOW_S


def test_after_a_silence_the_figures_are_of_the_whole_time() -> None:
    watch = Watch("here", "", sample(0.0, ""))
    watch.take(sample(1.0, ""))
    watch.take(sample(61.0, 'decode_tokens_total{rank="1",role="decode"} 120'))
    assert (watch.figures().seconds, watch.figures().answer_tokens_per_s) == (60.0, 2.0)


def test_the_seconds_of_silence_are_counted_from_the_last_answer() -> None:
    watch = Watch("here", "q quit", sample(10.0, ""))
    assert watch.state(11.0).silent_s == 0
    watch.fail("HTTP 500")
    assert (watch.state(14.0).silent_s, watch.state(14.0).problem) == (4.0, "HTTP 500")
    watch.take(sample(15.0, ""))
    assert (watch.state(15.0).silent_s, watch.state(15.0).problem) == (0.0, "")
