"""A histogram of failures: how many of a class fail each test, so that a teacher sees what to explain again.

Written by `labs grade` beside the table. Pure: grades in, a table out. Explained in
docs/how-to/teach-a-course.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mooncake_lite.labs.grading import Grade
from mooncake_lite.labs.lab import Lab
from mooncake_lite.labs.show import TableTrace

BAR = 30
"""Characters of a bar that stands for the whole class."""

ENDING = ".failures.svg"


def failures(lab: Lab, grades: Sequence[Grade], class_name: str) -> TableTrace:
    """Return a row for each test that somebody fails, the most common failure of a task first.

    A test counts once for a student, with the public or the private seed. A task that was not tested, because
    it is missing or stopped at a gate, has a row of its own.
    """
    rows = []
    for task in lab.ids:
        tested = [grade.scores[task] for grade in grades if grade.scores[task].state == "graded"]
        failed = Counter(
            sentence for seen in tested for sentence in {name.partition(" [")[0] for name in seen.failed}
        )
        rows += [
            _row(task, sentence.replace("_", " "), count, len(grades))
            for sentence, count in sorted(failed.items(), key=lambda item: (-item[1], item[0]))
        ]
        if missing := len(grades) - len(tested):
            rows.append(_row(task, "(not handed in, or stopped at a gate)", missing, len(grades)))
    title = f"{class_name[:60]!r}, lab {lab.number}: which tests fail, of {len(grades)} submissions"
    return TableTrace(title, ["task", "test", "fail", ""], rows)


def _row(task: str, what: str, count: int, total: int) -> list[str]:
    return [task, what, str(count), "#" * max(1, round(BAR * count / total))]
