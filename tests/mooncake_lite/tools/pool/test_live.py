"""`mooncake-lite store ... live` and `explain` against a conductor whose answers are too large to be sent."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from mooncake_lite import messages as m
from mooncake_lite.cli import main
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ClusterError, UserError
from mooncake_lite.launch.run_dir import RunDir
from mooncake_lite.messages.explain import Explained
from mooncake_lite.messages.pool import PoolEnded, PoolProgress, PoolQuery, PoolRow, PoolRows
from mooncake_lite.tools import explain
from mooncake_lite.tools.pool import commands, live
from mooncake_lite.tools.pool.live import LivePool
from scheduler.placement.explanation import Explanation
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


class Conductor:
    """A conductor's side of the connection: answers to each query in turn, a list each; None: it is full."""

    def __init__(self, *answers: list[Any] | None):
        self.answers, self.waiting = list(answers), list[Any]()
        self.queries: list[PoolQuery] = []

    def send(self, query: PoolQuery) -> bool:
        self.queries.append(query)
        answers = self.answers.pop(0)
        self.waiting = answers or []
        return answers is not None

    def receive(self, wait_s: float) -> list[Any]:
        some, self.waiting = self.waiting[:1], self.waiting[1:]
        return some


def pool(*answers: list[Any] | None) -> tuple[LivePool, Conductor]:
    conductor = Conductor(*answers)
    return LivePool(conductor), conductor  # type: ignore[arg-type]


def row(number: int) -> PoolRow:
    return PoolRow(number, 0xAB00 + number, "dram", 4, 1024, "")


def test_blocks_are_listed_page_by_page() -> None:
    live_pool, conductor = pool([PoolRows([row(1), row(2)], True)], [PoolRows([row(5)], False)])
    assert [one["key"] for one in live_pool.rows()] == [f"000000000000ab0{number}" for number in (1, 2, 5)]
    assert [query.after for query in conductor.queries] == [-1, 2]


def test_blocks_are_removed_by_name_or_all_and_pinned() -> None:
    ended = [PoolEnded(blocks=2, kept=1)]
    live_pool, conductor = pool(ended, ended, ended, ended)
    assert live_pool.remove([7], force=True) == live_pool.remove([], force=False) == (2, 1)
    assert live_pool.pin([7], soft_s=3.0) == 2
    live_pool.compact()
    assert conductor.queries == [
        PoolQuery("rm", keys=[7], force=True),
        PoolQuery("rm-all"),
        PoolQuery("pin", keys=[7], soft_s=3.0),
        PoolQuery("compact"),
    ]
    with pytest.raises(UserError, match="no such block"):
        pool([PoolEnded("no such block")])[0].pin([7])


def test_verifying_adds_up_what_is_told_and_shows_bad_blocks() -> None:
    good = [PoolProgress(1, 5, []), PoolProgress(3, 5, []), PoolEnded()]
    assert pool(good)[0].verify() == ([{"blocks": 3, "bad": 0}], True)
    bad = [PoolProgress(1, 5, [row(1)]), PoolProgress(3, 5, [row(2)]), PoolEnded()]
    rows, is_good = pool(bad)[0].verify()
    assert ([one["key"][-2:] for one in rows], is_good) == (["01", "02"], False)


def test_a_block_comes_by_way_of_a_file_and_not_at_all_when_it_is_bad() -> None:
    live_pool, conductor = pool([PoolProgress(1, 5, []), PoolEnded()])
    send = conductor.send

    def write(query: PoolQuery) -> bool:
        (Path(query.folder) / f"{query.keys[0]:016x}.block").write_bytes(b"block")
        return send(query)

    conductor.send = write  # type: ignore[method-assign]
    assert live_pool.get(0xAB) == b"block"
    with pytest.raises(ClusterError, match="00000000000000ab: its bytes in DRAM are not those"):
        pool([PoolProgress(1, 5, [row(1)]), PoolEnded()])[0].get(0xAB)


def test_a_conductor_that_takes_no_message_or_falls_silent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match="does not take messages"):
        pool(None)[0].rows()
    monkeypatch.setattr(live, "ANSWER_LIMIT_S", 0.01)
    with pytest.raises(ClusterError, match="has not answered"):
        pool([])[0].rows()


def test_a_cluster_that_does_not_keep_a_decision_names_those_that_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "run_folder", lambda where, how: None)
    with pytest.raises(UserError, match="/x is no running cluster; give the URL or the run folder"):
        explain.from_cluster("r", Path("/x"))
    monkeypatch.setattr(live, "run_folder", lambda where, how: Path("/x"))
    for last, words in ((["r1", "r2"], "2 are kept, among them r2, r1"), ([], "none is kept")):
        answers = pool([Explained(None, last)])[0]
        monkeypatch.setattr(live, "live_pool", lambda folder, answers=answers: nullcontext(answers))
        with pytest.raises(UserError, match=f"no decision about request 'r' is kept; {words}"):
            explain.from_cluster("r", None)
    kept = Explanation("r", "random", "refused", "no room", [])
    answers = pool([Explained(kept, [])])[0]
    monkeypatch.setattr(live, "live_pool", lambda folder: nullcontext(answers))
    assert explain.from_cluster("r", None) == kept


def test_commands_tell_how_many_blocks_they_have_pinned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(commands, "run_folder", lambda where: None if where == tmp_path else Path("/x"))
    for words, told in (
        (["pin", "live", "ab", "0ab"], "pinned 2 blocks\n"),
        (["pin", "live", "ab", "--soft", "5"], "pinned 2 blocks softly for 5 s\n"),
        (["unpin", "live", "ab"], "unpinned 2 blocks\n"),
        (["compact", "live"], "every store rank rewrites its tier as soon as it has nothing else to do\n"),
    ):
        live_pool, conductor = pool([PoolEnded(blocks=2)])
        monkeypatch.setattr(commands, "live_pool", lambda folder, here=live_pool: nullcontext(here))
        assert main(["store", *words]) == 0
        assert capsys.readouterr().out == told
        assert conductor.queries[0].keys in ([0xAB], [])
    assert main(["store", "pin", str(tmp_path), "ab"]) == 2
    assert "is no running cluster; blocks are pinned in DRAM" in capsys.readouterr().err

    live_pool, _ = pool([PoolProgress(1, 5, []), PoolEnded()])
    monkeypatch.setattr(live_pool, "get", lambda key: b"block")
    monkeypatch.setattr(commands, "live_pool", lambda folder: nullcontext(live_pool))
    assert main(["store", "get", "live", "ab", "--out", str(tmp_path / "none" / "file")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
    monkeypatch.setattr(live_pool, "rows", list)
    assert main(["store", "ls", "live"]) == 0
    assert capsys.readouterr().out == "nothing there\n"
