"""Starting a lab: in the full repository a branch with its stubs, in a release the sheet.

Used by `labs start`. It knows git and files. Explained in docs/explain/labs.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mooncake_lite.errors import LabError
from mooncake_lite.labs.child import load
from mooncake_lite.labs.lab import Lab
from mooncake_lite.labs.regions import stripped
from mooncake_lite.labs.trees import git
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
    if dirty := git(root, "status", "--porcelain"):
        names = ", ".join(line[3:] for line in dirty.splitlines()[:3])
        raise LabError(f"the tree has changes ({names}); commit or stash them, then start the lab")
    if git(root, "branch", "--list", branch):
        raise LabError(f"the branch {branch} is there already; git switch {branch}, or delete it first")
    git(root, "switch", "-c", branch)
    for file, tasks in lab.files.items():
        (root / file).write_text(stripped((root / file).read_text(encoding="utf-8"), tasks), encoding="utf-8")
    text = sheet(lab, root, given.seed)
    (root / lab.folder / "lab.md").write_text(text, encoding="utf-8")
    write_data(root, root, lab, given.seed)
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "-m", f"labs: start lab {lab.number}")
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
    try:
        return load(str(path))
    except OSError as error:
        raise LabError(f"{path}: {error.strerror}; restore the file") from None
