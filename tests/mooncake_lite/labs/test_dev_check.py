"""`labs dev check`: its rules hold for every lab, and each rule finds what breaks it."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from mooncake_lite.errors import LabError
from mooncake_lite.labs import running, sandbox
from mooncake_lite.labs.bench import bench_of, benches_like, dealt
from mooncake_lite.labs.dev_check import (
    Bench,
    dev_check,
    marks_agree,
    nothing_survives_in_a_release,
    reference_gets_all_points,
    stubs_fail_and_key_tests_are_there,
    unkilled,
)
from mooncake_lite.labs.grading import grade_folder
from mooncake_lite.labs.lab import Lab, lab_in, labs_in
from mooncake_lite.labs.mutants import Mutant, mutants
from mooncake_lite.labs.questions import as_toml, real_answers
from mooncake_lite.labs.survivors import equal_of, survivors, unnoticed
from mooncake_lite.labs.variant import public_seed
from tests.mooncake_lite.labs.sample_class import STUBS, reference, write_archive
from tests.mooncake_lite.labs.trees import ROOT, edit

LABS = labs_in(ROOT)


@pytest.fixture
def bench(tree: Path) -> Bench:
    """Lab 2 in a tree that the test may break: it is the repository, and its copy too."""
    return Bench(tree, lab_in(tree, 2), tree)


@pytest.mark.parametrize("lab", LABS.values(), ids=lambda lab: f"lab{lab.number}")
def test_every_lab_keeps_the_quick_rules(lab: Lab) -> None:
    said: list[str] = []
    assert dev_check(ROOT, lab, quick=True, say=said.append), "\n".join(said)


@pytest.mark.parametrize("lab", LABS.values(), ids=lambda lab: f"lab{lab.number}")
def test_every_lab_keeps_all_rules(lab: Lab, soak: int) -> None:
    if soak == 1:
        pytest.skip("tries every mutant and hostile code, for a minute; make soak does it")
    level, why = sandbox.possible()
    if level == "none":
        pytest.skip(why)
    began, said = time.monotonic(), []
    assert dev_check(ROOT, lab, quick=False, say=said.append), "\n".join(said)
    assert time.monotonic() - began < 20 * 60


@pytest.mark.parametrize("number", [number for number, lab in LABS.items() if lab.files])
def test_nearly_all_mutants_that_differ_from_the_reference_are_noticed(number: int, soak: int) -> None:
    if soak == 1:
        pytest.skip("tries every mutant, for minutes; make soak does it")
    lab, left, different = LABS[number], list[tuple[str, str]](), 0
    with bench_of(ROOT, lab) as bench, benches_like(bench) as benches:
        known = equal_of(bench)
        for task in lab.tasks:
            equal = known.get(task.id, {})
            different += len(mutants(bench.region(task))) - len(equal)
            left += [(task.id, each.what) for each in survivors(benches, task) if each.what not in equal]
    assert len(left) <= 0.05 * different, left


@pytest.mark.parametrize(
    "lab", [lab for lab in LABS.values() if lab.tasks], ids=lambda lab: f"lab{lab.number}"
)
def test_twenty_differing_submissions_are_graded_at_four_a_minute(
    lab: Lab, tmp_path: Path, soak: int
) -> None:
    if soak == 1:
        pytest.skip("grades twenty submissions; make soak does it")
    (tmp_path / "in").mkdir()
    for number in range(20):
        texts = {
            task: f"{_indent(text)}# Variant {number} of {task}.\n{text}"
            for task, text in reference(lab).items()
        }
        numbers = as_toml(real_answers(ROOT, lab, public_seed("twenty"))) if lab.questions else ""
        more = {"numbers.toml": f"# Variant {number}.\n{numbers}".encode()} if lab.questions else {}
        write_archive(tmp_path / "in" / f"s{number:02}.zip", texts, lab.number, **more)
    began = time.monotonic()
    trusted = sandbox.possible()[0] == "none"
    grades = grade_folder(ROOT, lab, tmp_path / "in", "twenty", jobs=1, trusted=trusted)
    assert [grade.automatic for grade in grades] == [75] * 20
    assert time.monotonic() - began < 20 / 4 * 60


def _indent(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def test_a_test_that_cannot_fail_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes with a stub in place of the region, the worst of all mutants; the others would cost time."""
    monkeypatch.setattr("mooncake_lite.labs.dev_check.mutants", lambda text: [Mutant("stub", STUBS["2d"])])
    for path in (bench.root / bench.lab.tests).glob("test_*"):
        path.unlink()
    (bench.root / bench.lab.tests / "test_2d_nothing.py").write_text(
        "def test_nothing(lab):\n    lab.ask('check', [], list)\n"
    )
    assert list(unkilled([bench], bench.lab.task("2d"), {})) == [
        "2d: all tests pass with stub",
        "2d nothing fails for no mutant",
    ]
    assert list(unkilled([bench], bench.lab.task("2d"), {"stub": ""})) == ["2d nothing fails for no mutant"]


