"""The same promises, checked by the same program, of the real Mooncake Store and of ours."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_lite.tools.bench.peers import StorePeer, find_store_peer, store_peer_master
from tests.store.mooncake_store.running import ENVIRONMENT, ROOT, master_process

PROGRAM = Path(__file__).with_name("conformance.py")
CHECKS = re.findall(r"^def (check_\w+)", PROGRAM.read_text(encoding="utf-8"), re.MULTILINE)
LEASE_MS = 1000


def results(python: str, module: str, master: str, environment: dict[str, str]) -> dict[str, str]:
    done = subprocess.run(
        [python, str(PROGRAM), module, master],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r"RESULTS(\{.*\})", done.stdout)
    assert found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    answers: dict[str, str] = json.loads(found[1])
    return answers


@pytest.fixture(scope="module")
def ours() -> dict[str, str]:
    with master_process(LEASE_MS) as (master, _):
        return results(sys.executable, "store", master, ENVIRONMENT)


@pytest.fixture(scope="module")
def over_tcp() -> dict[str, str]:
    with master_process(LEASE_MS) as (master, _):
        return results(sys.executable, "store", master, {**ENVIRONMENT, "MOONCAKE_LITE_STORE_PATH": "tcp"})


@pytest.fixture(scope="module")
def theirs() -> dict[str, str]:
    peer = find_store_peer()
    if not isinstance(peer, StorePeer):
        pytest.skip(peer)
    with store_peer_master(peer, LEASE_MS) as master:
        return results(peer.python, "mooncake.store", master, peer.environment)


def test_there_is_something_to_check() -> None:
    assert len(CHECKS) > 30


@pytest.mark.parametrize("check", CHECKS)
def test_ours_keeps_it(ours: dict[str, str], check: str) -> None:
    assert ours[check] == ""


@pytest.mark.parametrize("check", CHECKS)
def test_ours_keeps_it_over_tcp(over_tcp: dict[str, str], check: str) -> None:
    assert over_tcp[check] == ""


@pytest.mark.parametrize("check", CHECKS)
def test_the_real_one_keeps_it(theirs: dict[str, str], check: str) -> None:
    assert theirs[check] == ""
