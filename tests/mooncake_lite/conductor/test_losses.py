"""Which ranks are lost: each is told once, by any thread, and those that are to end are killed first."""

import threading

import pytest

from mooncake_lite.conductor.losses import Losses
from mooncake_lite.control.events import RankLost

pytestmark = pytest.mark.quick


def test_each_loss_is_taken_once_in_order_and_wakes_the_conductor() -> None:
    woken = threading.Semaphore(0)
    losses = Losses(woken.release)
    assert losses.take() is None
    losses.on_lost("rank-2", "its process 5 ended", True)
    losses.on_lost("rank-3", "no sign of life for 6.1 s", False)
    losses.on_fatal("monitor", "KeyError: 1")
    assert losses.take() == RankLost(2, 0, "died: its process 5 ended", True)
    assert losses.take() == RankLost(3, 0, "died: no sign of life for 6.1 s", False)
    assert losses.take() == RankLost(0, 0, "failed: thread monitor died: KeyError: 1")
    assert losses.take() is None
    assert [woken.acquire(blocking=False) for _ in range(4)] == [True, True, True, False]


def test_a_rank_that_fails_is_killed_and_lost_when_its_end_was_seen() -> None:
    losses, killed = Losses(lambda: None), []
    losses.end = lambda name, reason: killed.append((name, reason))
    losses.end_rank(2, "failed: out of paper")
    losses.end_rank(3, "sent a malformed PutsEnded")
    assert killed == [
        ("rank-2", "failed: out of paper"),
        ("rank-3", "failed: sent a malformed PutsEnded"),
    ]
    assert losses.take() is None
    losses.on_lost(*killed[0], True)
    assert losses.take() == RankLost(2, 0, "failed: out of paper", True)
