"""What `labs grade` writes: a table, a page for each student, and a result for Gradescope.

Called with finished grades. It computes nothing. A student's texts are escaped wherever they are shown.
Explained in docs/how-to/teach-a-course.md.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mooncake_lite.labs.grading import MOST_MARKS, PARTS, Grade
from mooncake_lite.labs.lab import Lab
from mooncake_lite.labs.release import template
from mooncake_lite.labs.scores import possible

MOST_NAME_BYTES = 200
"""Of a student's name in a file name, which may have 255 bytes in all."""

PRIVATE = ".private.txt"
"""Ending of the file for the teacher alone: grades.private.txt beside grades.csv."""


def write_grades(lab: Lab, grades: Sequence[Grade], out: Path, *, show_all: bool = False) -> None:
    """Write `out` as CSV, and a folder of its name with NAME.html and NAME.json for each student.

    show_all   as in `gradescope`

    What a private test has said is in neither of them: it is in a file beside the table, for the teacher.
    """
    pages = out.with_suffix("")
    pages.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["student", "total", "automatic", *PARTS, *MOST_MARKS, *lab.ids, "messages"])
        for grade in grades:
            table.writerow(_row(lab, grade))
    out.with_suffix(PRIVATE).write_text(private_failures(grades), encoding="utf-8")
    for name, grade in zip(file_names([grade.name for grade in grades]), grades, strict=True):
        (pages / f"{name}.html").write_text(page(lab, grade), encoding="utf-8")
        (pages / f"{name}.json").write_bytes(msgspec.json.encode(gradescope(lab, grade, show_all)))


def file_names(names: Sequence[str]) -> list[str]:
    """Return a name for the files of each student: at most MOST_NAME_BYTES, and no two alike."""
    made: dict[str, None] = {}
    for name in names:
        short = unique = name.encode()[:MOST_NAME_BYTES].decode(errors="ignore")
        number = 1
        while unique in made:
            number += 1
            unique = f"{short}-{number}"
        made[unique] = None
    return list(made)


def _row(lab: Lab, grade: Grade) -> list[object]:
    """A text that begins like a formula must not become one in a spreadsheet."""
    marks = ["" if grade.marks.get(part) is None else grade.marks[part] for part in MOST_MARKS]
    messages = "; ".join(" ".join(message.split()) for message in grade.messages)
    cells = [grade.name, messages]
    name, said = ("'" + cell if cell[:1] in "=+-@\t\r" and cell else cell for cell in cells)
    tasks = [grade.scores[task].points for task in lab.ids]
    return [name, grade.total, grade.automatic, *map(grade.part, PARTS), *marks, *tasks, said]


def page(lab: Lab, grade: Grade) -> str:
    """Return the page of one student."""
    parts = {part: (grade.part(part), most) for part in PARTS if (most := possible(lab, part))}
    return template("grade.html", lab=lab, grade=grade, parts=parts, marks=MOST_MARKS)


def gradescope(lab: Lab, grade: Grade, show_all: bool) -> dict[str, object]:
    """Return results.json as Gradescope's autograder expects it.

    show_all   show the student every part at once; else the public tests, and the rest once it is published
    """
    tests = [
        {
            "name": f"{task.id} {task.title}: {part}",
            "score": getattr(grade.scores[task.id], part),
            "max_score": getattr(task.points, part),
            "output": _output(grade, task.id) if part == "public" else "",
            "visibility": "visible" if show_all or part == "public" else "after_published",
        }
        for task in lab.tasks
        for part in PARTS
        if getattr(task.points, part)
    ]
    return {
        "score": grade.total,
        "output": "\n".join([*grade.messages, *grade.predictions]),
        "tests": tests,
        "visibility": "visible",
    }


def _output(grade: Grade, task: str) -> str:
    seen = grade.scores[task]
    state = [seen.state] if seen.state != "graded" else []
    failed = (f"{name}\n{text}" for name, text in seen.failed_with("public").items())
    return "\n".join([*state, *failed, *seen.untidy])


def private_failures(grades: Sequence[Grade]) -> str:
    """Return what each private test that failed says. It names inputs of the private seed."""
    return "".join(
        f"{grade.name} {task} {name}\n{text}\n\n"
        for grade in grades
        for task, seen in grade.scores.items()
        for name, text in seen.failed_with("private").items()
    )
