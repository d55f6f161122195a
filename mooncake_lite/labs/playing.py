"""Playing: a student's finished lab in the server, beside the reference.

Used by `labs run`. play.py of the lab's folder runs with the student's packages, and with those of the
commit at which the lab's branch begins. A release has no such commit, but the rows of the reference, which
`labs release` has written. Explained in docs/explain/labs.md, "Labs at work".

The form of a play.py: it is called as `python play.py MODEL DATA SIZES`, and its last line is a JSON list of
`Played`.

    MODEL   name or folder; "": the default one; "-": play only the parts that no model computes
    DATA    the folder with the data of the class; SIZES: the sizes of its variant, as JSON

`labs release` calls it with "-". Rows of a release are found by `what`, so `what` has no result in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from mooncake_lite.errors import LabError
from mooncake_lite.labs.gates import look_at
from mooncake_lite.labs.lab import Lab
from mooncake_lite.labs.show import TableTrace
from mooncake_lite.labs.starting import released_base
from mooncake_lite.labs.trees import git
from mooncake_lite.labs.variant import class_of, sizes

SCRIPT = "play.py"
REFERENCE = "reference.json"
"""In the lab's folder of a release: the rows of the reference."""
NO_MODEL = "-"
UNKNOWN = "-"
BAR = 12
"""Height of a bar of the picture, with its gap."""
SECONDS = 900.0
"""For one tree: the model may have to be loaded and kernels compiled."""


class Played(msgspec.Struct, frozen=True):
    """One part of a play.

    what      in a few words
    tokens    that came back, or other numbers that must be equal
    reused    tokens or blocks that were not computed again
    seconds   None: not known, or without a meaning
    said      the text of an answer; empty where there is none. The first one stands above the table
    kind      what `tokens` are: counts, times, ...
    how       the row came about. Simulated: in virtual time, equal on every machine. Timed: on this machine
    gain      what the idea of the lab gains, in one sentence. The last one stands below the table
    """

    what: str
    tokens: list[int]
    reused: int
    seconds: float | None
    said: str
    kind: str = "tokens"
    how: Literal["counted", "simulated", "timed"] = "timed"
    gain: str = ""


def play(root: Path, lab: Lab, model: str, say: Callable[[str], None], plot: Path | None = None) -> bool:
    """Play a lab on the code of a tree. Return whether no row differs from that of the reference.

    plot   draw both into this SVG file

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
        rows = played(root, lab, tree, model, "the reference") if tree else released(root, lab)
    theirs = {one.what: one for one in rows}
    for one in [one for one in mine if one.said][:1]:
        say(f"{one.what}: {' '.join(one.said.split())}\n")
    say(compared(mine, theirs).as_text())
    for who, side in (("your code", mine), ("the reference", rows)):
        for gain in [one.gain for one in side if one.gain][-1:]:
            say(f"{who}: {gain}")
    if not rows:
        say(f"this tree has neither history nor {REFERENCE}, so your code is compared with nothing")
    if plot is not None:
        try:
            plot.write_text(draw(mine, theirs), encoding="utf-8")
        except OSError as error:
            raise LabError(f"--plot {plot} cannot be written: {error.strerror}") from None
    return all(one.what not in theirs or one.tokens == theirs[one.what].tokens for one in mine)


def compared(mine: list[Played], theirs: dict[str, Played]) -> TableTrace:
    """Return both plays as a table. theirs: the rows that are known of the reference, by `what`."""
    columns = ["", "compared", "reused", "reference", "seconds", "reference", "how"]
    rows = []
    for one in mine:
        other, same = theirs.get(one.what), "not compared"
        if other is not None:
            same = f"{'equal' if one.tokens == other.tokens else 'DIFFERENT'} {one.kind}"
        reused = f"{other.reused:,}" if other else UNKNOWN
        seconds = [
            UNKNOWN if each is None or each.seconds is None else f"{each.seconds:.3f}"
            for each in (one, other)
        ]
        rows.append([one.what, same, f"{one.reused:,}", reused, *seconds, one.how])
    return TableTrace("your code beside the reference", columns, rows)


def draw(mine: list[Played], theirs: dict[str, Played]) -> str:
    """Return an SVG with seconds and what was reused: dark bars are your code, light ones the reference."""
    parts, y = list[str](), 0
    for name in ("seconds", "reused"):
        pairs = [[getattr(each, name, None) or 0 for each in (one, theirs.get(one.what))] for one in mine]
        most = max(map(max, pairs)) or 1
        y += 2 * BAR
        parts.append(f'<text x="2" y="{y}">{name}: your code dark, the reference light</text>')
        for one, pair in zip(mine, pairs):
            parts.append(f'<text x="2" y="{y + 2 * BAR}">{escape(one.what)} ({one.how})</text>')
            for value, colour in zip(pair, ("#08519c", "#9ecae1")):
                y += BAR
                bar = (
                    f'x="360" y="{y - 2}" width="{300 * value / most:.0f}" height="{BAR - 2}" fill="{colour}"'
                )
                parts.append(f"<rect {bar}><title>{value:g}</title></rect>")
            y += BAR // 2
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="680" height="{y + 2 * BAR}" font-size="10" '
    return "\n".join([f'{head}font-family="sans-serif">', *parts, "</svg>\n"])


def write_reference(root: Path, lab: Lab, out: Path) -> int:
    """Play the code of a whole tree with the data of a release, and write the rows into the release.

    Seconds of this machine say nothing about a student's and are left out, as is all that a model computes.
    Returns the number of rows. Raises LabError if the play fails.
    """
    rows = played(out, lab, root, NO_MODEL, "the reference")
    rows = [replace(one, seconds=None, gain="") if one.how == "timed" else one for one in rows]
    (out / lab.folder / REFERENCE).write_bytes(msgspec.json.encode(rows))
    for picture in (out / lab.folder).glob("run.*.svg"):  # of this machine, too
        picture.unlink()
    return len(rows)


def released(root: Path, lab: Lab) -> list[Played]:
    """Return the rows of the reference that a release has; none where there is no file of them."""
    path = root / lab.folder / REFERENCE
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Played]) if path.exists() else []
    except msgspec.MsgspecError as error:
        raise LabError(f"{path}: {error}; restore the file from the release") from None


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
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Played])
    except (IndexError, msgspec.MsgspecError):
        why = "its last line is not the rows: a region prints without a new line, or ends the program"
        raise LabError(f"{who} cannot be read: {why}") from None


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
    """Make a tree with the packages at which the lab's branch begins; None in a release."""
    if class_of(root).lab or not (root / ".git").exists():
        return None
    archive, tree = folder / "base.tar", folder / "reference"
    base = released_base(root)
    git(root, "archive", "--format=tar", f"--output={archive}", base, "--", *packages(lab))
    with tarfile.open(archive) as packed:
        packed.extractall(tree, filter="data")
    return tree
