"""Starting a lab: in the full repository a branch with its stubs, in a release the sheet.

Used by `labs start`. It knows git and files. Explained in docs/explain/labs.md.
"""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

from mooncake_lite.errors import LabError
from mooncake_lite.labs.lab import Lab
from mooncake_lite.labs.regions import stripped
from mooncake_lite.labs.variant import class_of, sheet, sizes


def start(root: Path, lab: Lab) -> str:
    """Begin a lab; return what to print.

    Raises LabError for a dirty tree, and for a branch that is there already.
    """
    given = class_of(root)
    if given.lab or not (root / ".git").exists():
        write_data(root, root, lab, given.seed)
        return sheet(lab, root, given.seed)
    branch = f"lab-{lab.number}"
    if dirty := _git(root, "status", "--porcelain"):
        names = ", ".join(line[3:] for line in dirty.splitlines()[:3])
        raise LabError(f"the tree has changes ({names}); commit or stash them, then start the lab")
    if _git(root, "branch", "--list", branch):
        raise LabError(f"the branch {branch} is there already; git switch {branch}, or delete it first")
    _git(root, "switch", "-c", branch)
    for file, tasks in lab.files.items():
        (root / file).write_text(stripped((root / file).read_text(encoding="utf-8"), tasks), encoding="utf-8")
    text = sheet(lab, root, given.seed)
    (root / lab.folder / "lab.md").write_text(text, encoding="utf-8")
    write_data(root, root, lab, given.seed)
    _git(root, "add", "--all")
    _git(root, "commit", "--quiet", "-m", f"labs: start lab {lab.number}")
    return f"You are on the branch {branch}. The sheet is {lab.folder}/lab.md.\n\n{text}"


def write_data(root: Path, into: Path, lab: Lab, seed: int) -> None:
    """Write the data of a variant into the lab's folder of a tree. data.py of the lab's tests makes them."""
    if not (root / lab.tests / "data.py").exists():
        return
    files: dict[str, bytes] = data_module(root, lab).data(seed, sizes(lab, seed))
    (into / lab.folder / "data").mkdir(exist_ok=True)
    for name, data in files.items():
        (into / lab.folder / "data" / name).write_bytes(data)


def data_module(root: Path, lab: Lab) -> Any:
    """Import data.py of the lab's tests. Raises LabError if it is not there."""
    path = root / lab.tests / "data.py"
    specification = importlib.util.spec_from_file_location("lab_data", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except OSError as error:
        raise LabError(f"{path}: {error.strerror}; restore the file") from None
    return module


def _git(root: Path, *arguments: str) -> str:
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
