"""What a cluster consists of on this machine, seen from outside: processes, files, sockets."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from mooncake_lite.launch.mpirun import AS_ROOT, COMMON, PROFILES
from mooncake_lite.launch.run_dir import ENVIRONMENT
from mooncake_lite.ranks.metrics import REPORT_EVERY_S
from mooncake_lite.tools.streams import CHILDREN

KEEP_ALL = httpx.Limits(max_keepalive_connections=None, keepalive_expiry=None)
"""For a client of many threads: one that closes what is idle may close what another thread was just given."""


def run_dir(processes: list[psutil.Process]) -> Path:
    """The run folder that a launcher told its ranks."""
    for process in processes:
        folder = process.environ().get(ENVIRONMENT)
        if folder:
            return Path(folder)
    raise AssertionError("no process knows a run folder")


def shared_memory_of(folder: Path) -> list[Path]:
    """Files in /dev/shm that Open MPI made for the ranks of a run folder, whether they exist or not."""
    found = []
    for file in folder.glob("rank-*.json"):
        found += [Path("/dev/shm") / name for name in json.loads(file.read_text())["segments"]]
    return found


def family(pid: int) -> list[psutil.Process]:
    """A process and everything it has started."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[str]:
    """Those that have not ended."""
    running = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.append(f"{process.pid} {' '.join(process.cmdline()[-6:])}")
        except psutil.NoSuchProcess:
            continue
    return running


def settled(read: Callable[[], float], limit_s: float = 10.0) -> float:
    """What read() gives once three reports of a rank have not changed it. read(): see scraped."""
    value, since = read(), time.monotonic()
    until = since + limit_s
    while time.monotonic() - since < 3 * REPORT_EVERY_S:
        assert time.monotonic() < until, f"still changing after {limit_s:g} s: {value:g}"
        time.sleep(0.1)
        if (now := read()) != value:
            value, since = now, time.monotonic()
    return value


def resident_bytes(processes: list[psutil.Process]) -> int:
    """Proportional set size of all: memory they share is counted once."""
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


SERVE = [sys.executable, "-m", "mooncake_lite", "serve"]


def mpirun(ranks: int) -> list[str]:
    """A user's own mpirun line, as the README gives it."""
    beside = Path(sys.executable).with_name("mpirun")
    return [str(beside), "-n", str(ranks), *COMMON, *PROFILES["ft"]]


def environment() -> dict[str, str]:
    """As a user has it; root has to say that it means it."""
    return {**os.environ, **(AS_ROOT if os.geteuid() == 0 else {})}


def healthy(url: str) -> bool:
    """Whether a server answers /health with 200."""
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def metric(url: str, name: str) -> float:
    """The sum of all samples in /metrics whose name ends in this pattern, labels apart."""
    return samples(url, rf"\w*?{name}(?:{{.*}})?")


def samples(url: str, pattern: str) -> float:
    """The sum of all samples in /metrics whose name, with its labels, is this pattern."""
    return summed(scraped(url), pattern)


def open_requests(url: str) -> float:
    """How many requests the gateway has admitted, by its own count, which no answer of the conductor ages."""
    return summed(httpx.get(f"{url}/metrics", timeout=10).text, "gateway_open_requests")


def scraped(url: str) -> str:
    """An answer of /metrics for which the conductor was asked after this call: the gateway keeps answers."""
    began = time.monotonic()
    with httpx.Client(timeout=10) as client:
        while (waited_s := time.monotonic() - began) < 10.0:
            text = client.get(f"{url}/metrics").text
            if summed(text, "cluster_metrics_age_seconds") <= waited_s:
                return text
            time.sleep(0.05)
    raise AssertionError(f"no new answer of the conductor within {waited_s:.0f} s")


def summed(metrics: str, pattern: str) -> float:
    """The same of one answer of /metrics, whose samples belong together."""
    found = re.findall(rf"^mooncake_lite_?{pattern} (\S+)$", metrics, re.MULTILINE)
    assert found, f"no metric {pattern}"
    return sum(map(float, found))


def name_of(process: psutil.Process) -> str:
    """The MPI rank of a process, one of CHILDREN, or "" for any other."""
    try:
        command = process.cmdline()
    except psutil.Error:
        return ""
    rank = rank_of(process)
    names = [name for name in CHILDREN if f"mooncake_lite.{name}" in command]
    return names[0] if names else str(rank) if rank >= 0 else ""


def rank_of(process: psutil.Process) -> int:
    """The MPI rank of a process, -1 when it has none."""
    try:
        if "serve" not in process.cmdline():
            return -1
        return int(process.environ().get("OMPI_COMM_WORLD_RANK", -1))
    except psutil.Error:
        return -1
