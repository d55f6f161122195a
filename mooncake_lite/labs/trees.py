"""Trees: which files of the repository a release and a graded child get, and with what in them.

Used by release.py and grading.py. It copies text and strips regions; it runs nothing.
Explained in docs/explain/labs.md, "Releases".
"""

from __future__ import annotations

import compileall
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from py_compile import PycInvalidationMode

from mooncake_lite.errors import LabError
from mooncake_lite.labs.lab import Lab
from mooncake_lite.labs.regions import stripped

PACKAGES = ("kernels_numba", "mooncake_lite", "scheduler", "store", "transport")
FOLDERS = (*PACKAGES, "tutorials", "tests", "docs")
_NEVER = ("__pycache__", ".pyc", ".pyo", ".nbc", ".nbi", ".so")


def tracked_files(root: Path) -> list[str]:
    """Return the files of a tree: those that git knows, or all but caches where there is no git.

    New files count in the project's folders alone. Grades, submissions and releases may lie elsewhere in a
    checkout.
    """
    if (root / ".git").exists():
        told = git(root, "ls-files", "-z", "--cached")
        told += "\0" + git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *FOLDERS)
        names = [name for name in told.split("\0") if name]
        return sorted(name for name in names if (root / name).is_file() and not _left_out(name))
    paths = (path for part in FOLDERS for path in (root / part).rglob("*"))
    names = [str(path.relative_to(root)) for path in paths if path.is_file()]
    names += [path.name for path in root.iterdir() if path.is_file()]
    return sorted(name for name in names if not _left_out(name))


def git(root: Path, *arguments: str) -> str:
    """Run git. Raises LabError with its last line."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError as error:
        raise LabError(f"git does not run: {error.strerror}; install git, or use a release") from None
    if done.returncode:
        raise LabError(f"git {arguments[0]}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    return done.stdout.rstrip()


def _left_out(name: str) -> bool:
    return name.endswith(_NEVER) or "__pycache__/" in name


def copied(root: Path, into: Path, names: Iterable[str], stubs: Mapping[str, Mapping[str, str]]) -> None:
    """Copy files into another tree, without any marks.

    stubs   {file: {function: task}} of regions that become stubs, as `Lab.files`
    """
    for name in names:
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".py"):
            text = (root / name).read_text(encoding="utf-8")
            (into / name).write_text(stripped(text, stubs.get(name, {})), encoding="utf-8")
        else:
            shutil.copy(root / name, into / name)


def compiled(tree: Path) -> None:
    """Write the .pyc files of a tree, which children do not. A hash in each notices another text."""
    compileall.compile_dir(tree, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)


def child_files(root: Path, lab: Lab) -> Iterator[str]:
    """Yield what a graded child needs: the packages, and the drivers of the lab. No test is among them."""
    for name in tracked_files(root):
        if name.split("/")[0] in PACKAGES and "/" in name:
            yield name
    yield from lab.drivers
