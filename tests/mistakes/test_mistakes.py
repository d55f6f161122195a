"""Each patch in this folder puts one mistake into today's code, and the tests that it names fail then.

`make soak` plants them, one after the other, in a copy of the tree. Before that, the tests pass there.
`pytest --soak 2 -k NAME tests/mistakes` plants one. A patch is a unified diff below a header:

    What: the mistake, in one sentence
    Mended by: the subject of the commit that mended it; none: it was planted by hand
    Noticed by: a test that fails with it; one line for each
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATCHES = sorted(Path(__file__).parent.glob("*.patch"))
FEWEST = 100
LIMIT_S = 1800


FIELDS = ("What", "Mended by", "Noticed by")


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake in `file`. hunks: lines of it, and the lines that take their place."""

    what: str
    mended: str
    tests: list[str]
    file: str
    hunks: list[tuple[str, str]]

    def planted(self, text: str) -> str:
        """Return a text of the file with the mistake. Each hunk's place is where its lines stand, once."""
        for old, new in self.hunks:
            assert text.count(old) == 1, f"{self.file} has these lines {text.count(old)} times:\n{old}"
            text = text.replace(old, new)
        return text


def read(patch: Path) -> Mistake:
    header, _, diff = patch.read_text(encoding="utf-8").partition("\n--- a/")
    fields = [line.partition(": ")[::2] for line in header.splitlines() if line]
    (what,), (mended,), tests = ([value for name, value in fields if name == one] for one in FIELDS)
    assert len(fields) == 2 + len(tests)
    file, *hunks = re.split(r"^@@.*\n", diff, flags=re.MULTILINE)
    return Mistake(what, mended, tests, file.partition("\n")[0], [sides(hunk) for hunk in hunks])


def sides(hunk: str) -> tuple[str, str]:
    """Return the lines of a hunk before and after."""
    lines = hunk.splitlines(keepends=True)
    return tuple("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))


@pytest.mark.quick
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_mistake_can_be_planted_into_todays_code(patch: Path) -> None:
    mistake = read(patch)
    text = (ROOT / mistake.file).read_text(encoding="utf-8")
    ast.parse(planted := mistake.planted(text))
    assert planted != text
    assert mistake.what.endswith(".")
    assert mistake.tests
    for test in mistake.tests:
        file, _, name = test.partition("::")
        assert re.search(rf"def {name.partition('[')[0]}\(", (ROOT / file).read_text(encoding="utf-8")), test


@pytest.mark.quick
def test_there_are_as_many_mistakes_as_the_page_says() -> None:
    assert len(PATCHES) >= FEWEST
    assert len({read(patch).what for patch in PATCHES}) == len(PATCHES)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree."""
    tree = tmp_path_factory.mktemp("mistakes") / "tree"
    tree.mkdir()
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, tree)
        elif path.is_dir() and not path.name.startswith(".") and not (path / "pyvenv.cfg").exists():
            shutil.copytree(path, tree / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


def run(tree: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """Run tests in a tree, whose modules come first also for the processes that they start."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_its_tests_notice_a_mistake(soak: int, patch: Path, request: pytest.FixtureRequest) -> None:
    if soak == 1:
        pytest.skip("plants mistakes one after the other; run by make soak")
    mistake, tree = read(patch), request.getfixturevalue("tree")
    file = tree / mistake.file
    text = file.read_text(encoding="utf-8")
    done = run(tree, mistake.tests)
    assert done.returncode == 0, f"without a mistake:\n{done.stdout[-4000:]}"
    file.write_text(mistake.planted(text), encoding="utf-8")
    done = run(tree, mistake.tests)
    file.write_text(text, encoding="utf-8")
    assert done.returncode == 1, f"{mistake.what}\nNo test notices it.\n{done.stdout[-4000:]}"
