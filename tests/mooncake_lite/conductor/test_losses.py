"""Which rank is lost: the first that was told of, by any thread."""

import threading

import pytest

from mooncake_lite.conductor.losses import Losses
from mooncake_lite.control.events import RankLost

pytestmark = pytest.mark.quick


def test_the_first_loss_stays_and_each_wakes_the_conductor() -> None:
    woken = threading.Semaphore(0)
    losses = Losses(woken.release)
    assert losses.first() is None
    losses.on_lost("rank-2", "its process 5 ended")
    losses.on_fatal("monitor", "KeyError: 1")
    assert losses.first() == RankLost(2, 0, "died: its process 5 ended")
    assert woken.acquire(blocking=False)
    assert woken.acquire(blocking=False)


def test_a_thread_of_the_conductor_that_dies_is_named() -> None:
    losses = Losses(lambda: None)
    losses.on_fatal("monitor", "KeyError: 1")
    assert losses.first() == RankLost(0, 0, "failed: thread monitor died: KeyError: 1")
