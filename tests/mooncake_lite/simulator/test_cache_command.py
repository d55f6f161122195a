"""`mooncake-lite simulate cache`: rows, files, and one line for whatever is wrong."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from mooncake_lite.cli import main
from mooncake_lite.simulator import cache
from store.policies import NAMES
from tests.mooncake_lite.workloads.made import made_trace, write

pytestmark = pytest.mark.quick


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "made.jsonl", made_trace(60))


def run(*words: object) -> int:
    return main(["simulate", "cache", *map(str, words)])


def test_the_result_has_a_row_for_each_policy_and_size(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    assert run(trace, "--policy", "lru,sieve", "--blocks", "50,5,unbounded", "--json", file) == 0
    result = json.loads(file.read_text())
    assert (result["trace"], result["requests"]) == ("made.jsonl", 60)
    rows = result["rows"]
    assert [(row["policy"], row["blocks"]) for row in rows] == [
        (name, blocks) for name in ("lru", "sieve") for blocks in (5, 50, None)
    ]
    for row in rows:
        assert row["miss_ratio"] == pytest.approx(1 - row["hit_rate"])
        assert 0 < row["hit_rate"] < 1
        assert row["hit_rate_complete"] != row["hit_rate"]
    assert rows[2]["hit_rate"] == rows[5]["hit_rate"] >= rows[1]["hit_rate"]
    out = capsys.readouterr().out
    assert f"{rows[0]['hit_rate']:.4f}" in out
    assert f"{rows[4]['hit_rate_complete']:.4f}" in out


def test_all_policies_can_be_asked_for_at_once_and_the_learned_one_says_what_it_guarantees(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    assert run(trace, "--policy", "all,lru+second-hit", "--blocks", "20", "--json", file) == 0
    rows = {row["policy"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == [*NAMES, "lru+second-hit"]
    bound = rows["learned"]["bound"]
    assert bound["misses"] <= bound["most"] == 2 * min(bound["lru"], bound["predicted"])
    assert f"= {bound['most']:,}" in capsys.readouterr().out
    assert rows["belady"]["hit_rate"] >= rows["lru"]["hit_rate"]


@pytest.mark.parametrize(("name", "begin"), [("curves.svg", b"<?xml"), ("curves.png", b"\x89PNG")])
def test_curves_are_drawn_as_svg_or_png(trace: Path, tmp_path: Path, name: str, begin: bytes) -> None:
    pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")
    file = tmp_path / name
    assert run(trace, "--policy", "lru,belady", "--blocks", "5,50", "--plot", file) == 0
    assert file.read_bytes().startswith(begin)
    if file.suffix == ".svg":
        assert b"belady" in file.read_bytes()
        first = file.read_bytes()
        assert run(trace, "--policy", "lru,belady", "--blocks", "5,50", "--plot", file) == 0
        assert file.read_bytes() == first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "mru"], "no eviction policy is called 'mru'; there are lru, lfu, length"),
        (["--policy", ","], "names no policy"),
        (["--policy", "belady+size"], "must see every reference"),
        (["--blocks", "0"], "'0' is no positive number of blocks"),
        (["--blocks", "10,-5"], "'-5' is no positive"),
        (["--blocks", "1e3"], "'1e3' is no positive"),
        (["--blocks", ""], "names no size"),
        (["--blocks", "10,100000001", "--policy", "wtinylfu"], "100000001 is more than 100,000,000 blocks"),
        (["--blocks", "1" * 5000], "more than 100,000,000 blocks"),
        (["--json", "x" * 300], "File name too long"),
        (["--json", "/nowhere/x.json"], "the folder /nowhere does not exist"),
        (["--plot", "x.pdf"], "must end with .svg or .png"),
        (["--plot", "/nowhere/x.svg"], "the folder /nowhere does not exist"),
    ],
)
def test_a_wrong_wish_is_one_line_and_exit_code_2(
    trace: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run(trace, *words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "bad.jsonl:2: "),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}', "bad.jsonl:2: object missing"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "bad.jsonl:2: 1 hash_ids",
        ),
    ],
)
def test_a_bad_trace_is_one_line_that_names_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    bad = write(tmp_path / "bad.jsonl", made_trace(1))
    with bad.open("a") as file:
        file.write(line + "\n")
    assert run(bad) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert run(tmp_path / "absent.jsonl") == 2
    assert "absent.jsonl: no such file" in capsys.readouterr().err


def test_without_matplotlib_a_plot_is_refused_before_anything_is_played(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(cache, "replay", None)
    assert run(trace, "--plot", tmp_path / "x.svg") == 2
    assert "--plot needs matplotlib: pip install 'mooncake-lite[plots]'" in capsys.readouterr().err


def test_an_interruption_leaves_no_file_behind(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    before = set(tmp_path.iterdir())
    words = ("--json", tmp_path / "x.json", "--blocks", 5)
    monkeypatch.setattr(Path, "replace", interrupted)  # the last moment: all has been written
    assert run(trace, *words) == 130
    assert set(tmp_path.iterdir()) == before
    monkeypatch.setattr(cache, "replay", interrupted)
    assert run(trace, *words) == 130
    assert set(tmp_path.iterdir()) == before


def test_a_result_goes_where_a_link_or_a_device_leads_and_replaces_neither(
    trace: Path, tmp_path: Path
) -> None:
    target, link, pipe = tmp_path / "target.json", tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(target)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run(trace, "--blocks", 5, "--json", link) == 0
        assert run(trace, "--blocks", 5, "--json", pipe) == 0
        through_pipe = os.read(reader, 65536)
    finally:
        os.close(reader)
    assert link.is_symlink()
    assert pipe.is_fifo()
    assert json.loads(target.read_text())["rows"] == json.loads(link.read_text())["rows"]
    assert json.loads(through_pipe)["requests"] == 60


def test_a_file_that_cannot_be_written_is_one_line(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace, "--json", tmp_path) == 2
    assert "is a folder" in capsys.readouterr().err
    old = tmp_path / "old.json"
    old.write_text("old")
    assert run(trace, "--json", old / "x") == 2
    assert "does not exist" in capsys.readouterr().err
    assert old.read_text() == "old"
