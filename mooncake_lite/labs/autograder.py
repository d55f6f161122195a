"""Autograders: a zip with which Gradescope grades one lab of one class, in containers of its own.

Used by `labs release --autograder`. Grading happens in a release, so no solution lies there. The tests of
test_autograder.py run it as root without CAP_SYS_ADMIN. Explained in docs/how-to/teach-a-course.md.
"""

from __future__ import annotations

import tempfile
import tomllib
import zipfile
from pathlib import Path

from mooncake_lite.errors import LabError
from mooncake_lite.labs.lab import Lab
from mooncake_lite.labs.release import release, template

SCRIPTS = ("setup.sh", "run_autograder")


def packages(root: Path, lab: Lab) -> list[str]:
    """Return what setup.sh asks pip for: a group of pyproject.toml, or two where a lab has kernels."""
    groups = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    return [*groups["grading"], *(groups["kernels"] if any(task.kernels for task in lab.tasks) else [])]


def write_autograder(
    root: Path, lab: Lab, class_name: str, seed: str, out: Path, *, show_all: bool = False
) -> None:
    """Write the zip: a release, the seed, and the two scripts that Gradescope calls.

    show_all   show a student every part of the result at once, not the public tests alone

    Raises LabError if it cannot be written, and for what `release` refuses.
    """
    lab.must_be_graded()
    with tempfile.TemporaryDirectory(prefix="mlab") as folder:
        release(root, lab, class_name, seed, Path(folder))
        members = {f"release/{path.relative_to(folder)}": path for path in sorted(Path(folder).rglob("*"))}
        try:
            with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, path in members.items():
                    archive.write(path, name)
                _add(archive, "seed", seed, 0o600)
                for name in SCRIPTS:
                    text = template(name, lab=lab, packages=packages(root, lab), show_all=show_all)
                    _add(archive, name, text, 0o700)
        except OSError as error:
            raise LabError(f"--autograder {out} cannot be written: {error.strerror}") from None


def _add(archive: zipfile.ZipFile, name: str, text: str, mode: int) -> None:
    member = zipfile.ZipInfo(name)
    member.external_attr = mode << 16
    archive.writestr(member, text)
