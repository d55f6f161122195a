"""How a cluster ends: asked to, or by losing a part. Nothing may stay behind."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from mooncake_lite.demo.cluster import Cluster
from tests.cluster import machine
from tests.cluster.conftest import SMALL, START_LIMIT_S
from tests.patience import patient

pytestmark = pytest.mark.cluster


class Busy:
    """Keeps a long answer running on a cluster, as long as it lasts."""

    def __init__(self, cluster: Cluster) -> None:
        self._url = f"{cluster.base_url}/v1/completions"
        self._first = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        assert self._first.wait(60)

    def _run(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 3000, "stream": True, "ignore_eos": True}
        try:
            with httpx.stream("POST", self._url, json=body, timeout=60) as response:
                for _ in response.iter_lines():
                    self._first.set()
        except httpx.HTTPError:
            self._first.set()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster([*SMALL, "--ssd-dir", str(tmp_path / "tier")], tmp_path / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        yield cluster


def gone_within(processes: list[psutil.Process], limit_s: float) -> None:
    machine.wait_until(lambda: not machine.alive(processes), limit_s)
    assert machine.alive(processes) == []


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_polite_signal_to_the_command_ends_everything_within_five_seconds(
    cluster: Cluster, name: str, tmp_path: Path
) -> None:
    processes = machine.family(cluster.pid)
    assert len(processes) >= 7  # the command, mpirun, four ranks, the gateway
    folder = machine.run_dir(processes)
    assert (folder / "control").is_socket()
    segments = machine.shared_memory_of(folder)
    assert segments
    Busy(cluster)
    processes[0].send_signal(signal.Signals[name])
    gone_within(processes, patient(5.0))
    assert not list(tmp_path.glob("tier/*/*.open"))
    assert not folder.exists()
    assert not any(segment.exists() for segment in segments)
    assert "had not left by themselves" not in (tmp_path / "log").read_text()


def test_sigkill_of_the_command_ends_all_ranks_within_five_seconds(cluster: Cluster) -> None:
    processes = machine.family(cluster.pid)
    processes[0].kill()
    gone_within(processes, patient(5.0))


def test_sigkill_of_mpirun_ends_all_ranks_within_five_seconds(cluster: Cluster) -> None:
    processes = machine.family(cluster.pid)
    (mpirun,) = [p for p in processes if p.name() in ("mpirun", "prterun")]
    mpirun.kill()
    gone_within(processes, patient(5.0))
    assert "mpirun was killed" in cluster.last_words()


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_killed_rank_never_leaves_the_others_hanging_and_is_named(cluster: Cluster, rank: int) -> None:
    processes = machine.family(cluster.pid)
    (victim,) = [p for p in processes if machine.rank_of(p) == rank]
    Busy(cluster)
    victim.kill()
    gone_within(processes, patient(15.0))
    assert f"rank {rank}" in cluster.last_words()


def test_a_user_who_brings_the_launcher_gets_the_same_service(tmp_path: Path, free_port: int) -> None:
    """mpirun -n 4 mooncake-lite serve: Ctrl-C leaves the ranks a quarter of a second."""
    command = [*machine.mpirun(4), *machine.SERVE, *SMALL, "--port", str(free_port)]
    command += ["--ssd-dir", str(tmp_path / "tier")]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=machine.environment()
        )
    try:
        url = f"http://127.0.0.1:{free_port}"
        assert machine.wait_until(lambda: machine.healthy(url), START_LIMIT_S) < START_LIMIT_S
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        assert "Paris" in httpx.post(f"{url}/v1/completions", json=body, timeout=60).text
        family = machine.family(process.pid)
        process.send_signal(signal.SIGINT)
        process.wait(patient(5))
        gone_within(family, patient(5.0))
    finally:
        process.kill()
        process.wait(5)
    assert not list(tmp_path.glob("tier/*/*.open"))


def test_wrong_role_counts_for_the_ranks_given_are_refused_in_one_line(free_port: int) -> None:
    command = [*machine.mpirun(3), *machine.SERVE, "--port", str(free_port)]
    began = time.monotonic()
    answer = subprocess.run(command, capture_output=True, text=True, timeout=150, env=machine.environment())
    assert time.monotonic() - began < patient(30)
    assert answer.returncode == 2
    assert "mpirun started 3 ranks" in answer.stderr
    assert "Traceback" not in answer.stderr
