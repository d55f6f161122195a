"""Releases: a tree for students, with stubs, one class's variant, and nothing that tells the solutions.

Used by `labs release`. It copies what git tracks, and then searches the result for lines of the regions.
Explained in docs/explain/labs.md, "Releases".
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from mooncake_lite import __version__
from mooncake_lite.errors import LabError
from mooncake_lite.labs import regions
from mooncake_lite.labs.gates import outside_of
from mooncake_lite.labs.lab import FOLDER, Lab
from mooncake_lite.labs.starting import write_data
from mooncake_lite.labs.trees import copied, tracked_files
from mooncake_lite.labs.variant import CLASS_FILE, Class, public_seed, sheet

CONFTEST = f"{FOLDER}/conftest.py"
"""The fixtures of all labs' tests."""
ATTEMPTS = "attempts/"
"""In the folder of a lab, what others have handed in; it does not belong to a release."""
QUESTION_TESTS = ("/__init__.py", "/trial.py")
"""Of the folder of tests of a lab of questions, what a release has: the others compute the answers."""
STUDENTS = ("prediction.toml", "answers.toml", "numbers.toml", "report.md", "figures/", "data/", "run.")
"""What a student adds to the folder of a lab; it does not belong to a release."""
ARCHIVES = ".zip"
"""Ending of submissions and autograders, which may lie in a checkout."""
EXCEPTED = "tutorials/"
"""Tutorials explain these functions and may quote them; tests in their folder may not."""


def release(root: Path, lab: Lab, class_name: str, seed: str, out: Path) -> int:
    """Write a release into a new folder; return how many files it has.

    Raises LabError if the folder is not empty, or if lines of a solution would survive.
    """
    if out.exists() and any(out.iterdir()):
        raise LabError(f"{out} is not empty; name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    try:
        names = [name for name in tracked_files(root) if _belongs(name, lab)]
        copied(root, out, names, lab.files)
        _write_variant(root, lab, class_name, seed, out)
        if found := leaks(out, solutions(root, lab)):
            raise LabError(f"lines of a solution survive in {', '.join(found)}; change these files")
    except BaseException:
        shutil.rmtree(out)
        raise
    return len(tracked_files(out))


def _belongs(name: str, lab: Lab) -> bool:
    """The project's tests have solutions in other words; other labs' sheets are no help for this one."""
    if name == CONFTEST:
        return True
    if name.endswith(ARCHIVES) or name.startswith("tests/"):
        return False
    if name.startswith(f"{FOLDER}/"):
        own = name.removeprefix(f"{lab.folder}/")
        if lab.questions and name.startswith(f"{lab.tests}/") and not name.endswith(QUESTION_TESTS):
            return False
        return own != name and not own.startswith((*STUDENTS, ATTEMPTS))
    return not name.startswith((".git", ".ci/")) or name == ".gitignore"


def _write_variant(root: Path, lab: Lab, class_name: str, seed: str, out: Path) -> None:
    number = public_seed(seed)
    (out / lab.folder / "lab.md").write_text(sheet(lab, root, number), encoding="utf-8")
    write_data(root, out, lab, number)
    sources = {file: (out / file).read_text(encoding="utf-8") for file in lab.files}
    given = Class(class_name, lab.number, number, outside_of(lab, sources), __version__)
    (out / CLASS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(given)))
    for name in ("README.md", "AGENTS.md"):
        (out / name).write_text(template(name, lab=lab, class_name=class_name), encoding="utf-8")


def template(name: str, **values: object) -> str:
    """Return a file of templates/ with these values in it, which are escaped in a page of HTML."""
    environment = Environment(
        loader=PackageLoader("mooncake_lite.labs"),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template(name).render(**values)


def solutions(root: Path, lab: Lab) -> set[tuple[str, str, str]]:
    """Return each three consecutive lines of the lab's regions."""
    return {
        lines
        for task in (lab.tasks if lab.files else ())
        for lines in regions.runs_of_three(
            regions.body((root / task.file).read_text(encoding="utf-8"), task.function)
        )
    }


def leaks(tree: Path, wanted: set[tuple[str, str, str]]) -> list[str]:
    """Return the files of a tree, tutorials excepted, with three consecutive lines of a solution.

    A compiled file counts as a leak: nobody can read what is in it.
    """
    found = []
    for path in sorted(tree.rglob("*")):
        name = str(path.relative_to(tree))
        if not path.is_file() or (name.startswith(EXCEPTED) and "/tests_" not in name):
            continue
        if path.suffix in (".pyc", ".nbc", ".nbi"):
            found.append(name)
            continue
        text = path.read_bytes().decode("utf-8", errors="replace")
        if not wanted.isdisjoint(regions.runs_of_three(text)):
            found.append(name)
    return found
