"""How a cluster ends: asked to, or by losing a part. Nothing may stay behind."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from mooncake_lite.config.cache import VARIABLE
from mooncake_lite.errors import ClusterError
from mooncake_lite.launch.serve_child import Cluster
from tests import emulation
from tests.cluster import asking, machine, tiny
from tests.cluster.conftest import SMALL, START_LIMIT_S
from tests.patience import patient, wait_until

pytestmark = pytest.mark.cluster


LONG = 4096
COLD_START_LIMIT_S = 90.0
"""What a start may take that has to compile every kernel."""


@contextmanager
def started(home: Path) -> Iterator[Cluster]:
    """A cluster with an SSD tier that the next one takes over. Answers of LONG tokens last some seconds."""
    flags = [*emulation.flags(home / "model"), *tiny.SIZES[:-1], str(LONG), "--ssd-dir", str(home / "tier")]
    flags += ["--eviction", "leaves-first"]  # one that needs to know what each block hangs on
    with Cluster(flags, home / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        yield cluster


def gone_within(processes: list[psutil.Process], limit_s: float) -> None:
    wait_until(lambda: not machine.alive(processes), limit_s)
    assert machine.alive(processes) == []


def assert_ends_everything(cluster: Cluster, number: signal.Signals) -> None:
    """A signal to the command ends all processes within five seconds, and nothing stays but the tier."""
    processes = machine.family(cluster.pid)
    assert len(processes) >= 7  # the command, mpirun, four ranks, the gateway
    folder = machine.run_dir(processes)
    assert (folder / "control").is_socket()
    assert (folder / "gateway.json").exists()  # with the keys
    segments = machine.shared_memory_of(folder)
    assert segments
    asking.Busy(cluster.base_url, LONG - 100)
    processes[0].send_signal(number)
    gone_within(processes, patient(5.0))
    assert not folder.exists()
    assert not any(segment.exists() for segment in segments)


def test_a_signal_to_the_command_leaves_nothing_but_the_tier_and_the_next_cluster_answers_from_hdf5(
    tmp_path: Path,
) -> None:
    """Greedy answers are the same, from HDF5 after a restart too. A bad file is a miss."""
    prompts = tiny.prompts()
    expected, full = asking.emulated_texts(prompts), asking.full_blocks(prompts)
    with started(tmp_path) as cluster:
        assert asking.ask_all(cluster.base_url, prompts)[0] == expected
        assert asking.ask_all(cluster.base_url, prompts) == (expected, full)
        on_their_way = functools.partial(machine.metric, cluster.base_url, "pool_saving")
        assert wait_until(lambda: on_their_way() == 0, 30.0)  # however slow the disk
        assert_ends_everything(cluster, signal.SIGTERM)
        assert_ended_politely(tmp_path)
    with started(tmp_path) as cluster:
        assert asking.ask_all(cluster.base_url, prompts) == (expected, full)
        assert_ends_everything(cluster, signal.SIGINT)
        assert_ended_politely(tmp_path)
    files = list((tmp_path / "tier").rglob("seg-*.h5"))
    assert files
    for file in files:
        damage(file)
    with started(tmp_path) as cluster:
        assert asking.ask_all(cluster.base_url, prompts[1::2]) == (expected[1::2], [0] * 4)
        bad = functools.partial(machine.metric, cluster.base_url, r"tier_(?:files|blocks)_bad\w*")
        assert wait_until(lambda: bad() > 0, 10.0)
        assert_ends_everything(cluster, signal.SIGKILL)


def assert_ended_politely(home: Path) -> None:
    """No file of the tier is left open, and no rank had to be killed."""
    assert not list(home.glob("tier/*/*.open"))
    assert "had not left by themselves" not in (home / "log").read_text()


def damage(file: Path) -> None:
    """Overwrite one page in twenty, which hits every block."""
    data = bytearray(file.read_bytes())
    assert 64 * tiny.TOKEN_NBYTES > 20 * 4096
    for start in range(4096, len(data), 20 * 4096):
        data[start : start + 4096] = bytes(4096)
    file.write_bytes(bytes(data))


def test_a_gateway_that_cannot_start_ends_the_start_with_its_own_words_and_exit_code_2(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its port is taken after the launcher has looked."""
    base = tmp_path_factory.mktemp("r")
    child = {"env": {**os.environ, "XDG_RUNTIME_DIR": str(base)}}
    with Cluster(emulation.flags(tmp_path / "model"), tmp_path / "log", **child) as cluster:
        assert wait_until(lambda: list(base.glob("mooncake-lite.*")))
        reason = f"exit code 2: cannot listen on 127.0.0.1:{cluster.port}: Address already in use"
        with socket.create_server(("127.0.0.1", cluster.port)), pytest.raises(ClusterError, match=reason):
            cluster.wait_ready(START_LIMIT_S)
    assert not list(base.iterdir())


