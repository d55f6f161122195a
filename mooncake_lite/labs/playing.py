"""Playing: a student's finished lab in the server, beside the reference.

Used by `labs run`. play.py of the lab's folder runs once with the student's packages and once with those of
the commit at which the lab's branch begins. Explained in docs/explain/labs.md, "Labs at work".
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from mooncake_lite.errors import LabError
from mooncake_lite.labs.gates import look_at
from mooncake_lite.labs.lab import Lab
from mooncake_lite.labs.show import TableTrace
from mooncake_lite.labs.starting import released_base
from mooncake_lite.labs.trees import git
from mooncake_lite.labs.variant import class_of, sizes

SCRIPT = "play.py"
SECONDS = 900.0
"""For one tree: the model may have to be loaded and kernels compiled."""


class Played(msgspec.Struct, frozen=True):
    """One part of a play.

    what      in a few words
    tokens    that came back, or other numbers that must be equal
    reused    tokens or blocks that were not computed again
    said      the text of an answer; empty where there is none
    kind      what `tokens` are: counts, times, ...
    """

    what: str
    tokens: list[int]
    reused: int
    seconds: float
    said: str
    kind: str = "tokens"


def play(root: Path, lab: Lab, model: str, say: Callable[[str], None]) -> bool:
    """Play a lab on the code of a tree and on the reference. Return whether tokens and counts are equal.

    Raises LabError when there is nothing to play, a region is missing, or the code fails.
    """
    if not (root / lab.folder / SCRIPT).exists():
        raise LabError(f"lab {lab.number} has nothing to run; mooncake-lite labs check {lab.number} tests it")
    for task in lab.tasks:
        if state := look_at(lab, task, (root / task.file).read_text(encoding="utf-8")):
            raise LabError(f"labs run needs every task of lab {lab.number}; {task.id}: {state}")
    with tempfile.TemporaryDirectory(prefix="mlab") as folder:
        mine = played(root, lab, yours(root, lab, Path(folder) / "yours"), model, "your code")
        tree = reference(root, lab, Path(folder))
        theirs = played(root, lab, tree, model, "the reference") if tree else mine
    for one in [one for one in mine if one.said][:1]:
        say(f"{one.what}: {' '.join(one.said.split())}\n")
    say(compared(mine, theirs).as_text())
    if tree is None:
        say("this tree has no history, so no reference: both sides are your code")
    return [one.tokens for one in mine] == [one.tokens for one in theirs]


def compared(mine: list[Played], theirs: list[Played]) -> TableTrace:
    """Return both plays as a table."""
    columns = ["", "compared", "reused", "reference", "seconds", "reference"]
    rows = [
        [
            one.what,
            f"{'equal' if one.tokens == other.tokens else 'DIFFERENT'} {one.kind}",
            f"{one.reused:,}",
            f"{other.reused:,}",
            f"{one.seconds:.3f}",
            f"{other.seconds:.3f}",
        ]
        for one, other in zip(mine, theirs)
    ]
    return TableTrace("your code beside the reference", columns, rows)


def played(root: Path, lab: Lab, tree: Path, model: str, who: str) -> list[Played]:
    """Run the script of a lab with the packages of a tree. Raises LabError with the last line it printed."""
    folder = root / lab.folder
    if not (folder / "data").exists():
        raise LabError(f"{folder / 'data'} is not there; mooncake-lite labs start {lab.number} writes it")
    size = msgspec.json.encode(sizes(lab, class_of(root).seed)).decode()
    command = [sys.executable, str(folder / SCRIPT), model, str(folder / "data"), size]
    here = Path(__file__).resolve().parents[2]
    env = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{here}"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"{who} took more than {SECONDS:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise LabError(f"{who} failed: {lines[-1]}; mooncake-lite labs check {lab.number} may say why")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Played])


def packages(lab: Lab) -> list[str]:
    """Return the packages with regions of a lab. All others are those of this code, on both sides."""
    return sorted({file.split("/")[0] for file in lab.files})


def yours(root: Path, lab: Lab, tree: Path) -> Path:
    """Make a tree with the packages of the student."""
    tree.mkdir()
    for package in packages(lab):
        (tree / package).symlink_to(root / package)
    return tree


def reference(root: Path, lab: Lab, folder: Path) -> Path | None:
    """Make a tree with the packages at which the lab's branch begins; None where git knows none."""
    if not (root / ".git").exists():
        return None
    archive, tree = folder / "base.tar", folder / "reference"
    base = released_base(root)
    git(root, "archive", "--format=tar", f"--output={archive}", base, "--", *packages(lab))
    with tarfile.open(archive) as packed:
        packed.extractall(tree, filter="data")
    return tree
