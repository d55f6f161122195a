"""A rank as a process: its place, its signals, its end. Each test that ends a process has a child for it."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest

from mooncake_lite.launch import processes
from mooncake_lite.launch.child import start_child
from mooncake_lite.launch.place import Place, world_from_environment
from mooncake_lite.launch.rank_process import MPIRUN_PID, _Unbreakable
from tests.patience import wait_until
from tests.python import printed_by, python

pytestmark = pytest.mark.quick


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program in a child process, with everything of rank_process imported."""
    source = f"import os, signal, sys, time\nfrom mooncake_lite.launch.rank_process import *\n{program}"
    return python("-c", source, **environment)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, Place(2, 4, "mpirun")),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, Place(1, 3, "PMI")),
        ({"PMIX_RANK": "3", "SLURM_NTASKS": "4"}, Place(3, 4, "srun")),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8"}, Place(0, 2, "srun")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # a batch script, not a rank
        ({"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "4"}, None),
    ],
)
def test_the_place_in_a_job_is_read_from_the_environment(
    environment: dict[str, str], place: Place | None
) -> None:
    assert world_from_environment(environment) == place


def test_a_blocked_signal_reaches_the_watching_thread_while_the_main_thread_is_busy() -> None:
    done = run(
        "block_stop_signals(); watch_signals(lambda name: (print(name, flush=True), os._exit(7)))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)  # as a kernel: a handler would wait"
    )
    assert (done.returncode, done.stdout) == (7, "SIGTERM\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_watching_thread_though_a_thread_of_a_library_takes_it(number: int) -> None:
    """OpenBLAS starts threads when numpy is imported, and numpy comes with the configuration."""
    done = run(
        "import threading; idle = threading.Event()\n"
        "threading.Thread(target=idle.wait, daemon=True).start()\n"
        "block_stop_signals(); watch_signals(lambda name: (print(name, flush=True), os._exit(7)))\n"
        f"os.kill(os.getpid(), {int(number)}); idle.wait(30)"
    )
    assert (done.returncode, done.stdout) == (7, f"{signal.Signals(number).name}\n")


def test_an_exit_limit_ends_a_process_that_hangs() -> None:
    started = time.perf_counter()
    done = run("exit_within(0.1, 5); signal.pause()")
    assert done.returncode == 5
    assert time.perf_counter() - started < 30


def test_an_exit_limit_ends_even_a_process_that_never_lets_go_of_the_interpreter() -> None:
    done = run("exit_within(0.1, 5); sum(range(10**10))")
    assert done.returncode in (5, -signal.SIGALRM)


def test_printing_to_nobody_does_not_end_the_clean_up() -> None:
    done = run(
        "read, write = os.pipe(); os.close(read); os.dup2(write, 1); os.dup2(write, 2); shield_output()\n"
        "print('x' * 100_000, flush=True); print('y', file=sys.stderr, flush=True)\n"
        "os._exit(3)"
    )
    assert done.returncode == 3


def test_what_is_safe_to_print_to_is_otherwise_the_stream_itself() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        stream = _Unbreakable(io.TextIOWrapper(full, write_through=True))
        assert (stream.write("lost"), stream.isatty(), stream.buffer) == (4, False, full)


def test_a_process_whose_mpirun_died_before_it_could_ask_ends_by_sigterm() -> None:
    gone = printed_by("-c", "import os; print(os.getpid())").strip()
    done = run("die_with_parent(); print('still here')", **{MPIRUN_PID: gone})
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


def test_a_process_under_a_daemon_of_a_living_mpirun_goes_on() -> None:
    done = run("die_with_parent(); print('still here')", **{MPIRUN_PID: str(os.getppid())})
    assert (done.returncode, done.stdout) == (0, "still here\n")


def test_a_child_dies_with_its_parent_and_hears_signals_that_the_parent_has_blocked() -> None:
    grandchild = (
        "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True); signal.pause()"
    )
    parent = (
        "from mooncake_lite.launch.child import start_child\nblock_stop_signals()\n"
        f"child = start_child([sys.executable, '-c', {grandchild!r}], announce='MINE', stdout=sys.stdout)\n"
        "print(child.pid, flush=True); signal.pause()"
    )
    source = f"import signal, sys\nfrom mooncake_lite.launch.rank_process import *\n{parent}"
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    with process.stdout:
        number, signals = sorted(process.stdout.readline() for _ in range(2))  # either may come first
        pid = int(number)
        assert signals == "set()\n"
    started = processes.start_time(pid)
    assert processes.processes_with("MINE", str(pid)) == {pid: started}
    process.kill()
    process.wait()
    assert wait_until(lambda: not processes.alive(pid, started))


def test_a_command_that_cannot_be_run_is_told_by_exit_code_127() -> None:
    child = start_child(["/nonexistent/program"], stderr=subprocess.PIPE)
    with child.stderr:
        assert child.stderr.read() == b"/nonexistent/program: No such file or directory\n"
    assert child.wait(30) == 127


def test_processes_of_a_job_are_found_by_their_environment_and_named_for_good() -> None:
    environment = {**os.environ, "MOONCAKE_LITE_TEST": "unique-7f3a"}
    child = subprocess.Popen(["sleep", "60"], env=environment)
    try:
        assert wait_until(lambda: processes.processes_with("MOONCAKE_LITE_TEST", "unique-7f3a"))
        found = processes.processes_with("MOONCAKE_LITE_TEST", "unique-7f3a")
        assert list(found) == [child.pid]
        processes.send(
            child.pid, found[child.pid] + 1, signal.SIGKILL
        )  # an older process of this pid: not it
        assert child.poll() is None
        processes.send(child.pid, found[child.pid], signal.SIGKILL)
        assert child.wait(30) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()
    assert not processes.alive(child.pid, found[child.pid])
    assert (processes.start_time(child.pid), processes.mapped_segments(child.pid)) == (0, [])


def test_a_signal_is_sent_where_no_descriptor_for_the_process_is_to_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    monkeypatch.setattr(os, "kill", kill := Mock())
    me, started = os.getpid(), processes.start_time(os.getpid())
    processes.send(me, started + 1, signal.SIGKILL)
    assert not kill.called, "another process of this pid was meant"
    processes.send(me, started, signal.SIGKILL)
    kill.assert_called_once_with(me, signal.SIGKILL)
