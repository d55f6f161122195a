"""Where an installed Mooncake Store is, and how to start its master: the peer of our store.

Used by `store_objects` and by the test that holds both to the same promises.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "MOONCAKE_LITE_PEER_PYTHON"
"""Names the interpreter whose environment has the peer, when it is not this one."""

START_S = 15.0

PROBE = """
import importlib.util, pathlib, sys
found = importlib.util.find_spec("mooncake")
runtime = importlib.util.find_spec("nvidia.cuda_runtime") if importlib.util.find_spec("nvidia") else None
print(list(found.submodule_search_locations)[0] if found else "")
print(list(runtime.submodule_search_locations)[0] if runtime else "")
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """A Mooncake Store that can be imported. environment: for its processes."""

    python: str
    master: Path
    environment: dict[str, str]


def find_peer() -> Peer | str:
    """The peer, or why there is none."""
    python = os.environ.get(VARIABLE) or sys.executable
    try:
        places = _output([python, "-c", PROBE], dict(os.environ)).splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return f"{python} cannot be asked: {error}"
    if not places or not places[0]:
        return "Mooncake Store is not installed: pip install 'mooncake-lite[peers]'"
    environment = {**os.environ, "GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"}
    environment.pop("PYTHONPATH", None)
    if len(places) > 1 and places[1]:  # the wheel wants libcudart, which another wheel brings
        paths = [f"{places[1]}/lib", environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
    try:
        _output([python, "-c", "import mooncake.store"], environment)
    except subprocess.CalledProcessError as error:
        return f"Mooncake Store cannot be imported: {error.stderr.strip().splitlines()[-1]}"
    except (OSError, subprocess.SubprocessError) as error:
        return f"Mooncake Store cannot be imported: {error}"
    return Peer(python, Path(places[0]) / "mooncake_master", environment)


def _output(line: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout


@contextlib.contextmanager
def peer_master(peer: Peer, lease_ms: int) -> Iterator[str]:
    """Its master on a free port; "HOST:PORT". Raises RuntimeError when it does not listen in time."""
    port, other = _free_port(), _free_port()
    line = [str(peer.master), f"--rpc_port={port}", f"--metrics_port={other}"]
    process = subprocess.Popen(
        [*line, f"--default_kv_lease_ttl={lease_ms}"],
        env=peer.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for_port(port)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the peer's master does not listen after {START_S:.0f} s")
