"""Two clusters on one host, of two users where the machine allows it: they never meet."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from mooncake_lite.config.cache import VARIABLE
from mooncake_lite.launch.serve_child import Cluster
from tests import emulation
from tests.cluster import asking, machine, tiny
from tests.cluster.conftest import START_LIMIT_S
from tests.patience import patient, wait_until

NOBODY = 65534
AS_NOBODY: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}


@cache
def no_stranger() -> str:
    """Why no cluster can be started as another user here; "" when one can."""
    if os.geteuid() != 0:
        return "only root can start a cluster as another user"
    try:
        subprocess.run(
            [sys.executable, "-c", "import mooncake_lite"],
            cwd="/", check=True, capture_output=True, timeout=60, **AS_NOBODY,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return f"another user may not run {os.path.realpath(sys.executable)}"
    return ""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two clusters that serve the same model; the second one is the stranger's where there is one."""

    first: Cluster
    second: Cluster


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """In a folder that any user may enter, which pytest's own are not."""
    home = Path(tempfile.mkdtemp(prefix="ml-users-"))
    try:
        home.chmod(0o755)
        model = emulation.flags(home / "model")
        own = home / "stranger"
        own.mkdir()
        second: dict[str, Any] = {}
        if not no_stranger():
            for path in home.rglob("*"):
                path.chmod(0o755)
            os.chown(own, NOBODY, NOBODY)
            kept = {
                k: v
                for k, v in os.environ.items()
                if k not in (VARIABLE, "NUMBA_CACHE_DIR", "XDG_RUNTIME_DIR")
            }
            second = {**AS_NOBODY, "env": {**kept, "HOME": str(own), "TMPDIR": "/tmp"}, "cwd": str(own)}
        flags = [*model, *tiny.SIZES, "--ssd-dir"]
        with (
            Cluster([*flags, str(home / "tier")], home / "log a") as a,
            Cluster([*flags, str(own / "tier")], home / "log b", **second) as b,
        ):
            a.wait_ready(START_LIMIT_S)
            b.wait_ready(START_LIMIT_S)
            yield Pair(a, b)
    finally:
        shutil.rmtree(home)


def test_another_user_cannot_look_into_a_clusters_folder(pair: Pair) -> None:
    if reason := no_stranger():
        pytest.skip(reason)
    folders = [machine.run_dir(machine.family(cluster.pid)) for cluster in (pair.first, pair.second)]
    assert [folder.stat().st_uid for folder in folders] == [0, NOBODY]
    assert {process.uids().effective for process in machine.family(pair.second.pid)} == {NOBODY}
    for folder, may in zip(folders, (False, True)):
        for path in (folder, folder / "gateway.json"):
            look = ["ls", "-l", str(path)]
            assert (subprocess.run(look, capture_output=True, timeout=20, **AS_NOBODY).returncode == 0) is may


def test_two_clusters_side_by_side_never_meet_and_one_whose_mpirun_is_killed_ends_alone(pair: Pair) -> None:
    """The second one has cached nothing of what the first one was asked, and outlives it."""
    prompts = tiny.prompts(6)
    expected = asking.emulated_texts(prompts)
    first, second = pair.first.base_url, pair.second.base_url
    assert asking.ask_all(first, prompts[:1])[0] == expected[:1]
    assert asking.ask_all(second, prompts[:1]) == (expected[:1], [0])
    family: list[psutil.Process] = machine.family(pair.first.pid)
    (mpirun,) = [process for process in family if process.name() in ("mpirun", "prterun")]
    mpirun.kill()
    wait_until(lambda: not machine.alive(family), patient(5.0))
    assert machine.alive(family) == []
    assert "mpirun was killed" in pair.first.last_words()
    assert asking.ask_all(second, prompts)[0] == expected
