"""Whatever ends a cluster: all of it ends, within five seconds, and nothing stays behind.

The ranks are dummies (dummy_rank.py) under a real mpirun; real ones are ended in tests/cluster.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mooncake_lite.launch import run_dir
from mooncake_lite.tracing.tracer import PartFile, Tracer
from tests.mooncake_lite.launch.conftest import LIMIT_S, STOP_LIMIT_S, DummyCluster
from tests.mooncake_lite.tracing.reading import read
from tests.patience import patient, wait_until

Start = Callable[..., DummyCluster]

alone = pytest.mark.cluster
"""What is promised within seconds is tested on an idle machine."""


@alone
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_command_ends_everything_with_exit_code_0(start: Start, number: int) -> None:
    cluster = start("serve")
    cluster.wait_until_serving()
    code, seconds = cluster.end(number)
    assert (code, cluster.nobody_left(), cluster.files_left()) == (0, True, [])
    assert seconds < patient(STOP_LIMIT_S)
    assert not cluster.said("killed")
    assert not cluster.said("had not left by themselves")


@alone
def test_ranks_inside_mpi_finalise_and_leave_no_shared_memory(start: Start) -> None:
    cluster = start("mpi")
    cluster.wait_until_serving()
    code, seconds = cluster.end(signal.SIGTERM)
    assert (code, cluster.nobody_left(), cluster.files_left()) == (0, True, [])
    assert seconds < patient(STOP_LIMIT_S)


@alone
def test_a_rank_that_hears_nothing_is_killed_before_five_seconds_are_over(start: Start) -> None:
    """Two clusters at once: rank 0 of one is deaf, and rank 2 of the other."""
    clusters = [start("stubborn", deaf) for deaf in (0, 2)]
    for cluster in clusters:
        cluster.wait_until_serving()
    os.kill(clusters[0].pid_of(0), signal.SIGSTOP)  # not even its threads run
    told = time.monotonic()
    for cluster in clusters:
        cluster.process.send_signal(signal.SIGTERM)
    for cluster in clusters:
        assert cluster.process.wait(LIMIT_S) == 0
        assert time.monotonic() - told < patient(STOP_LIMIT_S)
        assert (cluster.nobody_left(), cluster.files_left()) == (True, [])
        assert cluster.said("ranks had not left by themselves after 4.")  # exit code 0 does not tell
    assert clusters[1].said("every other rank has stopped; killed: rank 2 (decode)\n")


@alone
def test_a_second_signal_kills_at_once(start: Start) -> None:
    cluster = start("stubborn", 2)
    cluster.wait_until_serving()
    cluster.process.send_signal(signal.SIGINT)
    assert wait_until(lambda: cluster.said("stopping"))
    code, seconds = cluster.end(signal.SIGINT)
    assert (code, cluster.nobody_left(), cluster.files_left()) == (130, True, [])
    assert seconds < patient(2.0)


@alone
def test_a_stop_while_ranks_are_starting_is_a_stop_as_well(start: Start) -> None:
    cluster = start("silent")
    assert wait_until(lambda: cluster.said("rank 3 (store): waking up"))
    cluster.remember()
    code, seconds = cluster.end(signal.SIGTERM)
    assert (code, cluster.nobody_left(), cluster.files_left()) == (0, True, [])
    assert seconds < patient(STOP_LIMIT_S)


@alone
def test_ranks_that_are_ready_get_their_time_before_the_command_has_seen_the_gateway_answer(
    start: Start,
) -> None:
    cluster = start("unheard")
    assert wait_until(lambda: cluster.run_dir is not None)
    assert wait_until(lambda: len(cluster.ready_ranks()) == 4 and (cluster.run_dir / "control").exists())
    cluster.remember()
    code, _ = cluster.end(signal.SIGTERM)
    assert (code, cluster.nobody_left(), cluster.files_left()) == (0, True, [])
    assert not cluster.said("had not left by themselves")


def test_sigkill_of_the_command_ends_all_ranks_and_the_last_one_removes_the_folder(start: Start) -> None:
    cluster = start("mpi")
    cluster.wait_until_serving()
    cluster.process.kill()
    assert cluster.nobody_left(patient(STOP_LIMIT_S))
    assert wait_until(lambda: not cluster.files_left()), cluster.files_left()


def test_what_stays_when_all_processes_are_killed_at_once_goes_with_the_next_start(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start("mpi")
    cluster.wait_until_serving()
    command = psutil.Process(cluster.process.pid)
    family = [command, *command.children(recursive=True)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in family:
            process.send_signal(number)
    assert psutil.wait_procs(family, patient(STOP_LIMIT_S))[1] == []
    assert cluster.files_left()
    monkeypatch.setattr(run_dir, "bases", lambda: [cluster.base])
    run_dir.sweep()
    assert cluster.files_left() == []


def test_sigkill_of_mpirun_ends_all_ranks_and_the_command_says_so(start: Start) -> None:
    cluster = start("mpi")
    cluster.wait_until_serving()
    os.kill(cluster.mpirun_pid(), signal.SIGKILL)
    assert cluster.nobody_left(patient(STOP_LIMIT_S))
    assert cluster.process.wait(patient(STOP_LIMIT_S)) == 1
    assert cluster.said("error: mpirun was killed by signal 9 (SIGKILL)")
    assert cluster.files_left() == []


def test_a_killed_rank_is_named_and_the_others_end(start: Start) -> None:
    """Two clusters at once: rank 0 of one is killed, and rank 2 of the other."""
    reasons = {0: "rank 0 (steward) died: ", 2: "rank 2 (decode) died: its process has ended"}
    clusters = {victim: start("mpi") for victim in reasons}
    for cluster in clusters.values():
        cluster.wait_until_serving()
    for victim, cluster in clusters.items():
        os.kill(cluster.pid_of(victim), signal.SIGKILL)
    for victim, cluster in clusters.items():
        assert cluster.process.wait(LIMIT_S) == 1
        assert (cluster.nobody_left(), cluster.files_left()) == (True, [])
        assert cluster.said(f"mooncake-lite: error: {reasons[victim]}"), cluster.output.read_text()


def test_the_end_names_the_rank_that_ended_the_cluster_and_not_one_that_was_lost_before(start: Start) -> None:
    cluster = start("survive")
    cluster.wait_until_serving()
    os.kill(cluster.pid_of(3), signal.SIGKILL)
    command = psutil.Process(cluster.process.pid)
    turns = command.num_ctx_switches().voluntary
    assert wait_until(lambda: command.num_ctx_switches().voluntary > turns + 5)  # it has looked
    os.kill(cluster.pid_of(0), signal.SIGKILL)
    assert cluster.process.wait(LIMIT_S) == 1
    assert cluster.said("mooncake-lite: error: rank 0 (steward) died: "), cluster.output.read_text()


def test_ranks_that_are_lost_long_before_a_stop_just_before_it_and_during_it_are_named(start: Start) -> None:
    cluster = start("survive")
    cluster.wait_until_serving()
    os.kill(cluster.pid_of(3), signal.SIGKILL)
    os.kill(cluster.pid_of(0), signal.SIGSTOP)  # the stop takes as long as this test needs
    os.kill(cluster.pid_of(2), signal.SIGKILL)
    cluster.process.send_signal(signal.SIGTERM)
    assert wait_until(lambda: cluster.said("stopping"))
    os.kill(cluster.pid_of(1), signal.SIGKILL)
    os.kill(cluster.pid_of(0), signal.SIGCONT)
    assert cluster.process.wait(LIMIT_S) == 0
    assert cluster.said("every other rank has stopped; lost before: "), cluster.output.read_text()
    assert all(cluster.said(name) for name in ("rank 1 (prefill)", "rank 2 (decode)", "rank 3 (store)"))
    assert not cluster.said("killed: ")
    assert not cluster.said("every rank has stopped")


def test_a_killed_rank_leaves_the_trace_of_what_was_written_until_then(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACE", str(tmp_path / "run.json"))
    cluster = start("serve")
    cluster.wait_until_serving()
    tracer = Tracer(2, "rank 2", PartFile(tmp_path / "run.json", 2))
    tracer.slice(tracer.lane("steps"), "decode", 5_000_000, 7_000_000)
    tracer.flush()
    os.kill(cluster.pid_of(2), signal.SIGKILL)
    assert cluster.process.wait(LIMIT_S) == 1
    assert [one.name for one in read(tmp_path / "run.json").slices] == ["decode"]
    assert cluster.said(f"trace of 1 processes: {tmp_path}/run.json"), cluster.output.read_text()


def test_two_clusters_side_by_side_do_not_meet(start: Start) -> None:
    first, second = start("mpi"), start("mpi")
    first.wait_until_serving()
    second.wait_until_serving()
    code, _ = first.end(signal.SIGTERM)
    assert (code, first.nobody_left()) == (0, True)
    assert second.process.poll() is None
    assert not second.nobody_left()
    code, _ = second.end(signal.SIGTERM)
    assert (code, second.nobody_left(), second.files_left()) == (0, True, [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_end_before_any_rank_has_come_leaves_nothing(start: Start, number: int) -> None:
    cluster = start("serve")
    assert wait_until(lambda: cluster.run_dir is not None)
    cluster.end(number)
    assert wait_until(lambda: not cluster.files_left()), cluster.files_left()


def test_a_start_that_fails_tells_the_first_cause_with_its_exit_code(start: Start) -> None:
    """A cluster for each cause, all at once."""
    died = "rank 2 (decode) died: "
    causes = {
        "refuse": (1, "rank 2 (decode) failed: it does not like it here\n"),
        "deny": (2, "config.json is missing\n"),
        "vanish": (1, died),
        "unborn": (1, died),
        "stillborn": (1, died),
    }
    clusters = {behaviour: start(behaviour, 2) for behaviour in causes}
    for behaviour, (code, reason) in causes.items():
        cluster = clusters[behaviour]
        assert cluster.process.wait(LIMIT_S) == code, behaviour
        assert cluster.said(f"mooncake-lite: error: {reason}"), cluster.output.read_text()
        assert cluster.files_left() == []


def test_ranks_that_never_become_ready_are_given_up_with_what_they_were_doing(start: Start) -> None:
    limit_s = max(5, round(patient(3.0)))  # they need a second to say anything; 5 is the least allowed
    cluster = start("silent", limit_s)
    assert cluster.process.wait(LIMIT_S) == 1
    doing = "rank 0 (steward): waking up, rank 1 (prefill): waking up"
    assert cluster.said(f"not ready after {limit_s} s ({doing}"), cluster.output.read_text()
    assert cluster.files_left() == []


def test_what_ranks_print_is_shown_with_the_role_and_the_noise_of_mpirun_is_not(start: Start) -> None:
    cluster = start("chatter", 1)
    cluster.wait_until_serving()
    assert wait_until(
        lambda: cluster.said("prefill-1: words on stdout") and cluster.said("prefill-1: words on stderr")
    )
    cluster.end(signal.SIGTERM)
    assert not cluster.said("prterun")
