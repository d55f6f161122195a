"""Notes: what `labs` remembers between two commands: hints given, points of the last check, failing traces.

Used by the student's commands. Kept in .labs/ in the root of the tree. Explained in docs/explain/labs.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

FOLDER = ".labs"


class Notes(msgspec.Struct):
    """What is remembered.

    hints    {task: hints given}
    public   {lab: points of the last check}
    answers  {lab: right answers of the last check}
    traces   {task: what to draw}
    open     {task: its parts that do not have all points}
    """

    hints: dict[str, int] = {}
    public: dict[str, int] = {}
    answers: dict[str, int] = {}
    traces: dict[str, Any] = {}
    open: dict[str, list[str]] = {}


def read_notes(root: Path) -> Notes:
    """Return the notes of a tree; empty ones when there are none, or when they cannot be read."""
    try:
        return msgspec.json.decode((root / FOLDER / "notes.json").read_bytes(), type=Notes)
    except (OSError, msgspec.MsgspecError):
        return Notes()


def write_notes(root: Path, notes: Notes) -> None:
    """Keep the notes. The folder tells git to ignore it."""
    (root / FOLDER).mkdir(exist_ok=True)
    (root / FOLDER / ".gitignore").write_text("*\n")
    (root / FOLDER / "notes.json").write_bytes(msgspec.json.encode(notes))
