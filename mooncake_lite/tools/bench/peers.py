"""The peers of the engine and of the store: which interpreter has them, and processes that run them.

Used by the benchmarks of both, and by the test that holds both stores to the same promises.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_lite.errors import ClusterError
from mooncake_lite.launch.serve_child import free_port, wait_for_end

VARIABLE = "MOONCAKE_LITE_PEER_PYTHON"
"""Names an interpreter whose environment has peers that this one lacks."""

PROBE_S, START_S, STOP_S = 30.0, 15.0, 10.0

PLACES = """
import importlib.util
for name in ("mooncake", "nvidia.cuda_runtime"):
    found = importlib.util.find_spec(name) if importlib.util.find_spec(name.partition(".")[0]) else None
    print(list(found.submodule_search_locations)[0] if found else "")
"""


def interpreter_with(package: str) -> str | None:
    """Return a Python that has this package: this one, or that of $MOONCAKE_LITE_PEER_PYTHON."""
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    other = os.environ.get(VARIABLE)
    if not other:
        return None
    try:
        there = _output(other, f"import importlib.util\nprint(importlib.util.find_spec({package!r}))")
    except (OSError, subprocess.SubprocessError):
        return None
    return None if there == "None\n" else other


def _output(python: str, program: str, environment: Mapping[str, str] | None = None) -> str:
    line = [python, "-c", program]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=PROBE_S, check=True)
    return done.stdout


@dataclass(frozen=True, slots=True)
class StorePeer:
    """A Mooncake Store that can be imported. environment: for its processes."""

    python: str
    master: Path
    environment: dict[str, str]


def find_store_peer() -> StorePeer | str:
    """Return the peer of our store, or why there is none."""
    python = interpreter_with("mooncake")
    if python is None:
        return "Mooncake Store is not installed: pip install 'mooncake-lite[peers]'"
    environment = {**os.environ, "GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"}
    environment.pop("PYTHONPATH", None)
    try:
        package, runtime = _output(python, PLACES, environment).splitlines()
        if runtime:  # the wheel wants libcudart, which another wheel brings
            paths = [f"{runtime}/lib", environment.get("LD_LIBRARY_PATH", "")]
            environment["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
        _output(python, "import mooncake.store", environment)
    except subprocess.CalledProcessError as error:
        return f"Mooncake Store cannot be imported: {error.stderr.strip().splitlines()[-1]}"
    except (OSError, subprocess.SubprocessError) as error:
        return f"Mooncake Store cannot be imported: {error}"
    return StorePeer(python, Path(package) / "mooncake_master", environment)


@contextlib.contextmanager
def store_peer_master(peer: StorePeer, lease_ms: int) -> Iterator[str]:
    """Run its master on a free port; give "HOST:PORT". Raises ClusterError if it does not listen in time."""
    port = free_port()
    line = [str(peer.master), f"--rpc_port={port}", f"--metrics_port={free_port()}"]
    line += [f"--default_kv_lease_ttl={lease_ms}"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(line, env=peer.environment, stdout=quiet, stderr=quiet)
    try:
        _wait_for_port(port)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        wait_for_end(process, STOP_S)


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise ClusterError(f"the peer's master does not listen after {START_S:.0f} s")


class Worker:
    """One process that runs `peer_program`.

    arguments     of the program: the first one names the peer
    python        the interpreter
    limit_s       longest wait for an answer
    """

    def __init__(
        self, arguments: list[str], python: str, environment: Mapping[str, str], limit_s: float
    ) -> None:
        self._name = arguments[0]
        self._limit_s = limit_s
        self._process = subprocess.Popen(
            [python, "-c", Path(__file__).with_name("peer_program.py").read_text(), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )
        self._heard = b""

    def tell(self, do: str, **values: Any) -> None:
        """Give an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **values}).encode() + b"\n")

    def answer(self) -> Any:
        """Return the answer to the oldest order. Raises ClusterError when none comes within limit_s."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + self._limit_s
        while True:
            line, newline, rest = self._heard.partition(b"\n")
            if newline:
                self._heard = rest
                if line.startswith(b"ANSWER"):
                    return json.loads(line[6:])
                continue  # a word of a library
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._process.stdout.fileno(), 2**16) if ready else b""
            if not data:
                raise ClusterError(f"{self._name} did not answer within {self._limit_s:.0f} s, or ended")
            self._heard += data

    def ask(self, do: str, **values: Any) -> Any:
        """Give an order and return its answer."""
        self.tell(do, **values)
        return self.answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        wait_for_end(self._process, STOP_S)
        self._process.stdout.close()
