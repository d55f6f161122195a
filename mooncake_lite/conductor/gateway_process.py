"""The gateway as a child process of rank 0: its settings file, start and end.

The gateway is no MPI rank; it is started before MPI, so that it shares nothing with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.launch.child import start_child
from mooncake_lite.launch.processes import how_it_ended
from mooncake_lite.launch.run_dir import RunDir
from mooncake_lite.launch.verdict import GATEWAY_PROCESS
from transport.curve import CurveKeys

NAME = "gateway-0"


class GatewayProcess:
    """One running gateway. `curve`: keys of its own TCP endpoint, with the cluster's client pair."""

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
        settings = {
            "config": config.to_dict(),
            "model_folder": str(folder),
            "served_id": config.served_model_name or folder.name,
            "max_model_len": max_len,
            "fingerprint": fingerprint.hex(),
            "weights": weights,
            "name": NAME,
            "curve": replace(curve, client_secret=""),
            "parent_pid": os.getpid(),
        }
        path = run_dir.path / "gateway.json"
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(settings))
        command = [sys.executable, "-m", "mooncake_lite.gateway", str(run_dir.path)]
        # A session of its own: mpirun kills the process group of a rank 0.25 s after its SIGTERM, and clients
        # are still to read why their answers end. The gateway follows rank 0's death in any case.
        self._child = start_child(command, new_session=True, stdin=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._child.pid

    def lost(self) -> str | None:
        """Return why the gateway has ended by itself; None while it runs."""
        code = self._child.poll()
        return None if code is None else f"{GATEWAY_PROCESS} {self.pid} {how_it_ended(code)}"

    def stop(self, limit_s: float) -> None:
        """Wait for its end. After limit_s, kill it."""
        try:
            self._child.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(5.0)
