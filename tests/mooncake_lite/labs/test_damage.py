"""Damage by students: each kind gets a message and its own points, no more, and the batch goes on."""

from __future__ import annotations

import csv
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mooncake_lite.cli import cli
from mooncake_lite.errors import LabError
from mooncake_lite.labs.grade_pages import file_names, write_grades
from mooncake_lite.labs.grading import grade_folder
from mooncake_lite.labs.judging import Outcome
from mooncake_lite.labs.lab import lab_in
from mooncake_lite.labs.running import run_tests
from mooncake_lite.labs.submission import MOST_ARCHIVE_BYTES
from tests.mooncake_lite.labs.sample_class import STUBS, reference, text, write_archive
from tests.mooncake_lite.labs.trees import ROOT, edit, labs

LAB = lab_in(ROOT, 2)
GOOD = reference(LAB)
RIGHT = {"2d": GOOD["2d"]}
"""One right region: 15 points. To test one is quick."""


def write_members(path: Path, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def patched(path: Path, texts: dict[str, str], change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(write_archive(path, texts).read_bytes()))


def encrypted(data: bytes) -> bytes:
    """The flag of encryption in every header; nothing is encrypted."""
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        parts = data.split(mark)
        data = mark.join([parts[0], *(part[: place - 4] + b"\x01" + part[place - 3 :] for part in parts[1:])])
    return data


def lzma_archive(path: Path) -> bytes:
    """An archive that names 4 GiB of memory, and has a mistake in what is compressed."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("regions/2d.py", GOOD["2d"])
    head, properties, rest = path.read_bytes().partition(b"\x05\x00\x5d")
    return head + properties + b"\xff" * 12 + rest[12:]


ARCHIVES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no_archive": (lambda path: path.write_bytes(b"hello"), "the archive cannot be read"),
    "no_bytes": (lambda path: path.touch(), "the archive cannot be read"),
    "cut_off": (
        lambda path: patched(path, RIGHT, lambda data: data[: len(data) // 2]),
        "the archive cannot be read",
    ),
    "encrypted": (lambda path: patched(path, RIGHT, encrypted), "regions/2d.py cannot be read"),
    "lzma": (
        lambda path: patched(path, {}, lambda _: lzma_archive(path)),
        "regions/2d.py cannot be read: it is compressed in a form that labs pack does not write",
    ),
    "no_name": (
        lambda path: patched(path, {}, lambda data: data.replace(b"lab.json", b"\0ab.json")),
        "'' is no part of a submission",
    ),
    "deep_json": (
        lambda path: write_members(path, **{"lab.json": b'{"x":' + b"[" * 3000}),
        "lab.json cannot be read",
    ),
    "zip_bomb": (
        lambda path: write_archive(path, {"2d": "x" * 50_000_000}),
        "regions/2d.py has more than 65,536 bytes",
    ),
    "many_members": (
        lambda path: write_archive(path, {}, **{f"x{number}": b"" for number in range(5000)}),
        "the archive has 5001 members; only the first 40 are read",
    ),
    "paths_out": (
        lambda path: write_archive(path, {}, **{"../regions/2d.py": GOOD["2d"].encode()}),
        "'../regions/2d.py' is no part of a submission",
    ),
    "absolute_path": (
        lambda path: write_archive(path, {}, **{"/regions/2d.py": GOOD["2d"].encode()}),
        "'/regions/2d.py' is no part of a submission",
    ),
    "unicode_names": (
        lambda path: write_archive(path, {}, **{"regions/２d.py": GOOD["2d"].encode(), "lösung.py": b""}),
        r"'l\xf6sung.py' is no part of a submission",
    ),
    "other_lab": (
        lambda path: write_members(path, **{"regions/1a.py": b"pass", "lab.json": b'{"lab": 1}'}),
        "the archive was packed for lab 1, and lab 2 is graded",
    ),
    "too_many_bytes": (lambda path: path.write_bytes(bytes(MOST_ARCHIVE_BYTES + 1)), "is not read"),
    "flipped": (
        lambda path: patched(path, {"2d": GOOD["2d"]}, lambda data: data[:200] + b"\xff" * 9 + data[209:]),
        "regions/2d.py cannot be read",
    ),
    "no_task": (lambda path: write_archive(path, {}, **{"regions/2z.py": b"x"}), "is no task of lab 2"),
    "no_text": (
        lambda path: write_archive(path, {}, **{"regions/2d.py": b"\xff\xfe"}),
        "regions/2d.py is not UTF-8 text",
    ),
}
"""name -> (how to make it, what its message says). Each gets 0 points."""

REGIONS = {
    "empty": ("", "not handed in"),
    "comments": ("        # later\n", "the region is a stub"),
    "stub": (STUBS["2d"], "the region is a stub"),
    "unclosed": (text("assert (1"), "Python cannot read line 1 of the region"),
    "tabs": ("\tif True:\n        pass\n", "Python cannot read line"),
    "nul": (text("x = 1\0"), "Python cannot read"),
    "deep": (text("x = " + "(" * 5000 + "1" + ")" * 5000), "Python cannot read"),
    "minus": (text("x = " + "-" * 15_000 + "1"), "Python cannot read"),
    "huge": (text("x = 1") * 2000, "20,000 are allowed"),
    "line_separators": (text("x = '\u2028\x0c\x85'"), "Python cannot read line"),
    "leaves_the_function": (
        f"{GOOD['2d']}\n    def needed(self, num_tokens):\n        return 0\n",
        "more than the body of one function",
    ),
    "leaves_the_class": (f"{GOOD['2d']}\nimport os\nos._exit(0)\n", "more than the body of one function"),
    "a_whole_function": ("    def check(self):\n        pass\n", "graded"),
    "raises_something_else": (
        text(
            "class Silent(ValueError):",
            "    def __str__(self):",
            "        raise ValueError",
            "raise Silent",
        ),
        "graded",
    ),
}
"""name -> (text of 2d, what its state says)."""


def write_batch(folder: Path) -> None:
    folder.mkdir()
    for name, (make, _) in ARCHIVES.items():
        make(folder / f"{name}.zip")
    for name, (region, _) in REGIONS.items():
        write_archive(folder / f"region_{name}.zip", {"2d": region})
    write_archive(folder / "good.zip", RIGHT)


def test_each_damaged_archive_gets_a_message_and_the_batch_goes_on(tmp_path: Path) -> None:
    write_batch(tmp_path / "class")
    grades = grade_folder(ROOT, LAB, tmp_path / "class", "damage", jobs=2, trusted=True)
    found = {grade.name: grade for grade in grades}
    points = {name: grade.automatic for name, grade in found.items() if grade.automatic}
    assert points == {"good": 15}, found["good"]
    for name, (_, says) in ARCHIVES.items():
        assert any(says in message for message in found[name].messages), (name, found[name].messages)
    for name, (_, says) in REGIONS.items():
        grade = found[f"region_{name}"]
        assert grade.messages == [], name
        assert says in grade.scores["2d"].state, (name, grade.scores["2d"].state)
    assert list(tmp_path.iterdir()) == [tmp_path / "class"], "an archive wrote outside"


def test_names_of_archives_can_be_anything_that_a_file_system_allows(tmp_path: Path) -> None:
    folder = tmp_path / "class"
    folder.mkdir()
    names = ["=1+1", "bob", "名前 ñ", "a\nb", "n" * 251, "<script>"]
    for name in names:
        write_archive(folder / f"{name}.zip", {})
    (folder / "bob").write_bytes(b"")
    (folder / os.fsdecode(b"\xff\xfe.zip")).write_bytes(b"")
    (folder / "unpacked" / "regions").mkdir(parents=True)
    (folder / "notes").mkdir()
    grades = grade_folder(ROOT, LAB, folder, "damage", jobs=1, trusted=True)
    write_grades(LAB, grades, tmp_path / "grades.csv")
    with (tmp_path / "grades.csv").open(newline="") as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    assert rows.keys() == {"'=1+1", *names[1:], "��", "unpacked"}
    assert "is a folder and is not read" in rows["unpacked"]["messages"]
    assert len(grades) == 9
    assert len(list((tmp_path / "grades").glob("*.html"))) == 9


@pytest.mark.quick
def test_no_two_students_share_a_page() -> None:
    made = file_names(["a", "a", "a-2", "ä" * 150, "ä" * 149])
    assert len(set(made)) == 5
    assert all(len(name.encode()) <= 205 for name in made)


def test_a_table_that_cannot_be_written_stops_before_anything_is_graded(tmp_path: Path) -> None:
    grade = ["grade", str(tmp_path), "--lab", "2", "--seed", "x"]
    with pytest.raises(LabError, match="there is no folder"):
        labs(*grade, "--out", str(tmp_path / "no/x.csv"))
    with pytest.raises(LabError, match="pages go to the folder"):
        labs(*grade, "--out", str(tmp_path / "grades"))
    (tmp_path / "grades").touch()
    with pytest.raises(LabError, match="name a file such as"):
        labs(*grade, "--out", str(tmp_path / "grades.csv"))


def test_a_grader_that_fails_on_one_submission_goes_on_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "class"
    folder.mkdir()
    write_archive(folder / "a.zip", {"2d": text("assert 'boom'")})
    write_archive(folder / "b.zip", RIGHT)
    calls: list[int] = []

    def failing_once(*arguments: Any, **options: Any) -> Outcome:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("no space left")
        return run_tests(*arguments, **options)

    monkeypatch.setattr("mooncake_lite.labs.grading.run_tests", failing_once)
    grades = grade_folder(ROOT, LAB, folder, "damage", jobs=1, trusted=True)
    assert [grade.automatic for grade in grades] == [0, 15]
    assert grades[0].messages == ["the grader failed, and the teacher must look: OSError: no space left"]


# ------------------------------------------------------------------------------------------- labs check


def check(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["labs", "check", *arguments], standalone_mode=False)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda tree: (tree / "store/keys.py").unlink(), "store/keys.py: .*; restore the file"),
        (
            lambda tree: edit(tree / "store/keys.py", "def extend(", "def expand("),
            "PrefixChain.extend is not there; restore its first line as it was",
        ),
        (
            lambda tree: edit(tree / "store/keys.py", "class PrefixChain:", "class Chain:"),
            "PrefixChain.extend is not there; restore its first line as it was",
        ),
        (
            lambda tree: edit(tree / "store/keys.py", "self.pending: list[int] = []", "pass"),
            "AttributeError: 'PrefixChain' object has no attribute 'pending' in store/keys.py:",
        ),
        (
            lambda tree: (tree / LAB.folder / "drive.py").unlink(),
            "the code cannot be imported: FileNotFoundError",
        ),
        (lambda tree: shutil.rmtree(tree / LAB.tests), f"{LAB.tests} has no tests for 2b"),
        (
            lambda tree: (tree / LAB.folder / "lab.toml").write_text("number = 3\n"),
            "lab.toml: Object missing required field",
        ),
        (lambda tree: (tree / "store/keys.py").write_bytes(b"\xff"), "store/keys.py: .*; restore the file"),
    ],
    ids=["deleted", "renamed", "class", "edited", "driver", "tests", "lab.toml", "bytes"],
)
def test_a_check_of_a_damaged_scaffold_is_red_and_names_what_to_restore(
    tree: Path, damage: Callable[[Path], object], says: str
) -> None:
    damage(tree)
    result = check("2", "2b")
    said = f"{result.output} {result.exception or ''}"
    assert re.search(says, said), said
    assert result.return_value == 1 or isinstance(result.exception, LabError)
    assert "8/8" not in said


def test_an_archive_of_a_student_is_a_zip_with_these_members_alone(tree: Path) -> None:
    labs("pack", "2", "--out", "x.zip")
    with zipfile.ZipFile(tree / "x.zip") as archive:
        assert archive.namelist() == ["lab.json", *(f"regions/{task}.py" for task in LAB.ids)]


# ------------------------------------------------------------------------------------------- cheats


def test_no_region_makes_its_cost_smaller_than_it_is(tmp_path: Path) -> None:
    """Gate 1 lets both pass: one writes a counter, the other compares what should be plain numbers."""
    many = text("free = [page.real for page in self.free]", "[0 for a in free for b in free if a == b]")
    cheats = {
        "counter": {"2c": text("self._blocks.asked -= 10**6") + GOOD["2c"]},
        "plain": {"2d": many + GOOD["2d"]},
    }
    for name, regions in cheats.items():
        write_archive(tmp_path / f"{name}.zip", regions)
    grades = {each.name: each for each in grade_folder(ROOT, LAB, tmp_path, "damage", jobs=2, trusted=True)}
    assert grades["counter"].automatic == 0
    assert "no attribute 'asked'" in "".join(grades["counter"].scores["2c"].failed.values())
    assert (grades["plain"].part("public"), grades["plain"].part("cost")) == (8, 0)
