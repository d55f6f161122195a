"""`labs run`: a finished lab answers questions beside the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from mooncake_lite.errors import LabError
from mooncake_lite.labs import regions
from mooncake_lite.labs.lab import lab_in
from mooncake_lite.labs.playing import Played, compared
from tests.cluster.tiny import tiny_folder
from tests.mooncake_lite.labs.sample_class import reference
from tests.mooncake_lite.labs.trees import ROOT, edit, labs

LAB = lab_in(ROOT, 2)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model for which each word is a token."""
    folder = tiny_folder("qwen3", tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_finished_lab_gives_the_tokens_of_the_reference(repository: Path, model: Path) -> None:
    """The policy evicts the newest item: tokens stay equal, and the trace has other hits."""
    labs("start", "2")
    with pytest.raises(LabError, match="labs run needs every task of lab 2; 2a: not written yet"):
        labs("run", "2")
    for task in LAB.tasks:
        path = repository / task.file
        path.write_text(regions.replace(path.read_text(), task.function, reference(LAB)[task.id]))
    edit(
        repository / "store/policies/sieve.py",
        "                if not node.visited:",
        "                if True:",
    )
    result = labs("run", "2", "--model", str(model))
    rows = [line.split() for line in result.output.splitlines()]
    (again,) = [row[-5:] for row in rows if row[:3] == ["second", "question", "again"]]
    assert again[:3] == ["equal", "256", "256"]
    (trace,) = [row[-5:] for row in rows if row[:1] == ["trace,"]]
    assert trace[0] == "DIFFERENT"
    assert trace[1] != trace[2]
    assert result.return_value == 1


@pytest.mark.quick
def test_both_sides_stand_beside_each_other() -> None:
    mine, theirs = Played("a", [1, 2], 64, 0.5, ""), Played("a", [1, 2], 128, 0.25, "")
    assert compared([mine], [theirs]).rows == [["a", "equal", "64", "128", "0.500", "0.250"]]


@pytest.mark.quick
@pytest.mark.parametrize("number", [0, 1])
def test_a_lab_that_the_server_does_not_launch_says_so(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(LabError, match=f"lab {number} has nothing to run; mooncake-lite labs check {number}"):
        labs("run", str(number))
