"""A gateway that ends by itself is followed by the next one, unless it ends again and again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_lite.conductor import gateway_process
from mooncake_lite.conductor.gateway_process import MOST_STARTS, WITHIN_S, GatewayProcess
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.control.events import GatewayLost
from tests.patience import wait_until
from transport.curve import CurveKeys

pytestmark = pytest.mark.quick


class Machine:
    """Starts sleepers in place of gateways, and has a clock.

    settings   that each was started with
    children   that were started
    now        seconds
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 1000.0
        self.settings: list[dict[str, Any]] = []
        self.children: list[subprocess.Popen[bytes]] = []

    def start_child(self, command: list[str], **_: Any) -> subprocess.Popen[bytes]:
        """Start a process that does nothing."""
        assert command[1:] == ["-m", "mooncake_lite.gateway", str(self.folder)]
        self.settings.append(json.loads((self.folder / "gateway.json").read_text()))
        sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
        self.children.append(subprocess.Popen(sleeper))
        return self.children[-1]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    monkeypatch.setattr(gateway_process, "start_child", machine.start_child)
    monkeypatch.setattr(gateway_process, "time", SimpleNamespace(monotonic=lambda: machine.now))
    yield machine
    for child in machine.children:
        child.kill()
        child.wait()


@pytest.fixture
def gateway(machine: Machine) -> GatewayProcess:
    run_dir: Any = SimpleNamespace(path=machine.folder)
    curve = CurveKeys("server", "server secret", "client", "client secret")
    return GatewayProcess(run_dir, ServeConfig(), Path("/models/tiny"), b"\7", "float32", 512, curve)


def lost(machine: Machine, gateway: GatewayProcess) -> GatewayLost:
    """The present process is killed; what is told of it."""
    machine.children[-1].kill()
    found: list[GatewayLost | None] = []
    assert wait_until(lambda: found.append(gateway.lost()) or found[-1] is not None)
    assert found[-1] is not None
    return found[-1]


def test_a_gateway_that_runs_is_not_lost(machine: Machine, gateway: GatewayProcess) -> None:
    assert gateway.lost() is None
    assert (gateway.name, gateway.pid, len(machine.children)) == ("gateway-0", machine.children[0].pid, 1)


def test_a_gateway_that_is_killed_is_told_once_and_the_next_one_has_another_name(
    machine: Machine, gateway: GatewayProcess
) -> None:
    pid = gateway.pid
    reason = f"the gateway process {pid} was killed by signal 9 (SIGKILL)"
    assert lost(machine, gateway) == GatewayLost("gateway-0", reason, final=False)
    assert gateway.lost() is None
    assert (gateway.name, gateway.pid) == ("gateway-1", machine.children[1].pid)
    first, second = machine.settings
    assert (first["name"], second["name"]) == ("gateway-0", "gateway-1")
    assert first | {"name": ""} == second | {"name": ""}, "all else is as it was"
    assert "client secret" not in json.dumps(second)
    assert ((machine.folder / "gateway.json").stat().st_mode & 0o777) == 0o600


def test_a_gateway_that_ends_too_often_is_lost_for_good_and_told_once(
    machine: Machine, gateway: GatewayProcess
) -> None:
    told = [lost(machine, gateway) for _ in range(MOST_STARTS + 1)]
    assert [one.gateway for one in told] == [f"gateway-{number}" for number in range(MOST_STARTS + 1)]
    assert [one.final for one in told] == [False] * MOST_STARTS + [True]
    assert gateway.lost() is None
    assert len(machine.children) == MOST_STARTS + 1


def test_a_gateway_that_ends_now_and_then_is_started_again_for_ever(
    machine: Machine, gateway: GatewayProcess
) -> None:
    for number in range(3 * MOST_STARTS):
        machine.now += WITHIN_S / MOST_STARTS
        assert lost(machine, gateway).final is False, number
    assert gateway.name == f"gateway-{3 * MOST_STARTS}"
