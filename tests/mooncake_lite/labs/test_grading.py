"""Grading: the sample class gets its points, damage gets a message, and nothing stays behind."""

from __future__ import annotations

import csv
import json
import re
import shutil
import socket
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from mooncake_lite.cli import cli
from mooncake_lite.errors import LabError
from mooncake_lite.labs import grading, regions, sandbox
from mooncake_lite.labs.gates import look_at
from mooncake_lite.labs.grade_pages import write_grades
from mooncake_lite.labs.grading import Grade, grade_folder, read_marks
from mooncake_lite.labs.histogram import failures
from mooncake_lite.labs.judging import Case, Outcome
from mooncake_lite.labs.lab import Points, lab_in
from mooncake_lite.labs.lowering import Lowered
from mooncake_lite.labs.scores import TaskScore, score
from mooncake_lite.labs.submission import Submission, pack, read_submission
from tests.mooncake_lite.labs.sample_class import (
    SAMPLES,
    STUBS,
    SURVIVOR,
    Sample,
    reference,
    text,
    write_archive,
    write_class,
)
from tests.mooncake_lite.labs.trees import ROOT, edit, sandboxed

LAB = lab_in(ROOT, 2)


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary files lie in a folder of the test; at the end it is empty and no process is left."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    yield
    assert list((tmp_path / "temporary").iterdir()) == []
    assert [pid for pid, folder in sandboxed().items() if folder.startswith(str(tmp_path))] == []


def points(grades: list[Grade]) -> dict[str, dict[str, int]]:
    return {
        grade.name: {task: each.points for task, each in grade.scores.items() if each.points != 15}
        for grade in grades
    }


def of_one(tmp_path: Path, texts: dict[str, str], root: Path = ROOT, **options: bool) -> list[Grade]:
    """The grades of a class of one student, Ada, in the folder `class` of the test."""
    (tmp_path / "class").mkdir()
    write_archive(tmp_path / "class" / "ada.zip", texts)
    options = {"trusted": True} | options
    return grade_folder(root, lab_in(root, 2), tmp_path / "class", "x", jobs=1, **options)


def test_the_sample_class_gets_its_points_and_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    level, why = sandbox.possible()
    if level == "none":
        pytest.skip(why)
    folder = write_class(tmp_path / "class", LAB)
    monkeypatch.setattr(socket, "socket", None)  # grading works offline
    grades = grade_folder(ROOT, LAB, folder, "sample", jobs=2, trusted=False, check_names=False)
    assert points(grades) == {name: sample.points for name, sample in SAMPLES.items()}, grades[0]
    for grade in grades:
        for task, words in SAMPLES[grade.name].says.items():
            assert words in " ".join((grade.scores[task].state, *grade.scores[task].failed.values()))
    assert [each.state for each in grades[0].scores.values()] == ["graded"] * 5


def test_a_region_that_uses_names_of_its_own_gets_nothing_even_if_it_is_right(tmp_path: Path) -> None:
    (grade,) = of_one(tmp_path, {"2d": SURVIVOR})
    assert grade.automatic == 0
    assert "imports; a region uses only" in grade.scores["2d"].state


@pytest.mark.quick
def test_a_task_whose_kernel_does_not_lower_to_ptx_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = Outcome([Case("2b", seed, seed, True, "") for seed in ("public", "private")])
    monkeypatch.setattr(grading, "run_tests", lambda *_, **__: passed)
    monkeypatch.setattr(grading, "lower", lambda *_, **__: Lowered({"2b": "it does not lower to PTX"}))
    (grade,) = of_one(tmp_path, {"2b": reference(LAB)["2b"]})
    assert (grade.automatic, grade.scores["2b"].state) == (0, "it does not lower to PTX")


@pytest.mark.quick
def test_hostile_code_that_needs_other_names_is_refused_before_it_runs() -> None:
    refused = {
        (name, task) for name, sample in SAMPLES.items() for task in sample.changed if wrong(sample, task)
    }
    assert refused == {
        ("dan_takes_all", "2c"),
        ("dan_takes_all", "2d"),
        ("hana_writes", "2a"),
        ("hana_writes", "2d"),
        ("hana_writes", "2e"),
    }


def wrong(sample: Sample, task_id: str) -> bool:
    """Whether the check of names refuses a region."""
    task = LAB.task(task_id)
    source = regions.replace((ROOT / task.file).read_text(), task.function, sample.changed[task_id])
    return "imports; a region uses only" in look_at(LAB, task, source)


