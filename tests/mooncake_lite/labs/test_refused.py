"""What labs refuse or leave out: archives, lab.toml, sheets, predictions, regions; each told in one line."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from mooncake_lite.errors import LabError
from mooncake_lite.labs import (
    checking,
    commands,
    grading,
    instructor_commands,
    judging,
    lowering,
    playing,
    regions,
    running,
    sandbox,
    starting,
    tidy,
    trees,
    variant,
)
from mooncake_lite.labs.asking import Stopped
from mooncake_lite.labs.gates import MOST_CHARACTERS, look_at
from mooncake_lite.labs.judging import Counted, Judge, Outcome, Run, Session
from mooncake_lite.labs.lab import FOLDER, _problem, find_root, lab_in, read_lab
from mooncake_lite.labs.lowering import FAILED, Lowered
from mooncake_lite.labs.scores import TaskScore
from mooncake_lite.labs.submission import ABOUT, MOST_FIGURES, pack, read_submission
from tests.mooncake_lite.labs.trees import ROOT

pytestmark = pytest.mark.quick
LAB = lab_in(ROOT, 2)
NAME = Path(LAB.folder).name


def tree(folder: Path) -> Path:
    """The files of lab 2 that have regions, and no others."""
    for file in LAB.files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes((ROOT / file).read_bytes())
    (folder / LAB.folder / "figures").mkdir(parents=True)
    return folder


# ------------------------------------------------------------------------------------------- archives


def test_figures_are_packed_and_read_and_what_is_no_figure_is_left_out(tmp_path: Path) -> None:
    root = tree(tmp_path / "tree")
    for number in range(MOST_FIGURES + 1):
        (root / LAB.folder / "figures" / f"{number}.svg").write_bytes(b"<svg/>")
    (root / LAB.folder / "figures" / "a b.gif").write_bytes(b"")
    (root / LAB.folder / "report.md").write_text("x" * (64 * 1024 + 1))
    said = pack(root, LAB, tmp_path / "out.zip")
    assert "figures/a b.gif is left out: a figure is an .svg or .png with a plain name" in said
    assert "report.md has 65,537 bytes; at most 65,536 are read" in said
    assert f"{LAB.folder}/prediction.toml is missing" in said
    found = read_submission(tmp_path / "out.zip", LAB)
    assert sorted(found.figures) == [f"{number}.svg" for number in range(MOST_FIGURES)]
    assert sorted(found.regions) == sorted(LAB.ids)


def test_what_cannot_be_packed_or_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no region of lab 2 can be found; 2a is missing: "):
        pack(tmp_path, LAB, tmp_path / "out.zip")
    nowhere = tmp_path / "none" / "out.zip"
    with pytest.raises(LabError, match=r"out\.zip: No such file or directory"):
        pack(tree(tmp_path / "tree"), LAB, nowhere)


def test_folders_in_an_archive_say_nothing_and_what_it_says_of_itself_may_be_damaged(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(ABOUT, "{")
        archive.writestr("figures/", "")
    assert read_submission(tmp_path / "x.zip", LAB).messages == [
        f"{ABOUT} cannot be read; make the archive with mooncake-lite labs pack"
    ]


def test_a_folder_without_archives_is_not_graded(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="has no submissions: archives that end with"):
        grading.grade_folder(ROOT, LAB, tmp_path, seed="s", trusted=True, jobs=1)


# ------------------------------------------------------------------------------------- labs and sheets


@pytest.mark.parametrize(
    ("changed", "name", "why"),
    [
        ({"number": 3}, NAME, f"number = 3, and the folder is called {NAME}"),
        ({}, "tools", "number = 2, and the folder is called tools"),
        ({"tasks": []}, NAME, "a lab has either [[tasks]] or [[questions]]"),
        ({"tasks": [*LAB.tasks, *LAB.tasks]}, NAME, "tasks, and a lab has at most 5"),
        ({"tasks": [LAB.tasks[0]] * 2}, NAME, "two tasks have one id"),
        ({"tasks": [msgspec.structs.replace(LAB.tasks[0], id="3a")]}, NAME, "task '3a' must be called 2a"),
        ({"tasks": [msgspec.structs.replace(LAB.tasks[0], hints=[])]}, NAME, "task 2a has 0 hints"),
    ],
)
def test_a_lab_that_cannot_be_used_is_told_by_its_key(changed: dict[str, Any], name: str, why: str) -> None:
    assert why in _problem(msgspec.structs.replace(LAB, **changed), name)
    assert _problem(LAB, NAME) == ""


def test_a_lab_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LabError, match=r"there is no lab 99 in .*; there is: 0, 1, 2, "):
        lab_in(ROOT, 99)
    folder = tmp_path / FOLDER / "02_other"
    folder.mkdir(parents=True)
    (folder / "lab.toml").write_bytes((ROOT / LAB.folder / "lab.toml").read_bytes().replace(b"2", b"3"))
    with pytest.raises(LabError, match=r"02_other/lab\.toml: "):
        read_lab(tmp_path, "02_other")
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    with pytest.raises(LabError, match=f"there is no {FOLDER}/ here"):
        find_root(tmp_path)
    monkeypatch.setattr(commands, "find_root", lambda here: ROOT)
    with pytest.raises(LabError, match="'x' is no task; tasks are called 2a"):
        commands._task("x")


def test_a_sheet_may_name_only_what_there_is(tmp_path: Path) -> None:
    (tmp_path / LAB.folder).mkdir(parents=True)
    (tmp_path / LAB.folder / "lab.md").write_text("{builtins} {no_such_size}")
    with pytest.raises(LabError, match=r"{no_such_size} is no size of \[variant\] and no question"):
        variant.sheet(LAB, tmp_path, 1)
    with pytest.raises(AttributeError, match="has no size 'x' under"):
        _ = variant.Sizes(a=1).x
    (tmp_path / variant.CLASS_FILE).write_bytes(b"{")
    with pytest.raises(LabError, match="unpack the release again"):
        variant.class_of(tmp_path)


def test_a_lab_that_was_not_started_is_told(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="lab 2 was not started here: git switch lab-2, or mooncake-lite labs"):
        starting.read_recorded(tmp_path, LAB)
    with pytest.raises(LabError, match=r"data\.py: No such file or directory; restore the file"):
        starting.data_module(tmp_path, LAB)
    starting.write_data(tmp_path, tmp_path / "into", LAB, 1)
    assert not (tmp_path / "into").exists(), "a lab without data.py has no data"
    with pytest.raises(LabError, match=r"data is not there; mooncake-lite labs start 2 writes it"):
        playing.played(tmp_path, LAB, tmp_path, "model", "your code")


def test_a_release_of_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructor_commands, "lab_here", lambda number: (ROOT, LAB))
    with pytest.raises(Exception, match="nothing to write; name a folder with --out"):
        instructor_commands.release.main(["2", "--class", "c", "--seed", "s"], standalone_mode=False)


# ---------------------------------------------------------------------------------- checks and regions


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"bytes_hashed = 'x'", "write one line per cost: "),
        (b"\xff", "write one line per cost: "),
        (b"no_cost = 1", "no_cost is no cost; there are "),
        (b"x = " + b"[" * 400 + b"\n[" * 400, "maximum recursion depth exceeded"),
        (b"x" + b".x" * 4000 + b" = 1", "a line has more than 500 characters; "),
        (b"".join(b"x%d = 1\n" % number for number in range(1500)), "x0, x1, x10, .{67} is no cost; "),
        (f"{LAB.tasks[0].cost.name} = -1".encode(), "write a number from 0 to"),
    ],
)
def test_a_prediction_that_cannot_be_is_told(text: bytes, why: str) -> None:
    with pytest.raises(LabError, match=f"^place: .*{why}"):
        checking.prediction_of(text, "place", LAB)


def test_a_file_that_changed_while_it_was_tested_is_not_reported_as_tested(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    outcome: Any = SimpleNamespace(cases=[1], files={"a.py": "another digest"})
    with pytest.raises(LabError, match=r"a\.py was changed while it was tested"):
        checking._tested(tmp_path, {"a.py": ""}, {}, outcome)
    outcome.files = {}
    assert checking._tested(tmp_path, {"a.py": ""}, {}, outcome) == ["not tested a.py: it was not imported"]
    outcome.cases = []
    assert checking._tested(tmp_path, {"a.py": ""}, {}, outcome) == []


def test_a_region_of_too_many_characters_and_a_function_in_one_line_are_refused() -> None:
    task = LAB.tasks[0]
    source = (ROOT / task.file).read_text(encoding="utf-8")
    long = regions.replace(source, task.function, "        x = 1\n" * (MOST_CHARACTERS // 10))
    assert re.match(r"the region has [\d,]+ characters; 20,000 are allowed", look_at(LAB, task, long))
    with pytest.raises(LabError, match="f stands in one line"):
        regions.find("def f(): return 1\n", "f")


def test_a_region_is_found_in_a_file_that_python_cannot_read_with_and_without_a_docstring() -> None:
    broken = "def f(a):\n    # why\n    return (1\n\ndef g():\n    '''Doc.'''\n    return 2\n"
    assert regions.find(broken, "f") == regions.Span(1, 3, 4)
    assert regions.find(broken, "g") == regions.Span(6, 7, 4)
    assert regions.find("def f(a):\n    '''never closed\n    return 1\n", "f").begin == 1


def test_ruff_and_git_that_do_not_run_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ruff.find_ruff_bin", lambda: "/no/such/program")
    with pytest.raises(LabError, match=r"ruff does not run .*; pip install 'mooncake-lite\[test\]'"):
        tidy.untidy("def f():\n    return 1\n", "f")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LabError, match="git does not run: No such file or directory; install git"):
        trees.git(tmp_path, "status")


# ------------------------------------------------------------------------------- kernels, sandboxes


def test_kernels_are_not_judged_where_nothing_can_be_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [msgspec.structs.replace(LAB.tasks[0], kernels=["copy"])]
    monkeypatch.setattr(lowering, "_asked", lambda *_, **__: {"": "no NVVM here"})
    assert lowering.lower(ROOT, LAB, tasks, level="none") == Lowered({}, "no NVVM here")
    monkeypatch.setattr(lowering, "_asked", Mock(side_effect=Stopped("it crashed")))
    assert lowering.lower(ROOT, LAB, tasks, level="none").problems == {"2a": f"{FAILED}: it crashed"}
    assert lowering.device(ROOT, LAB).error == "it crashed"
    said: list[str] = []
    assert checking._on_gpu(ROOT, LAB, tasks, ROOT, {}, said.append)
    assert said == ["no GPU run: it crashed"]


def test_kernels_on_a_gpu_are_counted_and_those_that_fail_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        SimpleNamespace(name="a_b", passed=False, message="wrong\nrow"),
        SimpleNamespace(name="c", passed=True, message=""),
    ]
    monkeypatch.setattr(checking, "device", lambda root, lab: lowering.Device("an H200"))
    monkeypatch.setattr(checking, "run_tests", lambda *_, **__: SimpleNamespace(cases=cases))
    said: list[str] = []
    assert not checking._on_gpu(ROOT, LAB, LAB.tasks, ROOT, {}, said.append)
    assert said == ["on an H200: 1 of 2 tests of kernels", "  test       a b", "  wrong\n  row"]
    cases[0].passed = True
    assert checking._on_gpu(ROOT, LAB, LAB.tasks, ROOT, {}, said.append)


def test_a_machine_on_which_a_confined_program_does_not_run_allows_no_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "run", lambda *_, **__: sandbox.Ended(1, "no python\n", ""))
    assert sandbox.possible() == (
        "none",
        "namespaces: a program ended with 1: no python; uid: a program ended with 1: no python",
    )


def test_an_id_of_an_account_or_of_a_process_is_used() -> None:
    assert sandbox._is_used(0)
    gone: Any = SimpleNamespace(stat=Mock(side_effect=FileNotFoundError))
    assert sandbox._owner(gone) == -1


@pytest.mark.parametrize(
    ("seed", "told"), [("public", "exit code 37"), ("private", "its process ended in a private test")]
)
def test_how_a_private_test_ended_is_not_told_to_a_student(seed: str, told: str) -> None:
    """A region could tell what it was given in private by its exit code."""
    child = Mock(files={}, printed=b"", stopped="exit code 37", ask=Mock(side_effect=Stopped("exit code 37")))
    run, outcome = SimpleNamespace(seeds={seed: 1}), Outcome()
    session: Any = SimpleNamespace(run=run, lab=LAB, outcome=outcome, child=lambda task: child)
    with pytest.raises(pytest.fail.Exception, match="exit code 37"):
        Judge(session, "2a", "name", seed).ask("call", {}, int)
    assert outcome.stopped == {"2a": told}


def test_a_child_that_cannot_be_started_is_no_failed_test(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(Run(str(ROOT), 2, {"public": 1}, "none", ""), ROOT)
    monkeypatch.setattr(judging, "task_child", Mock(side_effect=sandbox.SandboxRefused("no space")))
    with pytest.raises(sandbox.SandboxRefused):
        session.child("2a")
    assert "no space" in session.outcome.broken
    refused = msgspec.json.encode(session.outcome)

    def pytest_run(root: Path, folder: Path, arguments: list[str]) -> tuple[int, str]:
        (folder / "results.json").write_bytes(refused)
        return 1, ""

    monkeypatch.setattr(running, "_pytest", pytest_run)
    with pytest.raises(LabError, match=r"the tests of lab 2 cannot run: .*no space"):
        running.run_tests(ROOT, LAB, ["2a"], ROOT, {"public": 1}, level="none")


def test_a_cost_above_the_limit_is_told_beside_the_prediction() -> None:
    task, said = LAB.tasks[0], list[str]()
    seen = TaskScore("graded", 1, 1, 5, costs=[Counted("2a", "public", 9, 5, 5)])
    checking._report(task, seen, {task.cost.name: 9.0}, said.append)
    assert said[-1].startswith(f"  cost       {task.cost.name}: at most 5 {task.cost.unit} are needed")
