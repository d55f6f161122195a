"""Attempts by people who had not seen the solutions: they get the points that a teacher would give.

tutorials/labs/LAB/attempts/NAME has the regions that its author changed, regions/2a.py and so on, and
expected.toml: for each of them the least and the most points of a fair teacher, and parts of the messages.
`make test` grades these regions alone, and leaves out those with `soak = true`. `make soak` grades whole
submissions, with seeds of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest

from mooncake_lite.labs.checking import over
from mooncake_lite.labs.grading import Grade, Grader
from mooncake_lite.labs.lab import FOLDER, lab_in, labs_in
from mooncake_lite.labs.submission import Submission
from mooncake_lite.labs.trees import child_files, compiled, copied
from mooncake_lite.labs.variant import private_seed, public_seed
from tests.mooncake_lite.labs.sample_class import reference
from tests.mooncake_lite.labs.trees import ROOT

ATTEMPTS = sorted(path.parent for path in (ROOT / FOLDER).glob("*/attempts/*/expected.toml"))


class Expected(msgspec.Struct, forbid_unknown_fields=True):
    """What a teacher gives for a task: at least and at most so many points, and parts of the messages.

    soak   whether `make soak` alone grades it
    """

    points: tuple[int, int]
    says: list[str]
    soak: bool = False


Graders = Callable[[int], Grader]


@pytest.fixture(scope="module")
def graders(tmp_path_factory: pytest.TempPathFactory) -> Graders:
    """A grader for each lab by its number; they share nothing."""

    @cache
    def made(number: int) -> Grader:
        clean, lab = tmp_path_factory.mktemp("clean"), lab_in(ROOT, number)
        copied(ROOT, clean, child_files(ROOT, lab), lab.files)
        compiled(clean)
        return Grader(root=ROOT, lab=lab, clean=clean, seeds=seeds("attempts"), level="none")

    return made


def number_of(attempt: Path) -> int:
    return int(attempt.parents[1].name[:2])


def seeds(text: str) -> dict[str, int]:
    return {"public": public_seed(text), "private": private_seed(text)}


@pytest.mark.parametrize("number", [number for number, lab in labs_in(ROOT).items() if lab.files])
def test_there_are_right_and_wrong_attempts(number: int) -> None:
    names = {path.name for path in ATTEMPTS if number_of(path) == number}
    assert {"right_1", "right_2", *(f"wrong_{number}" for number in range(1, 6))} <= names


@pytest.mark.parametrize("folder", ATTEMPTS, ids=lambda folder: f"{number_of(folder)}-{folder.name}")
def test_an_attempt_gets_the_points_of_a_teacher(folder: Path, graders: Graders, soak: int) -> None:
    grader = graders(number_of(folder))
    expected = msgspec.toml.decode((folder / "expected.toml").read_bytes(), type=dict[str, Expected])
    texts = {path.stem: path.read_text(encoding="utf-8") for path in (folder / "regions").iterdir()}
    assert texts.keys() == expected.keys()
    prediction = (folder / "prediction.toml").read_text(encoding="utf-8")
    if soak == 1:
        expected = {task: wanted for task, wanted in expected.items() if not wanted.soak}
        if not expected:
            pytest.skip("make soak grades it")
        texts = {task: texts[task] for task in expected}
        compare(grader, grader.judged(folder.name, Submission(texts, prediction)), expected)
        return
    whole = reference(grader.lab) | texts
    for number in range(5):
        other = replace(grader, seeds=seeds(f"attempts {number}"))
        grade = other.judged(folder.name, Submission(whole, prediction))
        compare(other, grade, expected)
        for task in grader.lab.tasks:
            full = sum(msgspec.structs.astuple(task.points))
            assert task.id in texts or grade.scores[task.id].points == full


def compare(grader: Grader, grade: Grade, expected: dict[str, Expected]) -> None:
    assert grade.messages == []
    for name, wanted in expected.items():
        seen = grade.scores[name]
        costs = [over(grader.lab.task(name), cost) for cost in seen.costs]
        said = "\n".join([seen.state, *seen.failed.values(), *costs, *seen.untidy])
        least, most = wanted.points
        assert least <= seen.points <= most, f"{name} gets {seen.points}:\n{said}"
        for words in wanted.says:
            assert words in said, f"{name} does not say {words!r}:\n{said}"
