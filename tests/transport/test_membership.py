"""transport.membership: a death is told once, with its reason; slowness is no death, silence leads to one."""

import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.patience import patient, wait_until
from transport import membership
from transport.channel import CurveKeys, Spoke
from transport.membership import Beat, BeatAnswer, Heart, Monitor
from transport.messaging.pids import ProcessWatch, process_exists
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
        [f"ipc://{tmp_path}/heart"], ["a", "b"], 0.05, dead_s, on_lost=lambda *lost: told.put(lost)
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
        name, reason, ended = told.get(timeout=LIMIT_S)
        assert (name, list(monitor.lost())) == ("b", ["b"])
        assert not ended, "nobody has seen it end"
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
    assert told.get(timeout=LIMIT_S) == ("a", f"its process {sleeper.pid} ended", True)
    assert time.monotonic() - start < patient(0.5)
    heart.stop()


@pytest.mark.quick
def test_a_process_that_is_gone_before_it_is_watched_is_lost(monitor: Monitor, told) -> None:
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    monitor.watch_pid("b", gone.pid)
    assert told.get(timeout=LIMIT_S) == ("b", f"its process {gone.pid} ended", True)


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
        name, reason, ended = told.get(timeout=LIMIT_S)
    took_s = time.monotonic() - start
    assert (name, ended) == ("a", True)
    assert "no sign of life" in reason
    assert ("is suspended" in reason) == suspended
    assert sleeper.wait(LIMIT_S) == -signal.SIGKILL, "it was killed, also if it was suspended"
    assert told.empty()
    assert dead_s < took_s
    assert (took_s > dead_s * membership.STUCK_FACTOR) == (not suspended)


@pytest.mark.quick
@pytest.mark.parametrize("with_pidfd", [True, False], ids=["pidfd", "signal 0"])
def test_a_watched_process_that_is_to_end_is_killed_and_lost_for_that_reason(
    monitor: Monitor, told, sleeper: subprocess.Popen, with_pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_pidfd:
        monkeypatch.delattr("os.pidfd_open")
    monitor.watch_pid("a", sleeper.pid)
    monitor.end("a", "failed: out of paper")
    assert told.get(timeout=LIMIT_S) == ("a", "failed: out of paper", True)
    assert sleeper.wait(LIMIT_S) == -signal.SIGKILL
    assert monitor.lost() == {"a": "failed: out of paper"}
    monitor.end("a", "it is gone already")
    assert not eventually_told(told)


@pytest.mark.quick
def test_a_peer_of_another_host_that_is_to_end_is_lost_at_once_though_it_may_live(
    monitor: Monitor, told
) -> None:
    monitor.end("b", "failed: out of paper")
    assert told.get(timeout=LIMIT_S) == ("b", "failed: out of paper", False)
    monitor.end("b", "failed: out of ink")
    assert not eventually_told(told)
    assert monitor.lost() == {"b": "failed: out of paper"}


@pytest.mark.quick
def test_a_peer_that_is_to_end_for_two_reasons_is_lost_once(monitor: Monitor, told) -> None:
    with monitor._lock:  # both are seen in one turn
        monitor._to_end += [("b", "failed: out of paper"), ("b", "failed: out of ink")]
    assert told.get(timeout=LIMIT_S) == ("b", "failed: out of paper", False)
    assert not eventually_told(told)
    assert monitor.lost() == {"b": "failed: out of paper"}


@pytest.mark.quick
def test_a_peer_that_has_left_is_not_killed(monitor: Monitor, told, sleeper: subprocess.Popen) -> None:
    monitor.watch_pid("a", sleeper.pid)
    monitor.forget("a")
    monitor.end("a", "failed: out of paper")
    assert not eventually_told(told)
    assert process_exists(sleeper.pid)


class Immortal(ProcessWatch):
    """A watch whose processes outlive SIGKILL, as one does that waits for a broken disk."""

    def __init__(self) -> None:
        super().__init__()
        self.killed: list[str] = []

    def kill(self, name: str) -> None:
        """Note the name."""
        self.killed.append(name)


@pytest.mark.quick
def test_a_process_that_outlives_its_end_is_killed_once_and_lost_after_a_while() -> None:
    monitor = asleep({"a": membership._Peer(100.0, 90.0, pid=1)})
    watch = monitor._watch = Immortal()
    monitor.end("a", "failed: out of paper")
    assert monitor._dead(101.0) == []
    assert monitor._dead(108.9) == []
    assert monitor._dead(109.1) == [("a", "failed: out of paper", False)], "what it was killed for"
    assert watch.killed == ["a"]


def asleep(peers: dict[str, membership._Peer]) -> Monitor:
    """A monitor without a thread. A peer is silent for too long after 3 s."""
    monitor = Monitor.__new__(Monitor)
    monitor._tick_s, monitor._dead_s, monitor._first_s = 0.25, 3.0, 60.0
    monitor._peers, monitor._lost, monitor._left, monitor._to_end = peers, {}, set(), []
    monitor._watch, monitor._lock = ProcessWatch(), membership.threading.Lock()
    monitor._hub = SimpleNamespace(wake=lambda: None, send=lambda *_: None)  # type: ignore[assignment]
    monitor.starting, monitor.term = False, 0
    return monitor


@pytest.mark.quick
def test_a_monitor_that_was_itself_stopped_declares_nobody_dead() -> None:
    monitor = asleep({"a": membership._Peer(100.0, 90.0), "b": membership._Peer(None, 90.0)})
    monitor._forgive(49.0)  # this thread was last run at 101, and is again at 150
    assert monitor._dead(150.0) == []
    assert monitor._dead(152.1) == [("a", "no sign of life for 3.1 s", False)]


@pytest.mark.quick
def test_a_peer_that_is_lost_or_has_left_is_judged_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(membership, "process_is_stopped", asked.append)
    monitor = asleep({name: membership._Peer(100.0, 90.0, pid) for pid, name in enumerate("abc", 1)})
    monitor._lost["a"] = "its process 1 ended"
    monitor.forget("b")
    assert monitor._dead(104.0) == []
    assert asked == [3], "the number of a process that has ended may be another one's by now"


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
def test_a_peer_that_imports_at_the_start_may_be_silent_for_longer_after_a_beat_too() -> None:
    monitor = asleep({"a": membership._Peer(None, 90.0)})
    monitor.starting = True
    monitor._note("a", Beat(1), 100.0)
    assert monitor._dead(159.0) == []
    assert monitor._dead(160.1) == [("a", "no sign of life in its first 60.1 s", False)]
    monitor.starting = False
    assert monitor._dead(103.1) == [("a", "no sign of life for 3.1 s", False)]


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


@pytest.mark.quick
@pytest.mark.parametrize("with_pidfd", [True, False], ids=["pidfd", "signal 0"])
def test_a_process_that_has_ended_can_be_killed_again(
    with_pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_pidfd:
        monkeypatch.delattr("os.pidfd_open")
    watch = ProcessWatch()
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    watch.add("a", process.pid)
    watch.kill("a")
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    watch.kill("a")
    assert [(name, pid) for name, pid, _ in watch.ended()] == [("a", process.pid)]
    watch.close()


def test_a_heart_learns_the_term_of_its_monitor(monitor: Monitor) -> None:
    heart = Heart(monitor.endpoints[0], "a", 0.05)
    monitor.term = 3
    assert wait_until(lambda: heart.term == 3, LIMIT_S)
    heart.stop()
