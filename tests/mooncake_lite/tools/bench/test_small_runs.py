"""Benchmarks that no other test runs: each one, with small sizes, returns all of its rows."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from mooncake_lite.tools.bench import command, scheduler, scheduler_index, store
from mooncake_lite.tools.bench.result import Row
from store.layout import BlockLayout


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all tests have left is not searched for garbage before each measurement."""
    for module in (scheduler, scheduler_index, store):
        monkeypatch.setattr(module, "gc", Mock())


def names(rows: list[Row]) -> list[str]:
    assert all(row.ours > 0 for row in rows)
    assert all(row.limit is None or row.limit.value > 0 for row in rows)
    return [row.name for row in rows]


def test_decisions_lives_and_the_index_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "INSTANCES", 2)
    monkeypatch.setattr(scheduler_index, "WALKS", 5)
    shape = "2 + 2 instances, 250 blocks, index of 500"
    assert names(scheduler.decisions(2, 2, 10)) == [
        f"decision, median, {shape}",
        f"decision, 99th percentile, {shape}",
    ]
    assert len(names(scheduler.requests(24, 3))) == 3
    index = [*scheduler_index.walks(500), *scheduler_index.by_runs(480), scheduler_index.one_by_one(500)]
    assert len(names([*index, scheduler_index.memory(500)])) == 6


def test_the_tier_keys_and_books_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout(2, 1, 16, 8, 2)
    for name, value in {"LAYOUT": layout, "PER_FILE": 2, "RECOVERED": 6, "PAIRS": 200, "ASKED": 2}.items():
        monkeypatch.setattr(store, name, value)
    rss = count(10**6, 10**6)  # of this process, which may have room for the books already
    memory = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=next(rss)))
    monkeypatch.setattr(store, "psutil", SimpleNamespace(Process=lambda: memory))
    blocks = np.random.default_rng(0).integers(0, 255, (4, layout.nbytes), np.uint8)
    rows = [store.write(tmp_path, blocks, 1), store.read(tmp_path, blocks, 1), store.recover(tmp_path, 1)]
    assert len(list((tmp_path / "found").glob("*.h5"))) == 3, "two blocks fill a file"
    rows += [store.allocating("one size", 0, 200 * 4096, 1), *store.directory(1000, 1), store.keys(1)]
    assert [name.partition(",")[0] for name in names(rows)] == [
        *("tier write", "tier read", "tier start", "allocate and free", "directory lookup"),
        *("directory memory", "prefix keys of 8192 tokens"),
    ]


@pytest.mark.quick
def test_the_command_shows_rows_writes_json_and_warns_of_a_busy_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[bool] = []
    row = Row("a figure", "ms", 2.0, None, None, 3)
    monkeypatch.setattr(store, "run", lambda quick: asked.append(quick) or [row])
    monkeypatch.setattr("mooncake_lite.tools.bench.result.busy", lambda found: "others used it")
    file = tmp_path / "result.json"
    assert not command.bench.main(["store", "--quick", "--json", str(file)], standalone_mode=False)
    said = capsys.readouterr()
    assert asked == [True]
    assert "a figure" in said.out
    assert said.err == "mooncake-lite: note: others used it\n"
    assert '"ours": 2.0' in file.read_text()
