"""`mooncake-lite store ... live` and `explain` against a conductor whose answers are too large to be sent."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from mooncake_lite import messages as m
from mooncake_lite.cli import main
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.launch.run_dir import RunDir
from store.layout import BlockLayout
from tests.mooncake_lite.conductor.fake_hub import new_role
from transport.channel import Hub
from transport.wire import Decoder

pytestmark = pytest.mark.quick


def test_an_answer_that_is_too_large_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    ended = Event()
    with (
        tempfile.TemporaryDirectory(prefix="ml-live-") as folder,  # a short path, for its sockets
        Hub([f"ipc://{folder}/control"], Decoder(m.TO_CONDUCTOR), max_send_bytes=200) as hub,
        ThreadPoolExecutor(1) as thread,
    ):
        run_dir = RunDir.join(folder)  # else the first command would be the last that leaves it
        role = new_role(ServeConfig(), BlockLayout(2, 1, 64, 8, 4), hub)
        for number in range(100):
            role.decisions.refused(f"request-{number}", "no room")

        def conduct() -> None:
            while not ended.is_set():
                role.step(hub.receive(0.05))

        conducting = thread.submit(conduct)
        codes = [main(["store", "stat", folder]), main(["explain", "other", "--cluster", folder])]
        ended.set()
        conducting.result()
        run_dir.leave()
    assert codes == [2, 2]
    complaints = capsys.readouterr().err.splitlines()
    assert [line.partition(" has ")[0].rpartition(" ")[2] for line in complaints] == [
        "PoolFigures",
        "Explained",
    ]
    assert all("the limit is 200" in line for line in complaints)
