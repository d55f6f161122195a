"""`labs run`: a finished lab answers questions beside the reference."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from mooncake_lite.errors import LabError
from mooncake_lite.labs import regions
from mooncake_lite.labs.lab import Lab, lab_in
from mooncake_lite.labs.playing import Played, compared, released, write_reference
from mooncake_lite.labs.starting import write_data
from tests.cluster.tiny import tiny_folder
from tests.mooncake_lite.labs.sample_class import reference
from tests.mooncake_lite.labs.trees import ROOT, edit, git, labs, labs_of

LAB = lab_in(ROOT, 2)

QUICK = """
import inspect, json, sys
from store.policies.sieve import SIEVE
fifo = int("if True:" in inspect.getsource(SIEVE.victims))
print("loading")
print(json.dumps([{"what": "a policy", "tokens": [1], "reused": fifo, "seconds": 0.5, "said": sys.argv[1],
                   "kind": "counts", "gain": f"fifo {fifo}"}]))
"""
"""A play that starts at once, and tells which policy it has found."""


def write_regions(tree: Path, lab: Lab) -> None:
    """Write every region of a lab."""
    for task in lab.tasks:
        path = tree / task.file
        path.write_text(regions.replace(path.read_text(), task.function, reference(lab)[task.id]))


def finish_lab(tree: Path) -> None:
    """Write every region of the lab: right, but 2e evicts as FIFO does."""
    write_regions(tree, LAB)
    edit(tree / "store/policies/sieve.py", "if not node.visited:", "if True:")


def test_a_play_runs_with_the_packages_of_the_student_and_with_those_of_the_base(repository: Path) -> None:
    labs("start", "2")
    with pytest.raises(LabError, match="labs run needs every task of lab 2; 2a: not written yet"):
        labs("run", "2")
    finish_lab(repository)
    script = repository / LAB.folder / "play.py"
    script.write_text(QUICK)
    result = labs("run", "2", "--model", "some model")
    row = ["a", "policy", "equal", "counts", "1", "0", "0.500", "0.500", "timed"]
    assert row in [line.split() for line in result.output.splitlines()]
    assert result.output.splitlines()[-2:] == ["your code: fifo 1", "the reference: fifo 0"]
    assert (result.return_value, result.output.split("\n")[0]) == (0, "a policy: some model")
    script.write_text("raise ValueError('no such block')")
    with pytest.raises(LabError, match="your code failed: ValueError: no such block; "):
        labs("run", "2")


def test_a_finished_lab_gives_the_tokens_of_the_reference(
    repository: Path, tmp_path: Path, soak: int
) -> None:
    """Tokens do not depend on the policy, and the hits of the trace do."""
    if soak == 1:
        pytest.skip("starts a model twice; make soak does it")
    labs("start", "2")
    finish_lab(repository)
    result = labs("run", "2", "--model", str(model_of_words(tmp_path / "model")))
    rows = [line.split() for line in result.output.splitlines()]
    (again,) = [row[-7:] for row in rows if row[:3] == ["second", "question", "again"]]
    assert again[:4] == ["equal", "tokens", "256", "256"]
    (trace,) = [row[-7:] for row in rows if row[:1] == ["trace,"]]
    assert trace[:2] == ["DIFFERENT", "counts"]
    assert trace[2] != trace[3]
    assert result.return_value == 1


@pytest.mark.timeout(900)
def test_a_model_answers_with_the_attention_of_a_student(repository: Path, tmp_path: Path, soak: int) -> None:
    """A wrong 1b changes the answer; of its kernels, 1d alone is wrong."""
    if soak == 1:
        pytest.skip("compiles kernels twice; make soak does it")
    labs("start", "1")
    write_regions(repository, lab_in(ROOT, 1))
    edit(repository / "kernels_numba/attention/attention_plain.py", "return top, total", "return top, -total")
    edit(
        repository / "kernels_numba/attention/attention_cuda.py",
        "total += weight\n                value",
        "value",
    )
    result = labs("run", "1", "--model", str(model_of_words(tmp_path / "model")))
    rows = [row for row in result.output.splitlines() if " equal " in row or " DIFFERENT " in row]
    found = [" ".join(row.split()) for row in rows]
    expected = ["DIFFERENT counts", "equal counts", "DIFFERENT tokens", "equal tokens"]
    assert [words for row, words in zip(found, expected, strict=True) if words in row] == expected
    assert "your code: with 1b and 1c, " in result.output
    assert "the reference: with 1b and 1c, 32 of 32 tokens are those of the server's kernels" in result.output
    assert result.return_value == 1


def model_of_words(folder: Path) -> Path:
    """Make a tiny model for which each word is a token."""
    tiny_folder("qwen3", folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.quick
def test_both_sides_stand_beside_each_other_and_a_missing_row_is_not_compared() -> None:
    mine, theirs = Played("a", [1, 2], 64, 0.5, ""), Played("a", [1, 2], 128, 0.25, "", how="simulated")
    assert compared([mine], {"a": theirs}).rows == [
        ["a", "equal tokens", "64", "128", "0.500", "0.250", "timed"]
    ]
    assert compared([mine], {}).rows == [["a", "not compared", "64", "-", "0.500", "-", "timed"]]


def test_a_release_has_the_numbers_of_the_reference_and_no_seconds_of_its_machine(tmp_path: Path) -> None:
    """All of lab 5 is simulated. Of lab 2 the trace is counted, and what its model computes is left out."""
    out = tmp_path / "lab-5"
    told = labs(
        "release", "5", "--class", "Sample class", "--seed", "a long secret", "--out", str(out)
    ).output
    assert "played the reference: 9 rows" in told
    lab = lab_in(ROOT, 5)
    write_regions(out, lab)
    edit(out / lab.task("5c").file, "share = budget // (", "share = budget // (2 * ")
    git(out, "init", "--quiet")  # a student's own history is no reference
    told = labs_of(out, "run", "5", "--plot", "run.svg")
    mine, theirs = (line for line in told.splitlines() if ": chunks: longest gap" in line)
    assert mine.removeprefix("your code") != theirs.removeprefix("the reference")
    assert told.count("simulated") == 9
    assert b"chunks, budget" in (out / "run.svg").read_bytes()
    lab = lab_in(ROOT, 2)
    (out / lab.folder).mkdir()
    shutil.copy(ROOT / lab.folder / "play.py", out / lab.folder)
    write_data(ROOT, out, lab, 3)
    assert write_reference(ROOT, lab, out) == 1
    (row,) = released(out, lab)
    assert (row.how, row.seconds, row.reused > 0, "SIEVE finds" in row.gain) == ("counted", None, True, True)
    play = out / lab.folder / "play.py"
    play.write_text(
        "from pathlib import Path\n(Path(__file__).parent / 'run.reference.svg').touch()\nprint('x [')"
    )
    with pytest.raises(LabError, match="a region prints without a new line"):
        write_reference(ROOT, lab, out)
    play.write_text(play.read_text().replace("x [", "[]"))
    assert write_reference(ROOT, lab, out) == 0
    assert not list(play.parent.glob("run.*.svg"))


@pytest.mark.quick
def test_a_lab_without_regions_says_that_there_is_nothing_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(LabError, match="lab 0 has nothing to run; mooncake-lite labs check 0"):
        labs("run", "0")
