"""Releases, `start` and `pack`: what students get, and what comes back from them."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import re
import shutil
import subprocess
import tomllib
import zipfile
from functools import partial
from pathlib import Path

import pytest

from mooncake_lite import __version__
from mooncake_lite.cli import main
from mooncake_lite.errors import LabError
from mooncake_lite.labs import regions
from mooncake_lite.labs.grading import grade_folder
from mooncake_lite.labs.lab import FOLDER, lab_in, labs_in
from mooncake_lite.labs.questions import as_toml, real_answers
from mooncake_lite.labs.release import leaks, release, solutions
from mooncake_lite.labs.variant import class_of, public_seed, sheet
from tests.mooncake_lite.labs.sample_class import reference
from tests.mooncake_lite.labs.test_autograder import installed
from tests.mooncake_lite.labs.trees import ROOT, command, edit, git, labs, labs_of

LAB = lab_in(ROOT, 2)
SEED = "a long secret"


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "lab-2"
    release(ROOT, LAB, "Sample class", SEED, folder)
    return folder


@pytest.fixture
def tree(released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A student's copy of the release, in which the test works."""
    shutil.copytree(released, tmp_path / "tree")
    monkeypatch.chdir(tmp_path / "tree")
    return tmp_path / "tree"


def group(name: str) -> list[str]:
    """Return the packages of a group of pyproject.toml."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    wanted = groups[name]
    return [
        each for one in wanted for each in ([one] if isinstance(one, str) else group(one["include-group"]))
    ]


def fill_in(tree: Path, texts: dict[str, str]) -> None:
    for task in LAB.tasks:
        if task.id in texts:
            path = tree / task.file
            path.write_text(regions.replace(path.read_text(), task.function, texts[task.id]))


def test_a_release_has_no_history_no_marks_and_no_line_of_a_solution(released: Path) -> None:
    names = {str(path.relative_to(released)) for path in released.rglob("*")}
    assert not (released / ".git").exists()
    assert not [name for name in names if name.startswith("tests/") or "/attempts" in name]
    assert {name for name in names if name.startswith("tutorials/labs/") and name.endswith(".py")} == {
        "tutorials/labs/conftest.py",
        *(str(path.relative_to(ROOT)) for path in (ROOT / LAB.folder).glob("*.py")),
        *(f"{LAB.tests}/{path.name}" for path in (ROOT / LAB.tests).glob("*.py")),
    }
    assert not [name for name in names if name.endswith((".pyc", ".nbc", ".nbi"))]
    marked = [
        name for name in names if name.endswith(".py") and regions.marked((released / name).read_text())
    ]
    assert marked == []
    assert leaks(released, solutions(ROOT, LAB)) == []


def test_lines_of_a_solution_are_found_wherever_they_are(tree: Path) -> None:
    lines = reference(LAB)["2c"].splitlines()[1:4]
    (tree / "docs" / "notes.md").write_text("Look:\n\n" + "\n\n  ".join(lines))
    (tree / "store" / "keys.pyc").write_bytes(b"anything")
    (tree / LAB.tests / "data.py").write_text("\n".join(lines))
    told = ["docs/notes.md", "store/keys.pyc", f"{LAB.tests}/data.py"]
    assert leaks(tree, solutions(ROOT, LAB)) == told
    (tree / LAB.tests / "data.py").write_text("")
    (tree / "docs" / "notes.md").write_text("\n".join(lines[:2]))
    assert leaks(tree, solutions(ROOT, LAB)) == ["store/keys.pyc"]


def test_a_release_goes_into_a_new_folder_only(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(LabError, match="is not empty; name a new folder"):
        release(ROOT, LAB, "Sample class", SEED, tmp_path)


def test_a_release_tells_assistants_to_coach_and_its_sheet_has_the_numbers_of_the_class(tree: Path) -> None:
    assert "Coach, do not solve" in (tree / "AGENTS.md").read_text()
    sheet = labs("start", "2").output
    assert "| tokens per page | " in sheet
    assert not re.search(r"\{\w+\}", sheet)
    assert (tree / LAB.folder / "data" / "trace.jsonl").read_bytes().startswith(b'{"timestamp":0.0,')


@pytest.mark.quick
def test_no_sheet_of_any_class_has_a_name_in_place_of_a_number() -> None:
    for lab in labs_in(ROOT).values():
        for seed in range(50):
            text = sheet(lab, ROOT, seed)
            assert not re.search(r"\{\w+\}", text), f"lab {lab.number}, seed {seed}"


@pytest.mark.quick
def test_the_list_of_labs_says_of_each_what_its_data_say() -> None:
    listed = (ROOT / FOLDER / "README.md").read_text(encoding="utf-8")
    for lab in labs_in(ROOT).values():
        assert re.search(rf"\| {lab.number} \| \[{lab.title}\]\(.+\) \| .+ \| {lab.hours} \| ", listed)


def test_an_untouched_release_gets_no_point(tree: Path, tmp_path: Path) -> None:
    result = labs("check", "2")
    assert result.return_value == 1
    assert result.output.count("is a stub") == 5
    assert "public 0/40" in result.output
    (tmp_path / "in").mkdir()
    assert labs("pack", "2", "--out", str(tmp_path / "in" / "zero.zip")).output.count("is a stub") == 5
    (grade,) = grade_folder(ROOT, LAB, tmp_path / "in", SEED, jobs=1, trusted=True)
    assert grade.total == 0


def test_what_passes_in_a_release_gets_all_automatic_points(tree: Path, tmp_path: Path) -> None:
    fill_in(tree, reference(LAB))
    assert "public 40/40 . private seeds not run" in labs("check", "2").output
    (tmp_path / "in").mkdir()
    labs("pack", "2", "--out", str(tmp_path / "in" / "ada.zip"))
    with zipfile.ZipFile(tmp_path / "in" / "ada.zip") as archive:
        assert json.loads(archive.read("lab.json"))["seed"] == public_seed(SEED)
    (grade,) = grade_folder(ROOT, LAB, tmp_path / "in", SEED, jobs=1, trusted=True)
    assert (grade.total, grade.messages) == (75, [])


def test_a_seed_of_another_class_is_refused_and_an_archive_of_another_class_is_named(
    tree: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    labs("pack", "2", "--out", str(tmp_path / "in" / "ada.zip"))
    grade = ["labs", "grade", str(tmp_path / "in"), "--lab", "2", "--trusted", "--seed"]
    for place in (tree, ROOT):
        monkeypatch.chdir(place)
        assert main([*grade, "another secret"]) == 2
        assert "--seed is not the seed of class 'Sample class'" in capfd.readouterr().err
    release = tree / "lab-class.json"
    assert json.loads(release.read_bytes())["version"] == __version__
    other = {"class_name": "Other", "seed": public_seed("another secret"), "version": "0.0.9"}
    with zipfile.ZipFile(tmp_path / "in" / "ben.zip", "w") as archive:
        archive.writestr("lab.json", json.dumps({"lab": 2} | other))
    _, ben = grade_folder(ROOT, LAB, tmp_path / "in", SEED, jobs=1, trusted=True)
    assert ben.messages == [
        "packed in a release of another class, 'Other'",
        f"packed in a release of version 0.0.9, and graded with {__version__}",
    ]


def test_a_release_grades_with_its_own_code_and_tests(tree: Path, tmp_path: Path) -> None:
    """The checkout has moved on: its tests and its scores are not those of the release."""
    fill_in(tree, {"2d": reference(LAB)["2d"]})
    (tmp_path / "in").mkdir()
    labs("pack", "2", "--out", str(tmp_path / "in" / "ada.zip"))
    edit(tree / "mooncake_lite/labs/scores.py", "cost=task.points.cost if", "cost=1 if")
    for path in (tree / LAB.tests).glob("test_2d_*.py"):
        path.write_text(path.read_text().replace("40 * 2000", "41 * 2000"))
    out = tmp_path / "grades.csv"
    grade = ["grade", str(tmp_path / "in"), "--lab", "2", "--trusted", "--seed", SEED, "--out", str(out)]
    run = command(tree, "labs", *grade)
    assert run.returncode == 0
    assert "'Sample class', lab 2: which tests fail, of 1 submissions" in run.stdout
    assert "stopped at a gate" in (tmp_path / "grades.failures.svg").read_text()
    (row,) = csv.DictReader(out.open())
    assert (row["automatic"], row["cost"]) == ("14", "1")
    assert "82000 are allowed" in (tmp_path / "grades" / "ada.html").read_text()


def test_a_rank_that_a_user_starts_with_mpirun_in_a_release_runs_its_code(tree: Path) -> None:
    edit(tree / "mooncake_lite/rank.py", "mpirun started", "in the release mpirun started")
    run = command(tree, "serve", OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0")
    assert "error: in the release mpirun started 2 ranks" in run.stderr


def test_commands_in_a_release_run_its_code_in_the_light_environment_and_a_stub_is_one_line(
    tree: Path, tmp_path: Path
) -> None:
    """`make labs` installs one group of pyproject.toml. The environment has the checkout, without stubs."""
    there = {name.lower().replace("-", "_") for name in installed(group("labs"))} | {"mooncake_lite", "pip"}
    absent = [
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if there.isdisjoint(owner.lower().replace("-", "_") for owner in owners) and module != "tests"
    ]
    assert {"torch", "mpi4py", "httpx"} <= set(absent)
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({absent!r})\n")
    light = partial(command, tree / "docs", PYTHONPATH=str(tmp_path))
    assert "public 0/40" in light("labs", "check", "2").stdout
    run = light("simulate", "policies", "--rate", "2")
    said = "lab 2, task 2a is not written yet; `mooncake-lite labs check 2 2a` names its function"
    assert (run.stderr, run.returncode) == (f"mooncake-lite: error: {said}\n", 1)
    said = "this command needs the package httpx, which this environment lacks: run `make venv`"
    assert light("top").stderr == f"mooncake-lite: error: {said}\n"


def test_a_change_outside_of_a_region_is_named_and_not_handed_in(tree: Path) -> None:
    edit(tree / "scheduler/instance/pages.py", "return self.used.keys()", "return {7: 1}.keys()")
    said = labs("check", "2").output
    assert "pages.py differs outside of its regions; only the regions are handed in" in said
    assert "keys.py differs" not in said


def test_damage_to_the_scaffold_is_packed_with_a_message(tree: Path, tmp_path: Path) -> None:
    fill_in(tree, reference(LAB))
    edit(tree / "scheduler/instance/pages.py", "def grow(", "def become_larger(")
    edit(tree / "store/keys.py", "        keys = []\n", "        keys = [\n")
    (tree / "store/policies/sieve.py").unlink()
    output = labs("pack", "2", "--out", str(tmp_path / "x.zip")).output
    assert "2a is missing: Pages.grow is not there; restore its first line as it was" in output
    assert "2b: Python cannot read store/keys.py, line " in output
    assert "2e is missing" in output
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        assert "        keys = [\n" in archive.read("regions/2b.py").decode()
        assert archive.read("regions/2c.py").decode() == reference(LAB)["2c"]


def test_start_in_a_repository_makes_a_branch_with_stubs_and_refuses_a_dirty_tree(repository: Path) -> None:
    tree = repository
    (tree / "store" / "keys.py").write_text("")
    with pytest.raises(LabError, match=r"the tree has changes \(store/keys.py\)"):
        labs("start", "2")
    git(tree, "checkout", "-q", ".")
    assert "You are on the branch lab-2" in labs("start", "2").output
    assert git(tree, "branch", "--show-current") == "lab-2\n"
    assert git(tree, "status", "--porcelain") == ""
    for task in LAB.tasks:
        assert regions.is_stub(regions.body((tree / task.file).read_text(), task.function))
    git(tree, "switch", "-q", "main")
    with pytest.raises(LabError, match="the branch lab-2 is there already"):
        labs("start", "2")


def test_start_branches_from_the_base_although_another_lab_was_begun(repository: Path) -> None:
    answers = real_answers(ROOT, lab_in(ROOT, 0), class_of(ROOT).seed)
    folder = repository / lab_in(ROOT, 0).folder
    assert "You are on the branch lab-2" in labs_of(repository, "start", "2")
    assert "You are on the branch lab-0" in labs_of(repository, "start", "0")
    assert git(repository, "rev-parse", "lab-0~") == git(repository, "rev-parse", "main")
    assert (folder / "data" / "request_1.json").exists()
    for name in ("prediction.toml", "answers.toml"):
        (folder / name).write_text(as_toml(answers))
    (folder / "run.json").write_text("{}")
    assert "answers 10/10" in labs_of(repository, "check", "0")
    git(repository, "switch", "-q", "lab-2")
    assert "git switch lab-0, or mooncake-lite labs start 0" in labs_of(repository, "check", "0")


def test_what_students_and_teachers_make_neither_blocks_another_lab_nor_comes_into_a_release(
    repository: Path, tmp_path: Path
) -> None:
    labs("start", "0")
    for name in ("prediction.toml", "answers.toml", "run.json", "run.events"):
        (repository / lab_in(ROOT, 0).folder / name).write_text("x")
    labs("pack", "2")
    assert "You are on the branch lab-2" in labs("start", "2").output
    git(repository, "switch", "-q", "main")
    (repository / ".gitignore").write_text("")
    (repository / "grades.private.txt").write_text("x")
    shutil.copytree(repository / "store", repository / "lab-1" / "store")
    release(repository, lab_in(repository, 2), "Sample class", SEED, tmp_path / "out")
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made.isdisjoint({"lab-2.zip", "lab-1", "grades.private.txt"})


def test_a_release_installs_and_runs_by_its_own_readme(released: Path, tmp_path: Path, soak: int) -> None:
    if soak == 1:
        pytest.skip("installs everything anew, for minutes; make soak does it")
    tree = shutil.copytree(released, tmp_path / "tree")
    readme = (tree / "README.md").read_text()
    assert "make labs  " in readme
    assert "mooncake-lite labs check 2" in readme
    subprocess.run(["make", "labs"], cwd=tree, check=True, timeout=1800)
    command = [".venv/bin/mooncake-lite", "labs", "check", "2"]
    check = partial(subprocess.run, command, cwd=tree, capture_output=True, text=True, timeout=120)
    run = check()
    assert (run.returncode, "public 0/40" in run.stdout) == (1, True), run.stdout + run.stderr
    fill_in(tree, reference(LAB))
    run = check()
    assert (run.returncode, "public 40/40" in run.stdout) == (0, True), run.stdout + run.stderr
