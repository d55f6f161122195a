"""A submission: one zip archive with the text of the regions, the prediction, the report and its figures.

`labs pack` writes it and `labs grade` reads it. Nothing is unpacked to a disk: the reader takes each member
with a known name into memory, up to its limit. What is wrong with an archive becomes a message.
Explained in docs/explain/labs.md, "Submissions".
"""

from __future__ import annotations

import re
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from mooncake_lite.errors import LabError
from mooncake_lite.labs import regions
from mooncake_lite.labs.checking import PREDICTION
from mooncake_lite.labs.gates import look_at
from mooncake_lite.labs.lab import Lab
from mooncake_lite.labs.variant import class_of

REPORT = "report.md"
ABOUT = "lab.json"
MOST_ARCHIVE_BYTES = 8 << 20
MOST_MEMBERS = 40
MOST_FIGURES = 4
NUMBERS = "numbers.toml"
LIMITS = {ABOUT: 4 << 10, PREDICTION: 16 << 10, NUMBERS: 16 << 10, REPORT: 64 << 10}
REGION_BYTES, FIGURE_BYTES = 64 << 10, 2 << 20
UNREADABLE = (zipfile.BadZipFile, OSError, ValueError, RuntimeError, zlib.error, EOFError)
"""What zipfile raises for damaged archives and for forms that it does not know (NotImplementedError)."""

_REGION = re.compile(r"regions/(\d+[a-z])\.py")
_FIGURE = re.compile(r"figures/[\w.-]{1,60}\.(svg|png)", re.ASCII)


class About(msgspec.Struct, frozen=True):
    """What an archive says of itself: the lab, and the release that it comes from.

    seed     public seed of the class; 0 when it is not known
    version  of mooncake-lite, of which the release was made
    """

    lab: int
    class_name: str = ""
    seed: int = 0
    version: str = ""


@dataclass(slots=True)
class Submission:
    """What is in an archive.

    regions     {task: text}
    prediction  text of prediction.toml, report of report.md, numbers of numbers.toml; empty when they are
                not there
    figures     {name: bytes}
    about       what the archive says of itself; None when it says nothing that can be read
    messages    what is wrong with the archive, for the student
    """

    regions: dict[str, str] = field(default_factory=dict)
    prediction: str = ""
    report: str = ""
    numbers: str = ""
    figures: dict[str, bytes] = field(default_factory=dict)
    about: About | None = None
    messages: list[str] = field(default_factory=list)


def pack(root: Path, lab: Lab, out: Path) -> list[str]:
    """Write the archive of a tree. Return what the student should know before handing it in.

    Raises LabError when no region can be found at all, or the archive cannot be written.
    """
    said = []
    given = class_of(root)
    about = About(lab.number, given.name, given.seed, given.version)
    members = {ABOUT: msgspec.json.encode(about)}
    for task in lab.tasks if lab.files else ():
        try:
            source = (root / task.file).read_text(encoding="utf-8")
            text = regions.body(source, task.function)
            if state := look_at(lab, task, source):
                said.append(f"{task.id}: {state}")
            members[f"regions/{task.id}.py"] = text.encode()
        except (LabError, OSError, UnicodeDecodeError) as error:
            said.append(f"{task.id} is missing: {error}")
    if len(members) == 1 and lab.files:
        raise LabError(f"no region of lab {lab.number} can be found; {'; '.join(said)}")
    folder = root / lab.folder
    for name in (PREDICTION, REPORT, *([NUMBERS] if lab.questions else [])):
        if (folder / name).exists():
            members[name] = (folder / name).read_bytes()
        else:
            said.append(f"{lab.folder}/{name} is missing")
    for figure in sorted((folder / "figures").glob("*")):
        if _FIGURE.fullmatch(f"figures/{figure.name}"):
            members[f"figures/{figure.name}"] = figure.read_bytes()
        else:
            said.append(f"figures/{figure.name} is left out: a figure is an .svg or .png with a plain name")
    for name, data in members.items():
        if len(data) > limit_of(name):
            said.append(f"{name} has {len(data):,} bytes; at most {limit_of(name):,} are read")
    try:
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                archive.writestr(zipfile.ZipInfo(name), data)
    except OSError as error:
        raise LabError(f"{out}: {error.strerror}") from None
    return said


def limit_of(name: str) -> int:
    """Return the most bytes of a member; 0 for one that no submission has."""
    if name in LIMITS:
        return LIMITS[name]
    if _REGION.fullmatch(name):
        return REGION_BYTES
    return FIGURE_BYTES if _FIGURE.fullmatch(name) else 0


def read_submission(path: Path, lab: Lab) -> Submission:
    """Read an archive. Never raises for what is in it: messages say what was left out, and why."""
    found = Submission()
    if path.is_dir():
        found.messages.append(
            "this is a folder and is not read; hand in the archive of mooncake-lite labs pack"
        )
        return found
    try:
        if path.stat().st_size > MOST_ARCHIVE_BYTES:
            found.messages.append(f"the archive has more than {MOST_ARCHIVE_BYTES:,} bytes and is not read")
            return found
        with zipfile.ZipFile(path) as archive:
            _read_members(archive, lab, found)
    except UNREADABLE as error:
        found.messages.append(f"the archive cannot be read: {error}; make it with mooncake-lite labs pack")
    return found


def _read_members(archive: zipfile.ZipFile, lab: Lab, found: Submission) -> None:
    members = archive.infolist()
    if len(members) > MOST_MEMBERS:
        found.messages.append(
            f"the archive has {len(members)} members; only the first {MOST_MEMBERS} are read"
        )
    seen: set[str] = set()
    for member in members[:MOST_MEMBERS]:
        name = member.filename
        limit = limit_of(name)
        if name.endswith("/"):
            continue
        if not limit:
            found.messages.append(f"{name[:80]!a} is no part of a submission and is not read")
        elif name in seen:
            found.messages.append(f"{name} is there twice; the first one counts")
        else:
            seen.add(name)
            _read_member(archive, member, limit, lab, found)


def _read_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, limit: int, lab: Lab, found: Submission
) -> None:
    name = member.filename
    try:
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError("it is compressed in a form that labs pack does not write")
        with archive.open(member) as stream:
            data = stream.read(limit + 1)
    except UNREADABLE as error:
        found.messages.append(f"{name} cannot be read: {error}")
        return
    if len(data) > limit:
        found.messages.append(f"{name} has more than {limit:,} bytes and is not read")
        return
    if name.startswith("figures/"):
        if len(found.figures) < MOST_FIGURES:
            found.figures[name.removeprefix("figures/")] = data
        return
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        found.messages.append(f"{name} is not UTF-8 text and is not read")
        return
    if name == ABOUT:
        _compare(text, lab, found)
    elif name == PREDICTION:
        found.prediction = text
    elif name == REPORT:
        found.report = text
    elif name == NUMBERS and lab.questions:
        found.numbers = text
    elif (match := _REGION.fullmatch(name)) and match[1] in lab.ids:
        found.regions[match[1]] = text.replace("\r\n", "\n").replace("\r", "\n")
    else:
        found.messages.append(f"{name} is no task of lab {lab.number} and is not read")


def _compare(text: str, lab: Lab, found: Submission) -> None:
    try:
        about = found.about = msgspec.json.decode(text, type=About)
    except (msgspec.MsgspecError, RecursionError):
        found.messages.append(f"{ABOUT} cannot be read; make the archive with mooncake-lite labs pack")
        return
    if about.lab != lab.number:
        found.messages.append(f"the archive was packed for lab {about.lab}, and lab {lab.number} is graded")
