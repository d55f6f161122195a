"""A launcher with dummy ranks: started, looked at from outside, ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mooncake_lite.launch import processes
from mooncake_lite.launch.run_dir import ENVIRONMENT, RunDir
from mooncake_lite.launch.serve_child import free_port
from tests.patience import wait_until

PROGRAM = Path(__file__).with_name("run_launcher.py")
LIMIT_S = 30.0
STOP_LIMIT_S = 5.0


class DummyCluster:
    """One launcher process. Its run folder lies in `base`, so that it can be found from outside."""

    def __init__(self, base: Path, behaviour: str, rank: int | None = None):
        self.base = base
        self.output = base / "output.txt"
        words = [sys.executable, str(PROGRAM), str(free_port()), behaviour]
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(base)}
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                words + ([] if rank is None else [str(rank)]),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._ranks: dict[int, int] = {}

    @property
    def run_dir(self) -> Path | None:
        return next(iter(self.base.glob("mooncake-lite.*")), None)

    def said(self, text: str) -> bool:
        return text in self.output.read_text(errors="replace")

    def wait_until_serving(self) -> None:
        assert wait_until(lambda: self.said("serving ") or self.process.poll() is not None)
        assert self.said(f"; run folder: {self.run_dir})"), self.output.read_text()
        self.remember()

    def remember(self) -> None:
        """Note the processes of the job while its folder can still be found."""
        assert self.run_dir is not None
        self._ranks = processes.processes_with(ENVIRONMENT, str(self.run_dir))
        assert self._ranks

    def pid_of(self, rank: int) -> int:
        assert self.run_dir is not None
        folder = RunDir.join(self.run_dir)
        try:
            return folder.states()[rank].pid
        finally:
            folder.leave()

    def ready_ranks(self) -> list[int]:
        assert self.run_dir is not None
        folder = RunDir.join(self.run_dir)
        try:
            return [rank for rank, state in folder.states().items() if state.state == "ready"]
        finally:
            folder.leave()

    def mpirun_pid(self) -> int:
        names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in self._ranks}
        return next(pid for pid, name in names.items() if name in ("prterun", "mpirun"))

    def end(self, number: int) -> tuple[int, float]:
        """Send a signal to the launcher; its exit code and the seconds that it took."""
        started = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S), time.monotonic() - started

    def nobody_left(self, limit_s: float = 0.0) -> bool:
        """No process of the job runs (any more, after at most limit_s)."""
        return wait_until(lambda: not any(processes.alive(*item) for item in self._ranks.items()), limit_s)

    def files_left(self) -> list[str]:
        return sorted(path.name for path in self.base.iterdir() if path != self.output)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid, started in self._ranks.items():
            processes.send(pid, started, signal.SIGKILL)


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., DummyCluster]]:
    """start(behaviour, rank=None) -> DummyCluster; whatever is left of them at the end is killed."""
    clusters = []

    def make(behaviour: str, rank: int | None = None) -> DummyCluster:
        clusters.append(DummyCluster(tmp_path_factory.mktemp("c"), behaviour, rank))
        return clusters[-1]

    shared_memory = set(os.listdir("/dev/shm"))
    yield make
    for cluster in clusters:
        cluster.close()
    jobs = {re.sub(r"\.\d+$", "", name) for name in set(os.listdir("/dev/shm")) - shared_memory}
    left = [name for name in jobs if not _used(name)]
    assert not [name for name in left if name.startswith("sm_segment.")]


def _used(job: str) -> bool:
    """Some process maps the files of this job: they belong to somebody else's running one."""
    return any(
        any(name.startswith(job) for name in processes.mapped_segments(folder.name))
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit()
    )
