"""A whole cluster as one child process: start `mooncake-lite serve`, wait until it is ready, stop it.

Called by the demo, by benchmarks, and by tests and labs that need a cluster. It knows the command line and
`/health`, nothing else. The child runs in a session of its own, so that Ctrl-C reaches the caller alone,
which then stops it; if the caller itself is killed, the kernel tells the child to stop.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from mooncake_lite.errors import ClusterError
from mooncake_lite.launch.child import start_child

STOP_LIMIT_S = 8.0
"""`serve` promises to end within 5 s of SIGTERM; past this it is killed, and its ranks end with it."""
POLL_S = 0.1

FIRST_PORT, PORTS = 20_000, 12_000
"""Below the range of outgoing connections, which begins at 32768 by default: one could take a port of that
range before the server starts to listen. Tests that run at the same time choose from parts of it."""


def free_port() -> int:
    """Choose a TCP port of the loopback interface on which no process listens now."""
    while True:
        port = FIRST_PORT + secrets.randbelow(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for_end(process: subprocess.Popen[Any], limit_s: float) -> None:
    """Wait for a process that has been told to end, and kill it if it does not."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(limit_s)


class Cluster:
    """One run of `mooncake-lite serve FLAGS` on a free port; use it in a `with` statement.

    flags      what follows `serve`; --host and --port are added
    log        file that takes the child's output
    program    how to call the command (tests give another one)
    child      env, user, group and the like, as for subprocess.Popen (tests start another user's cluster)
    """

    def __init__(self, flags: list[str], log: Path, program: tuple[str, ...] = (), **child: Any) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._child = child
        program = program or (sys.executable, "-m", "mooncake_lite", "serve")
        self._argv = [*program, *flags, "--host", "127.0.0.1", "--port", str(self.port)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the command."""
        assert self._process is not None, "the cluster is not running"
        return self._process.pid

    def __enter__(self) -> Cluster:
        with self._log.open("wb") as log:
            streams: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, **self._child}
            self._process = start_child(self._argv, new_session=True, stdin=subprocess.DEVNULL, **streams)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self, limit_s: float, tell: Callable[[str], None] = lambda text: None) -> float:
        """Wait until /health answers 200; return the seconds it took.

        tell   called with the server's own words about what it is waiting for, when they change
        Raises ClusterError, with the child's last line, when it ends first or is not ready in time.
        """
        started = time.monotonic()
        told = ""
        with httpx.Client(trust_env=False, timeout=2.0) as client:
            while time.monotonic() - started < limit_s:
                self.check_running()
                ready, detail = _health(client, self.base_url)
                if ready:
                    return time.monotonic() - started
                if detail and detail != told:
                    tell(detail)
                    told = detail
                time.sleep(POLL_S)
        raise ClusterError(
            f"the cluster was not ready within {limit_s:.0f} s; its last words: {self.last_words()}"
        )

    def check_running(self) -> None:
        """Raises ClusterError when the child has ended."""
        code = self._process.poll() if self._process else None
        if code is not None:
            raise ClusterError(f"mooncake-lite serve ended with exit code {code}: {self.last_words()}")

    def last_words(self) -> str:
        """The last line that the child has printed."""
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        return last.removeprefix("mooncake-lite: error: ")

    def stop(self) -> float:
        """Stop the child and wait for its end; return the seconds it took. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return 0.0
        started = time.monotonic()
        process.terminate()
        wait_for_end(process, STOP_LIMIT_S)
        return time.monotonic() - started


def _health(client: httpx.Client, base_url: str) -> tuple[bool, str]:
    """(ready, what the server says about it); not ready and no words while nobody listens yet."""
    try:
        response = client.get(f"{base_url}/health")
    except httpx.HTTPError:
        return False, ""
    try:
        body = response.json()
    except ValueError:
        body = {}
    detail = body.get("detail", "") if isinstance(body, dict) else ""
    return response.status_code == 200, str(detail)
