"""The gateway as a child process of rank 0: its settings file, start and end.

The gateway is no MPI rank; it is started before MPI, so that it shares nothing with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.control.events import GatewayLost
from mooncake_lite.launch.child import start_child
from mooncake_lite.launch.processes import how_it_ended
from mooncake_lite.launch.run_dir import RunDir
from mooncake_lite.launch.verdict import GATEWAY_PROCESS
from transport.curve import CurveKeys

MOST_STARTS, WITHIN_S = 5, 60.0
"""A gateway that ends by itself more often than this would end again: the cluster stops."""


class GatewayProcess:
    """The running gateway. `curve`: keys of its own TCP endpoint, with the cluster's client pair.

    name   of the present process: its requests and tokens are not those of an earlier one
    """

    def __init__(
        self,
        run_dir: RunDir,
        config: ServeConfig,
        folder: Path,
        fingerprint: bytes,
        weights: str,
        max_len: int,
        curve: CurveKeys,
    ) -> None:
        self._settings = {
            "config": config.to_dict(),
            "model_folder": str(folder),
            "served_id": config.served_model_name or folder.name,
            "max_model_len": max_len,
            "fingerprint": fingerprint.hex(),
            "weights": weights,
            "curve": replace(curve, client_secret=""),
            "parent_pid": os.getpid(),
        }
        self._run_dir = run_dir
        self._starts: list[float] = []
        self._num_starts, self._is_over = 0, False
        self.start()

    def start(self) -> None:
        """Start a process, the first or the next one."""
        self._starts.append(time.monotonic())
        self.name, self._num_starts = f"gateway-{self._num_starts}", self._num_starts + 1
        path = self._run_dir.path / "gateway.json"
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(self._settings | {"name": self.name}))
        command = [sys.executable, "-m", "mooncake_lite.gateway", str(self._run_dir.path)]
        # A session of its own: mpirun kills the process group of a rank 0.25 s after its SIGTERM, and clients
        # are still to read why their answers end. The gateway follows rank 0's death in any case.
        self._child = start_child(command, new_session=True, stdin=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._child.pid

    def lost(self) -> GatewayLost | None:
        """Return the loss of the process, once, and start the next one; None while it runs.

        The loss is final when it has ended too often.
        """
        code = self._child.poll()
        if code is None or self._is_over:
            return None
        name, reason = self.name, f"{GATEWAY_PROCESS} {self.pid} {how_it_ended(code)}"
        self._starts = [at for at in self._starts if time.monotonic() - at < WITHIN_S]
        self._is_over = len(self._starts) > MOST_STARTS
        if not self._is_over:
            self.start()
        return GatewayLost(name, reason, self._is_over)

    def stop(self, limit_s: float) -> None:
        """Wait for its end. After limit_s, kill it."""
        try:
            self._child.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(5.0)
