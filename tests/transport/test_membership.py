"""transport.membership: a death is told once, with its reason; slowness is no death."""

import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import patient, wait_until
from transport import membership
from transport.channel import CurveKeys, Spoke
from transport.membership import Beat, BeatAnswer, Heart, Monitor
from transport.pids import ProcessWatch, process_exists
from transport.wire import Decoder

LIMIT_S = 20.0


@pytest.fixture
def told() -> queue.SimpleQueue:
    return queue.SimpleQueue()


@pytest.fixture
def dead_s() -> float:
    """After how much silence a peer is given up."""
    return patient(0.6)


@pytest.fixture
def monitor(tmp_path: Path, told: queue.SimpleQueue, dead_s: float) -> Iterator[Monitor]:
    monitor = Monitor(
        [f"ipc://{tmp_path}/heart"], ["a", "b"], 0.05, dead_s, on_lost=lambda name, why: told.put((name, why))
    )
    yield monitor
    monitor.stop()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_a_silent_peer_is_lost_and_told_of_once_and_the_other_is_not(monitor: Monitor, told) -> None:
    heart = Heart(monitor.endpoints[0], "a", 0.05)
    with Spoke(monitor.endpoints[0], "b", Decoder(BeatAnswer)) as once:
        once.send(Beat(1))
        assert once.receive(LIMIT_S) == [BeatAnswer(1)]
        name, reason = told.get(timeout=LIMIT_S)
        assert (name, list(monitor.lost())) == ("b", ["b"])
        assert "no sign of life for" in reason
        once.send(Beat(2))  # too late: what was told stays
        assert once.receive(LIMIT_S) == [BeatAnswer(2)]
    assert wait_until(lambda: heart.seconds_since_monitor() < 0.2)
    heart.stop()
    assert list(monitor.lost()) == ["b"]
    assert told.empty()


@pytest.mark.quick
def test_a_peer_that_says_goodbye_is_not_missed(monitor: Monitor, told, sleeper: subprocess.Popen) -> None:
    heart = Heart(monitor.endpoints[0], "a", 0.05)
    monitor.watch_pid("a", sleeper.pid)
    assert wait_until(lambda: monitor.counters()["messages_in"] >= 2)
    heart.stop()
    assert wait_until(lambda: "a" in monitor._left)
    sleeper.kill()
    sleeper.wait()
    assert not eventually_told(told)
    assert monitor.lost() == {}


def eventually_told(told: queue.SimpleQueue, wait_s: float = 0.3) -> bool:
    try:
        told.get(timeout=wait_s)
    except queue.Empty:
        return False
    return True


@pytest.mark.quick
@pytest.mark.parametrize("with_pidfd", [True, False], ids=["pidfd", "signal 0"])
def test_a_killed_local_process_is_told_of_at_once(
    monitor: Monitor, told, sleeper: subprocess.Popen, with_pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_pidfd:
        monkeypatch.delattr("os.pidfd_open")
    heart = Heart(monitor.endpoints[0], "a", 0.05)
    monitor.watch_pid("a", sleeper.pid)
    assert wait_until(lambda: monitor._watch._fds)
    start = time.monotonic()
    sleeper.kill()
    assert told.get(timeout=LIMIT_S) == ("a", f"its process {sleeper.pid} ended")
    assert time.monotonic() - start < patient(0.5)
    heart.stop()


@pytest.mark.quick
def test_a_process_that_is_gone_before_it_is_watched_is_lost(monitor: Monitor, told) -> None:
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    monitor.watch_pid("b", gone.pid)
    assert told.get(timeout=LIMIT_S)[0] == "b"


@pytest.mark.parametrize("suspended", [True, False])
def test_a_silent_local_process_gets_longer_unless_it_is_suspended(
    monitor: Monitor, told, sleeper: subprocess.Popen, dead_s: float, suspended: bool
) -> None:
    if suspended:
        sleeper.send_signal(signal.SIGSTOP)
    with Spoke(monitor.endpoints[0], "a", Decoder(BeatAnswer)) as once:
        start = time.monotonic()
        once.send(Beat(1))
        assert once.receive(LIMIT_S) == [BeatAnswer(1)]
        monitor.watch_pid("a", sleeper.pid)
        name, reason = told.get(timeout=LIMIT_S)
    assert name == "a"
    assert "no sign of life" in reason
    assert ("is suspended" in reason) == suspended
    took_s = time.monotonic() - start
    assert dead_s < took_s
    assert (took_s > dead_s * membership.STUCK_FACTOR) == (not suspended)


@pytest.mark.quick
def test_a_monitor_that_was_itself_stopped_declares_nobody_dead() -> None:
    monitor = Monitor.__new__(Monitor)
    monitor._tick_s, monitor._dead_s, monitor._first_s = 0.25, 3.0, 60.0
    monitor._peers = {"a": membership._Peer(100.0, 90.0), "b": membership._Peer(None, 90.0)}
    monitor._lost, monitor._left, monitor._watch = {}, set(), ProcessWatch()
    monitor._lock = membership.threading.Lock()
    monitor._forgive(49.0)  # this thread was last run at 101, and is again at 150
    assert monitor._dead(150.0) == []
    assert monitor._dead(152.1) == [("a", "no sign of life for 3.1 s")]


@pytest.mark.quick
def test_a_peer_has_longer_for_its_first_beat(tmp_path: Path, told) -> None:
    start = time.monotonic()
    monitor = Monitor(
        [f"ipc://{tmp_path}/h"], ["late"], 0.025, 0.2, on_lost=lambda *lost: told.put(lost), first_s=0.7
    )
    assert told.get(timeout=LIMIT_S)[0] == "late"
    assert time.monotonic() - start >= 0.7
    monitor.stop()


@pytest.mark.quick
def test_heartbeats_over_tcp_with_keys(told) -> None:
    keys = CurveKeys.generate()
    monitor = Monitor(["tcp://127.0.0.1:*"], ["far"], 0.05, 5.0, keys)
    heart = Heart(monitor.endpoints[0], "far", 0.02, keys.for_server(keys.server_public))
    assert wait_until(lambda: monitor.counters()["messages_in"] > 2)
    assert monitor.lost() == {}
    heart.stop()
    monitor.stop()


@pytest.mark.quick
def test_a_heart_notices_that_its_monitor_is_gone(monitor: Monitor) -> None:
    heart = Heart(monitor.endpoints[0], "a", 0.05)
    assert wait_until(lambda: monitor.counters()["messages_out"] > 1)
    monitor.stop()
    assert wait_until(lambda: heart.seconds_since_monitor() > 0.4)
    heart.stop()


@pytest.mark.quick
def test_a_process_that_ended_and_was_not_collected_does_not_exist() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    assert wait_until(lambda: not process_exists(process.pid))
    assert process.wait() == 0