def test_the_table_the_pages_and_gradescope_say_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "class"
    folder.mkdir()
    good = reference(LAB)
    hashed = {"prediction.toml": b"bytes_hashed = 1\n"}
    write_archive(folder / "ada.zip", {"2b": good["2b"]}, report__md=b"", **hashed)
    write_archive(folder / "ben.zip", {"2b": text("return ['<script>']")})
    (folder / "marks.csv").write_text("student,prediction,report\nada,9,\nben,0,15\n")
    grades = grade_folder(ROOT, LAB, folder, "sample", jobs=1, trusted=True)
    (tmp_path / "out").mkdir()
    write_grades(LAB, grades, tmp_path / "out" / "grades.csv")
    rows = list(csv.DictReader((tmp_path / "out" / "grades.csv").open()))
    assert [(row["student"], row["total"], row["automatic"]) for row in rows] == [
        ("ada", "24", "15"),
        ("ben", "15", "0"),
    ]
    result = json.loads((tmp_path / "out" / "grades" / "ada.json").read_text())
    assert (result["score"], sum(test["score"] for test in result["tests"])) == (24, 15)
    assert result["visibility"] == "visible"
    assert {test["name"].split(": ")[1]: test["visibility"] for test in result["tests"]} == {
        "public": "visible",
        **dict.fromkeys(("private", "cost", "tidiness"), "after_published"),
    }
    page = (tmp_path / "out" / "grades" / "ben.html").read_text()
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert "not within 3x" in (tmp_path / "out" / "grades" / "ada.html").read_text()


@pytest.mark.quick
def test_the_histogram_counts_a_test_once_for_a_student_and_what_was_not_tested() -> None:
    def grade(task: str, tests: int, *failed: str) -> Grade:
        scores = {each: TaskScore(each, "not handed in") for each in LAB.ids}
        said = dict.fromkeys(failed, "a message")
        return Grade("x", Submission(), scores | {task: TaskScore(task, "graded", tests=tests, failed=said)})

    both = grade("2a", 4, "it_copies [public]", "it_copies [private]", "it_counts [private]")
    at_gate_3 = grade("2b", 2)
    at_gate_3.scores["2b"] = at_gate_3.scores["2b"].nothing("it does not lower to PTX")
    histogram = failures(LAB, [both, grade("2a", 4, "it_counts [public]"), at_gate_3], "<A class>")
    assert histogram.rows == [
        ["2a", "it counts", "2", "#" * 20],
        ["2a", "it copies", "1", "#" * 10],
        ["2a", "(not handed in, or stopped at a gate)", "1", "#" * 10],
        *([task, "(not handed in, or stopped at a gate)", "3", "#" * 30] for task in LAB.ids[1:]),
    ]
    assert histogram.title == "'<A class>', lab 2: which tests fail, of 3 submissions"
    assert "&lt;A class&gt;" in histogram.as_svg()


def test_a_task_has_one_time_limit_for_all_of_its_tests(tree: Path, tmp_path: Path) -> None:
    edit(tree / LAB.folder / "lab.toml", "tasks = 32\n", "tasks = 32\ntask_seconds = 1\n")
    slow = text("import time", "time.sleep(0.3)", "return 1")
    (grade,) = of_one(tmp_path, {"2c": slow}, tree, check_names=False)
    why = "its answers took longer than 1 s together"
    assert grade.messages == [f"2c: {why}"]
    said = list(grade.scores["2c"].failed_with("private").values())
    assert len(said) == grade.scores["2c"].tests // 2
    assert all(f"stopped    {why}" in each for each in said)


TELLING = text(
    "import builtins",
    "builtins.seen = [*getattr(builtins, 'seen', []), f'input {token_ids}']",
    "raise ValueError(f'after {len(builtins.seen)} calls {builtins.seen[-2:]}'[:300])",
)
"""A region that shows its inputs, those of the call before too."""


def test_inputs_of_the_private_seed_are_shown_to_the_teacher_alone(tmp_path: Path) -> None:
    grades = of_one(tmp_path, {"2b": TELLING}, check_names=False)
    write_grades(LAB, grades, tmp_path / "grades.csv")
    calls = {
        seed: [
            int(n) for n in re.findall(r"after (\d+) calls", str(grades[0].scores["2b"].failed_with(seed)))
        ]
        for seed in ("public", "private")
    }
    assert max(calls["public"]) < min(calls["private"])
    for name in ("grades/ada.html", "grades/ada.json", "grades.csv", "grades.private.txt"):
        shown = {int(number) for number in re.findall(r"after (\d+) calls", (tmp_path / name).read_text())}
        assert bool(shown & {*calls["private"]}) == (name == "grades.private.txt"), name


@pytest.mark.quick
def test_the_share_of_the_points_that_tests_give_is_rounded_down() -> None:
    task = msgspec.structs.replace(LAB.tasks[0], points=Points(public=10, private=10, cost=3, tidiness=2))
    cases = [Case(task.id, str(number), "public", number < 2, "") for number in range(3)]
    cases += [Case(task.id, str(number), "private", number < 1, "") for number in range(3)]
    found = score(task, Outcome(cases), [])
    assert (found.public, found.private, found.points) == (6, 3, 9)