DEAD_AFTER_S = 6.0


def assert_loss_of_steward_ends_everything(cluster: Cluster, blow: signal.Signals, says: str) -> None:
    """Rank 0 dies or hangs: the cluster ends, and users and clients are told why."""
    processes = machine.family(cluster.pid)
    named = {machine.name_of(p): p for p in processes}
    # mpirun kills the group of each rank; the gateway still has to tell its clients.
    assert os.getpgid(named["gateway"].pid) != os.getpgid(named["0"].pid)
    busy = asking.Busy(cluster.base_url, LONG - 100)
    named["0"].send_signal(blow)
    gone_within(processes, patient(DEAD_AFTER_S + 1 + 5.0 if blow == signal.SIGSTOP else 5.0))
    assert says in cluster.last_words()
    last_line = busy.last_line()
    assert '"error"' in last_line
    assert "rank 0 (steward)" in last_line
    assert "told to end" not in last_line
    if blow == signal.SIGKILL:
        assert says in last_line


def test_a_hung_steward_ends_the_cluster_and_is_named_to_users_and_clients(tmp_path: Path) -> None:
    """test_modes.py has one that dies, and test_users.py an mpirun."""
    with started(tmp_path) as cluster:
        says = "rank 0 (steward) gave no sign of life"
        assert_loss_of_steward_ends_everything(cluster, signal.SIGSTOP, says)


def test_a_user_who_brings_the_launcher_gets_the_same_service(
    tmp_path: Path, free_port: int, model_folder: Path, soak: int
) -> None:
    """mpirun -n 4 mooncake-lite serve; in `make soak` on a machine without compiled kernels.

    Ctrl-C leaves the ranks a quarter of a second.
    """
    limit_s = patient(COLD_START_LIMIT_S)
    cold = no_kernels(tmp_path, model_folder) if soak > 1 else {}
    command = [*machine.mpirun(4), *machine.SERVE, *SMALL, "--port", str(free_port)]
    command += ["--ssd-dir", str(tmp_path / "tier")]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env=machine.environment() | cold,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{free_port}"
        assert wait_until(lambda: machine.healthy(url), limit_s)
        assert bool(cold) == bool(list(tmp_path.glob("cache/kernels-*")))
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        assert "Paris" in httpx.post(f"{url}/v1/completions", json=body, timeout=60).text
        family = machine.family(process.pid)
        process.send_signal(signal.SIGINT)
        process.wait(patient(5))
        gone_within(family, patient(5.0))
    finally:
        process.kill()
        process.wait(5)
    assert re.search(rf"at {url} \(ranks: .*; run folder: /.+\)", (tmp_path / "log").read_text())
    assert not list(tmp_path.glob("tier/*/*.open"))


def no_kernels(tmp_path: Path, model_folder: Path) -> dict[str, str]:
    """What the environment says of a user whose cache holds the model and nothing else."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "models").symlink_to(model_folder.parent)
    return {VARIABLE: str(cache), "NUMBA_CACHE_DIR": ""}


def test_wrong_role_counts_for_the_ranks_given_are_refused_in_one_line(free_port: int) -> None:
    command = [*machine.mpirun(3), *machine.SERVE, "--port", str(free_port)]
    began = time.monotonic()
    answer = subprocess.run(command, capture_output=True, text=True, timeout=150, env=machine.environment())
    assert time.monotonic() - began < patient(30)
    assert answer.returncode == 2
    assert "mpirun started 3 ranks" in answer.stderr
    assert "Traceback" not in answer.stderr