def test_each_text_of_a_region_has_an_outcome_of_its_own(bench: Bench) -> None:
    task = bench.lab.task("2d")
    right, source = bench.region(task), bench.source(task)
    endless = "        while True:\n            pass\n"
    with benches_like(bench) as benches:
        texts = [right, STUBS["2d"], endless, right, right]
        outcomes = dealt(benches[:2], texts, lambda bench, own: bench.with_regions(task, own))
        assert [unnoticed(outcome) for outcome in outcomes] == [True, False, False, True, True]
        assert "processor time" in outcomes[2].stopped["2d"]
        assert all((each.tree / task.file).read_text() == source for each in benches)
    (name,) = {case.name for case in bench.with_regions(task, [STUBS["2d"]], first=True)[0].cases}
    only = bench.with_regions(task, [right], only=[name])[0].cases
    assert [case.name for case in only] == [name]


def test_a_run_of_variants_that_is_killed_leaves_no_process(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "SECONDS", 2.0)
    long = msgspec.structs.replace(bench.lab.resources, seconds=90)
    bench = replace(bench, lab=msgspec.structs.replace(bench.lab, resources=long))
    with pytest.raises(LabError, match="took more than 2 s"):
        bench.with_regions(bench.lab.task("2d"), ["        while True:\n            pass\n"])
    deadline = time.monotonic() + 10
    while left := _working_in(bench.root):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _working_in(folder: Path) -> list[psutil.Process]:
    """Return the other processes whose folder this is."""
    found = psutil.process_iter(["cwd"])
    return [each for each in found if each.info["cwd"] == str(folder) and each.pid != os.getpid()]


def test_marks_that_do_not_enclose_the_body_are_found(bench: Bench) -> None:
    assert list(marks_agree(bench)) == []
    edit(bench.root / "store/keys.py", "        # labs:end 2b\n", "")
    edit(bench.root / "store/keys.py", "        keys = []\n", "        keys = []\n        # labs:end 2b\n")
    assert list(marks_agree(bench)) == [
        "store/keys.py: the marks of 2b do not enclose the whole body of PrefixChain.extend"
    ]


def test_key_tests_that_are_missing_too_many_or_unknown_are_found(bench: Bench) -> None:
    task = bench.lab.task("2d")
    for key, found in (
        ([], "2d has 0 key tests of 8 tests"),
        (["a_check_is_free"], "2d has no tests a_check_is_free, which lab.toml calls key tests"),
        (task.key, None),
    ):
        lab = msgspec.structs.replace(bench.lab, tasks=[msgspec.structs.replace(task, key=key)])
        assert list(stubs_fail_and_key_tests_are_there(replace(bench, lab=lab))) == ([found] if found else [])


def test_a_solution_in_another_file_keeps_a_release_from_being_made(bench: Bench) -> None:
    (bench.root / "docs").mkdir()
    (bench.root / "docs" / "page.md").write_text(reference(bench.lab)["2e"])
    (found,) = nothing_survives_in_a_release(bench)
    assert "lines of a solution survive in docs/page.md" in found


def test_a_reference_that_loses_points_is_found(bench: Bench) -> None:
    edit(bench.root / "store/keys.py", "        keys = []\n", "        keys = []\n        print(keys)\n")
    lab = msgspec.structs.replace(bench.lab, tasks=[bench.lab.task("2b")])
    (found,) = reference_gets_all_points(replace(bench, lab=lab))
    assert "2b gets 14 of 15" in found
    assert "`print` found" in found


@pytest.mark.quick
def test_a_mutant_differs_from_its_region_in_one_place() -> None:
    made = mutants("        total = a + 1\n        if total < b:\n            return f(total, b)\n")
    assert len(made) == len({one.what for one in made}) == len({one.text for one in made})
    shown = {re.sub(r"\s+", " ", one.text).strip() for one in made}
    assert {
        "pass if total < b: return f(total, b)",
        "total = a + 1 pass",
        "total = a + 1 if total < b: pass",
        "total = a - 1 if total < b: return f(total, b)",
        "total = a + 2 if total < b: return f(total, b)",
        "total = a + 1 if total <= b: return f(total, b)",
        "total = a + 1 if not total < b: return f(total, b)",
        "total = a + 1 if total < b: return None",
        "total = a + 1 if total < b: return f(total)",
        "total = a + 1 if total < b: return f(None, b)",
        "total = a + 1 if total < b: return f(total, None)",
        "total = a + 1 if total < b: return f(b, total)",
    } == shown
    assert "total = a + 1 -> total = a - 1" in [one.what for one in made]


@pytest.mark.quick
def test_mutants_leave_out_a_condition_and_add_one() -> None:
    made = mutants("        if a and b.c:\n            f(x=a)\n        if d < 1:\n            return\n")
    assert {
        "if a and b.c: -> if a:",
        "if a and b.c: -> if b.c:",
        "if d < 1: -> if d < 1 and a:",
        "if d < 1: -> if d < 1 and (not b.c):",
        "f(x=a) -> f()",
        "f(x=a) -> f(x=None)",
    } <= {one.what for one in made}


def test_the_mutants_of_one_task_fail_all_of_its_tests(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake_lite.labs.dev_check.SAMPLED", 2)
    whole = replace(bench, root=ROOT)
    assert list(unkilled([whole], bench.lab.task("2c"), equal_of(whole)["2c"])) == []
