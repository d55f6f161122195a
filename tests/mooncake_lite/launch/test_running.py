"""Which cluster a command means: of several it lists each URL with its run folder."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake_lite.cli import main
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.gateway.answer_types import Health
from mooncake_lite.launch import run_dir, running
from mooncake_lite.launch.launcher import answers
from mooncake_lite.launch.running import _url
from mooncake_lite.tools.pool.live import run_folder
from tests.mooncake_lite.tools.top.server import Answer, serving, text

pytestmark = pytest.mark.quick

NOBODY = ["--url", "http://127.0.0.1:1"]


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where run folders are looked for."""
    for module in (running, run_dir):
        monkeypatch.setattr(module, "bases", lambda: [tmp_path])
    return tmp_path


@pytest.fixture
def two_clusters(base: Path) -> Iterator[str]:
    """How commands list them; a third one has been killed."""
    folders = [base / f"mooncake-lite.{os.getuid()}.{name}" for name in "abc"]
    with ExitStack() as stack:
        for folder, host, port in zip(folders, ("127.0.0.1", "::1", "127.0.0.1"), (8001, 8002, 8003)):
            used = run_dir.RunDir.join(folder)
            if folder == folders[2]:
                os.close(used._lock)
            else:
                stack.callback(used.leave)
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(folder / "control"))
            (folder / "gateway.json").write_text(
                json.dumps({"config": {"host": host, "port": port, "of": "a later version"}})
            )
        yield f"http://127.0.0.1:8001 ({folders[0]}), http://[::1]:8002 ({folders[1]})"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            ["store", "ls", "live"],
            "no cluster of yours is running here; start one with `mooncake-lite serve`",
        ),
        (["explain", "x"], "no cluster of yours is running here; start one with `mooncake-lite serve`"),
        (["chat", *NOBODY], "start one with mooncake-lite serve, or say where it is with --url"),
        (["top", *NOBODY], "start one with mooncake-lite serve, or say where it is with --url"),
    ],
)
def test_where_no_cluster_runs_a_command_says_how_to_start_one(
    command: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    assert capsys.readouterr().err.endswith(f"; {expected}\n" if "--url" in expected else f"{expected}\n")


@pytest.mark.parametrize(
    ("command", "choose"),
    [
        (["store", "verify", "live"], "name one instead of live"),
        (["explain", "x"], "name one with --cluster"),
        (["chat", *NOBODY], "name one with --url"),
        (["top", *NOBODY], "name one with --url"),
        (["explain", "x", "--cluster", "http://127.0.0.1:8009"], "name one with --cluster"),
        (["explain", "x", "--cluster", "http://[bad"], "name one with --cluster"),
        (["store", "stat", "http://llm.example:8001"], "name one instead of live"),
    ],
)
def test_of_several_clusters_a_command_lists_each_url_with_its_folder_and_says_how_to_choose(
    command: list[str], choose: str, two_clusters: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    assert capsys.readouterr().err.endswith(f"running here: {two_clusters}; {choose}\n")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://127.0.0.1:8001", "a"),
        ("http://localhost:8001/", "a"),
        ("http://127.0.0.1:8002/v1", "b"),
        ("http://[::1]:8002", "b"),
    ],
)
def test_a_cluster_of_this_host_is_named_by_its_url(
    url: str, name: str, two_clusters: str, base: Path
) -> None:
    assert run_folder(Path(url)) == base / f"mooncake-lite.{os.getuid()}.{name}"


def test_a_cluster_of_another_version_is_listed_without_its_url(base: Path) -> None:
    assert _url(base) == "unknown URL"
    (base / "gateway.json").write_text('{"config": {"address": "127.0.0.1"}}')
    assert _url(base) == "unknown URL"


def test_a_url_of_a_cluster_that_does_not_run_is_no_folder_of_a_tier(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["explain", "x", "--cluster"], ["store", "ls"]):
        assert main([*command, "http://127.0.0.1:8001"]) == 2
        said = capsys.readouterr().err
        assert "no cluster of yours at http://127.0.0.1:8001 is running on this host; start one with" in said


def test_a_cluster_has_started_that_serves_or_has_lost_the_last_rank_of_a_duty() -> None:
    def answer(code: int, status: Any) -> Answer:
        return text(msgspec.json.encode(Health(status, "", "", [])), code)

    with serving(answer(503, "starting"), answer(503, "unavailable"), answer(200, "ok")) as server:
        config = ServeConfig(port=int(server.url.rpartition(":")[2]))
        assert [answers(config) for _ in range(3)] == [False, True, True]
    assert not answers(config)