@pytest.mark.quick
def test_while_a_key_test_fails_at_most_half_of_the_points_of_its_tests_are_left() -> None:
    points = Points(public=11, private=4, cost=3, tidiness=2)
    task = msgspec.structs.replace(LAB.tasks[0], points=points, key=["3"])

    def scored(failed: str, seeds: tuple[str, ...]) -> tuple[int, int, int]:
        found = [(str(name), seed) for name in range(10) for seed in ("public", "private")]
        cases = [
            Case(task.id, name, seed, name != failed or seed not in seeds, "because") for name, seed in found
        ]
        of = score(task, Outcome(cases), [])
        return of.public, of.private, of.points

    assert scored("3", ("public", "private")) == (5, 2, 7)
    assert scored("3", ("private",)) == (11, 2, 13)
    assert scored("4", ("public", "private")) == (9, 3, 12)
    assert 2 * scored("3", ("public", "private"))[2] <= points.total


def test_without_a_sandbox_grading_stops_and_names_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_class(tmp_path / "class", LAB)
    monkeypatch.setattr(sandbox, "possible", lambda: ("none", "unshare: Operation not permitted"))
    result = CliRunner().invoke(cli, ["labs", "grade", str(folder), "--lab", "2", "--seed", "sample"])
    assert isinstance(result.exception, sandbox.SandboxRefused)
    assert "--trusted" in str(result.exception)
    assert "userns" in str(result.exception)


def test_a_user_change_alone_is_not_enough_where_the_solutions_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "possible", lambda: ("uid", "unshare: Operation not permitted"))
    with pytest.raises(LabError, match=f"read the solutions in {ROOT}: .*labs release --autograder"):
        of_one(tmp_path, STUBS, trusted=False)


def test_trusted_says_what_it_cannot_promise(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    write_archive(tmp_path / "class" / "ada.zip", STUBS)
    grade = ["labs", "grade", str(tmp_path / "class"), "--lab", "2", "--trusted", "--seed", "x"]
    said = CliRunner().invoke(cli, [*grade, "--out", str(tmp_path / "grades.csv")]).stderr
    assert said.startswith("without namespaces code of a region can read the reference and the seed")
    assert said.count("\n") == 1


# ------------------------------------------------------------------------------------------- damage


@pytest.mark.quick
@pytest.mark.parametrize("number", [1, 3, 8])
def test_a_release_that_was_handed_out_before_files_moved_is_still_graded(
    number: int, tmp_path: Path
) -> None:
    lab = lab_in(ROOT, number)
    (tmp_path / "elsewhere").mkdir()
    before = []
    for task in lab.tasks:
        before.append(msgspec.structs.replace(task, file=f"elsewhere/{Path(task.file).name}"))
        shutil.copy(ROOT / task.file, tmp_path / before[-1].file)
    pack(tmp_path, msgspec.structs.replace(lab, tasks=before), tmp_path / "then.zip")
    pack(ROOT, lab, tmp_path / "now.zip")
    then, now = (read_submission(tmp_path / f"{name}.zip", lab) for name in ("then", "now"))
    assert list(then.regions) == lab.ids, "a submission names tasks, and no file"
    assert (then.regions, then.messages) == (now.regions, [])


@pytest.mark.quick
def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = write_archive(
        tmp_path / "bomb.zip", {"2a": "x" * 50_000_000}, report__md=b"", **{"report.md": b"ok"}
    )
    assert path.stat().st_size < 100_000
    found = read_submission(path, LAB)
    assert (found.regions, found.report) == ({}, "ok")
    assert any("2a.py has more than 65,536 bytes" in message for message in found.messages)


@pytest.mark.quick
def test_text_that_is_no_utf8_and_members_that_come_twice_get_a_message(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "x.zip", {"2a": "pass"}, **{"regions/2b.py": b"\xff\xfe"})
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("regions/2a.py", "second")
    found = read_submission(path, LAB)
    assert found.regions == {"2a": "pass"}
    assert found.messages == [
        "regions/2b.py is not UTF-8 text and is not read",
        "regions/2a.py is there twice; the first one counts",
    ]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("name,points\n", "the first line must be"),
        (
            "student,prediction,report\nada,11,3\n",
            "marks.csv:2: prediction is '11', and must be from 0 to 10",
        ),
        ("student,prediction,report\nada,1,x\n", "report is 'x'"),
    ],
)
def test_marks_that_cannot_be_are_refused_by_line(tmp_path: Path, lines: str, says: str) -> None:
    (tmp_path / "marks.csv").write_text(lines)
    with pytest.raises(LabError, match=says):
        read_marks(tmp_path / "marks.csv")
