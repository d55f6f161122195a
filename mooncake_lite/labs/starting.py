"""Starting a lab: in the full repository a branch with its stubs, in a release the sheet.

Used by `labs start`. It knows git and files. Explained in docs/explain/labs.md.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import msgspec

from mooncake_lite.errors import LabError
from mooncake_lite.labs.child import load
from mooncake_lite.labs.lab import Lab, lab_in
from mooncake_lite.labs.regions import stripped
from mooncake_lite.labs.timeline import MessagesTrace
from mooncake_lite.labs.trees import git
from mooncake_lite.labs.variant import class_of, sheet, sizes

STARTED = "labs: start lab"
"""Begins the message of the commit that puts stubs in place of solutions."""
RECORDED = "recorded.bin"
"""A `Recorded` in the folder of the lab's tests. It is packed, so that no search shows an answer."""


class Recorded(msgspec.Struct, frozen=True):
    """What answers to questions are compared with. A whole tree computes it, before a student works.

    answers   {question: answer}
    timeline  the messages of the requests, in a lab with a picture
    slips     {question: [(wrong number, what a student who gets it should look at)]}
    files     {file: bytes} that trial.py plays
    """

    answers: dict[str, int | float | list[str]]
    timeline: MessagesTrace | None = None
    slips: dict[str, list[tuple[float, str]]] = {}
    files: dict[str, bytes] = {}


def start(root: Path, lab: Lab) -> str:
    """Begin a lab; return what to print. Its branch begins at the released base, wherever one stands.

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
    git(root, "switch", "-c", branch, released_base(root))
    lab = lab_in(root, lab.number)
    for file, tasks in lab.files.items():
        (root / file).write_text(stripped((root / file).read_text(encoding="utf-8"), tasks), encoding="utf-8")
    text = sheet(lab, root, given.seed)
    (root / lab.folder / "lab.md").write_text(text, encoding="utf-8")
    write_data(root, root, lab, given.seed)
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "-m", f"{STARTED} {lab.number}")
    return f"You are on the branch {branch}. The sheet is {lab.folder}/lab.md.\n\n{text}"


def released_base(root: Path) -> str:
    """Return the commit before the first start of a lab on this branch; HEAD where none was started."""
    started = git(root, "log", "--format=%H", f"--grep=^{STARTED} [0-9]*$").split()
    return f"{started[-1]}~" if started else "HEAD"


def write_data(root: Path, into: Path, lab: Lab, seed: int) -> None:
    """Write the data of a variant into the lab's folder of a tree. data.py of the lab's tests makes them.

    For a lab of questions, also write what their answers are compared with.
    """
    if not (root / lab.tests / "data.py").exists():
        return
    module, size = data_module(root, lab), sizes(lab, seed)
    files: dict[str, bytes] = module.data(seed, size)
    (into / lab.folder / "data").mkdir(exist_ok=True)
    for name, data in files.items():
        (into / lab.folder / "data" / name).write_bytes(data)
    if lab.questions:
        packed = zlib.compress(msgspec.json.encode(record(root, lab, seed)))
        (into / lab.tests / RECORDED).write_bytes(packed)


def record(root: Path, lab: Lab, seed: int) -> Recorded:
    """Compute what the answers of a class are compared with; a release, which has no data.py, reads it.

    Raises LabError as `read_recorded` does.
    """
    if not (root / lab.tests / "data.py").exists():
        return read_recorded(root, lab)
    module, size = data_module(root, lab), sizes(lab, seed)
    more = {name: getattr(module, name) for name in ("timeline", "slips", "files") if hasattr(module, name)}
    return Recorded(module.answers(seed, size), **{name: made(seed, size) for name, made in more.items()})


def read_recorded(root: Path, lab: Lab) -> Recorded:
    """Return what the answers of a started lab are compared with. Raises LabError if it was not started."""
    path = root / lab.tests / RECORDED
    try:
        return msgspec.json.decode(zlib.decompress(path.read_bytes()), type=Recorded)
    except (OSError, zlib.error, msgspec.MsgspecError):
        fix = f"git switch lab-{lab.number}, or mooncake-lite labs start {lab.number}"
        raise LabError(f"lab {lab.number} was not started here: {fix}") from None


def data_module(root: Path, lab: Lab) -> Any:
    """Import data.py of the lab's tests. Raises LabError if it is not there."""
    path = root / lab.tests / "data.py"
    try:
        return load(str(path))
    except OSError as error:
        raise LabError(f"{path}: {error.strerror}; restore the file") from None
