"""Questions: a lab without tasks compares a student's answers with what a request of the class really costs.

Used by `labs check`, `show` and `dev check`. `labs start` records the answers, so a check runs no code of the
student's tree. None is graded. Explained in docs/explain/labs.md, "Labs without tasks".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from mooncake_lite.errors import LabError
from mooncake_lite.labs.checking import PREDICTION, WITHIN, must_be_possible, near
from mooncake_lite.labs.lab import Lab, Question
from mooncake_lite.labs.notes import read_notes, write_notes
from mooncake_lite.labs.starting import data_module, read_recorded
from mooncake_lite.labs.timeline import MessagesTrace
from mooncake_lite.labs.variant import sizes

ANSWERS = "answers.toml"
TRACE = "run.json"
"""The trace of the student's cluster, which shows that something was measured."""

Answer = int | list[str]


def real_answers(root: Path, lab: Lab, seed: int) -> dict[str, Answer]:
    """Compute the answer to each question of a class."""
    found: dict[str, Answer] = data_module(root, lab).answers(seed, sizes(lab, seed))
    return found


def check_answers(root: Path, lab: Lab, say: Callable[[str], None]) -> bool:
    """Compare answers.toml with the real answers and report. Return whether all are right.

    Raises LabError until every question is predicted, and for a file that cannot be read.
    """
    real = read_recorded(root, lab).answers
    predicted = read_answers(root, lab, PREDICTION, real)
    if left := [question.name for question in lab.questions if question.name not in predicted]:
        raise LabError(f"{lab.folder}/{PREDICTION}: predict {', '.join(left)} first; then measure")
    answers = read_answers(root, lab, ANSWERS, real)
    measured = (root / lab.folder / TRACE).exists()
    right = 0
    for question in lab.questions:
        name = question.name
        if name not in answers:
            verdict = f"no answer yet. {question.text}"
        elif answers[name] == predicted[name] and not measured:
            verdict = f"what you predicted; it counts once you have measured, and {TRACE} is there"
        elif answers[name] != real[name]:
            verdict = f"not right. {question.text} Look at this: {question.look}"
        else:
            verdict = f"right; {compared(real[name], predicted[name])}"
            right += 1
        say(f"{name:<16} {_in_words(question, answers.get(name))}: {verdict}")
    notes = read_notes(root)
    notes.answers[str(lab.number)] = right
    write_notes(root, notes)
    say(answers_in_words(root, lab))
    return right == len(lab.questions)


def answers_in_words(root: Path, lab: Lab) -> str:
    """Return how many answers of the last check were right."""
    right = read_notes(root).answers.get(str(lab.number))
    seen = "not checked yet" if right is None else f"answers {right}/{len(lab.questions)}"
    return f"{seen} . not graded"


def picture(root: Path, lab: Lab) -> MessagesTrace:
    """Return the timeline of a class's requests. Raises LabError until every question has an answer."""
    recorded = read_recorded(root, lab)
    answers = read_answers(root, lab, ANSWERS, recorded.answers)
    if left := [question.name for question in lab.questions if question.name not in answers]:
        raise LabError(
            f"the picture shows the answers; answer {', '.join(left)} in {lab.folder}/{ANSWERS} first"
        )
    return recorded.timeline


def read_answers(root: Path, lab: Lab, name: str, real: dict[str, Answer]) -> dict[str, Answer]:
    """Read {question: answer} from a file; none when it is not there.

    Raises LabError for a file that is no TOML, an unknown question, or an answer of another type.
    """
    path = root / lab.folder / name
    if not path.exists():
        return {}
    try:
        found = msgspec.toml.decode(path.read_text(encoding="utf-8-sig"), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LabError(f"{path}: {error}; write one line per question: {next(iter(real))} = 12") from None
    for question, answer in found.items():
        if question not in real:
            raise LabError(f"{path}: {question} is no question; there are {', '.join(real)}")
        try:
            msgspec.convert(answer, type=list[str] if isinstance(real[question], list) else int)
        except msgspec.ValidationError:
            wanted = '["One", "Two"]' if isinstance(real[question], list) else "12"
            raise LabError(
                f"{path}: {question} = {str(answer)[:80]!r}; write it as {question} = {wanted}"
            ) from None
        if isinstance(answer, int):
            must_be_possible(str(path), question, answer)
    return found


def as_toml(answers: dict[str, Answer]) -> str:
    """Return answers as a file that `read_answers` reads."""
    return "".join(f"{name} = {msgspec.json.encode(answer).decode()}\n" for name, answer in answers.items())


def compared(real: Answer, predicted: Answer) -> str:
    """Return how a prediction compares with the answer."""
    if real == predicted:
        return "you predicted it"
    if isinstance(real, list) or isinstance(predicted, list):
        return "you predicted something else"
    return f"you predicted {predicted:,}, {'within' if near(predicted, real) else 'not within'} {WITHIN}x"


def _in_words(question: Question, answer: Answer | None) -> str:
    if answer is None:
        return "-"
    if isinstance(answer, list):
        return ", ".join(answer)[:80]
    return f"rank {answer}" if question.unit == "rank" else f"{answer:,} {question.unit}"
