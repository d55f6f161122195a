"""Questions: a lab without regions compares a student's answers with what is right for the class.

Used by `labs check`, `grade`, `show` and `dev check`. `labs start` records the answers, so a check does not
compute them in the student's tree. A lab of numbers is graded, task by task; one without tasks is not.
Explained in docs/explain/labs.md, "Labs without tasks" and "Labs of numbers".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from mooncake_lite.errors import LabError
from mooncake_lite.labs.checking import PREDICTION, UNREADABLE, WITHIN, must_be_possible, near, read_toml
from mooncake_lite.labs.child import load
from mooncake_lite.labs.judging import Case, Outcome
from mooncake_lite.labs.lab import Lab, LabTask, Question
from mooncake_lite.labs.notes import read_notes, write_notes
from mooncake_lite.labs.scores import possible, score, sum_of
from mooncake_lite.labs.starting import Recorded, data_module, read_recorded
from mooncake_lite.labs.timeline import MessagesTrace
from mooncake_lite.labs.variant import sizes

TRACE = "run.json"
"""The trace of the student's cluster, which shows that something was measured."""

SLIP = 0.02
"""A number that is so near to what a known slip gives is explained by it. Students round."""

MOST_UNREAD = 20
"""Answers that cannot be read, after which no unknown question is named any more."""

Answer = int | float | list[str]
Answers = dict[str, Answer]


def real_answers(root: Path, lab: Lab, seed: int) -> Answers:
    """Compute the answer to each question of a class."""
    found: Answers = data_module(root, lab).answers(seed, sizes(lab, seed))
    return found


def check_answers(root: Path, lab: Lab, tasks: Sequence[LabTask], say: Callable[[str], None]) -> bool:
    """Compare a student's answers to these tasks, or to all questions, with the real ones, and report.

    Return whether all are right. Raises LabError for a file that cannot be read, and in a lab without tasks
    until every question is predicted.
    """
    recorded = read_recorded(root, lab)
    predicted, _ = read_answers(root, lab, PREDICTION)
    if not tasks and (left := [each.name for each in lab.questions if each.name not in predicted]):
        raise LabError(f"{lab.folder}/{PREDICTION}: predict {', '.join(left)} first; then measure")
    answers, unread = read_answers(root, lab, lab.answers_file)
    asked = [each for each in lab.questions if not tasks or each.task in {task.id for task in tasks}]
    verdicts = judged(root, lab, asked, recorded, answers, unread)
    if not tasks and not (root / lab.folder / TRACE).exists():
        why = f"what you predicted; it counts once you have measured, and {TRACE} is there"
        verdicts |= {name: why for name, answer in answers.items() if answer == predicted[name]}
    for each in asked:
        name, verdict = each.name, verdicts[each.name] or "right"
        if verdict == "right" and name in predicted:
            verdict += f"; {compared(recorded.answers[name], predicted[name])}"
        say(f"{name:<16} {_in_words(each, answers.get(name))}: {verdict}")
    names = {each.name for each in lab.questions}
    for why in (why for name, why in unread.items() if name not in names):
        say(why)
    scores = {task.id: score(task, outcome_of(asked, verdicts), []) for task in tasks}
    for task in tasks:
        say(f"{task.id}  {task.title}: {scores[task.id].public}/{task.points.public} public")
    if len(asked) == len(lab.questions):
        notes = read_notes(root)
        notes.answers[str(lab.number)] = list(verdicts.values()).count("")
        notes.public[str(lab.number)] = sum_of(scores, "public")
        write_notes(root, notes)
    about = "" if len(asked) == len(lab.questions) else "the whole lab, when last checked: "
    say(about + answers_in_words(root, lab))
    return not any(verdicts.values())


def judged(
    root: Path,
    lab: Lab,
    asked: Sequence[Question],
    recorded: Recorded,
    answers: Answers,
    unread: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return {question: what is wrong with its answer; empty when it is right} for those that are asked.

    unread   {name: why its answer was not read}
    """
    verdicts = {}
    for each in asked:
        if each.name in answers and not each.played:
            right = _is_right(each, answers[each.name], recorded.answers[each.name])
            verdicts[each.name] = "" if right else _not_right(each, answers[each.name], recorded)
        else:
            verdicts[each.name] = unread.get(each.name, f"no answer yet. {each.text}")
    wanted = [each.name for each in asked if each.played]
    played = {name: answers[name] for name in wanted if name in answers}
    if played and len(played) == len(wanted):
        verdicts |= load(str(root / lab.tests / "trial.py")).verdicts(recorded.files, played)
    else:
        verdicts |= dict.fromkeys(played, f"simulated once {', '.join(wanted)} are all there")
    return verdicts


def outcome_of(asked: Sequence[Question], verdicts: Mapping[str, str]) -> Outcome:
    """Return the outcome that scores are made of: one case for each question."""
    said = [(each, verdicts[each.name]) for each in asked]
    return Outcome([Case(each.task, each.name, "public", not verdict, verdict) for each, verdict in said])


def _is_right(question: Question, answer: Answer, real: Answer) -> bool:
    if isinstance(answer, list) or isinstance(real, list):
        return answer == real
    return abs(answer - real) <= question.within * abs(real)


def _not_right(question: Question, answer: Answer, recorded: Recorded) -> str:
    look = question.look
    if not isinstance(answer, list):
        slips = recorded.slips.get(question.name, [])
        far, why = min(((abs(answer / number - 1), why) for number, why in slips), default=(1.0, ""))
        look = why if far <= SLIP else look
    return f"not right. {question.text} Look at this: {look}"


def answers_in_words(root: Path, lab: Lab) -> str:
    """Return how many answers of the last check were right, and how many points that is."""
    notes = read_notes(root)
    right = notes.answers.get(str(lab.number))
    seen = "not checked yet" if right is None else f"answers {right}/{len(lab.questions)}"
    if not lab.tasks or right is None:
        return f"{seen} . {'report not graded' if lab.tasks else 'not graded'}"
    points = notes.public.get(str(lab.number), 0)
    return f"{seen} . public {points}/{possible(lab, 'public')} . report not graded"


def picture(root: Path, lab: Lab) -> MessagesTrace:
    """Return the timeline of a class's requests.

    Raises LabError until every question has an answer, and in a lab that has no picture.
    """
    recorded = read_recorded(root, lab)
    if recorded.timeline is None:
        raise LabError(f"lab {lab.number} has no picture; mooncake-lite labs check {lab.number} compares all")
    answers, _ = read_answers(root, lab, lab.answers_file)
    if left := [question.name for question in lab.questions if question.name not in answers]:
        raise LabError(
            f"the picture shows the answers; answer {', '.join(left)} in "
            f"{lab.folder}/{lab.answers_file} first"
        )
    return recorded.timeline


def read_answers(root: Path, lab: Lab, name: str) -> tuple[Answers, dict[str, str]]:
    """Read a student's file as `parse_answers` does; nothing when it is not there.

    Raises LabError also for an answer that cannot be read, in a lab without tasks.
    """
    path = root / lab.folder / name
    if not path.exists():
        return {}, {}
    try:
        found, unread = parse_answers(path.read_bytes(), f"{lab.folder}/{name}", lab)
    except OSError as error:
        raise LabError(f"{path}: {error.strerror}") from None
    if unread and not lab.tasks:
        raise LabError(next(iter(unread.values())))
    return found, unread


def parse_answers(data: bytes, place: str, lab: Lab) -> tuple[Answers, dict[str, str]]:
    """Return {question: answer}, and {name: why it was not read}: an unknown question, or no such number.

    Raises LabError, which names the place, for what is no TOML.
    """
    try:
        found = read_toml(data, dict[str, Any])
    except UNREADABLE as error:
        example = f"{lab.questions[0].name} = 12"
        raise LabError(f"{place}: {str(error)[:200]}; write one line per question: {example}") from None
    asked, answers, unread = {each.name: each for each in lab.questions}, Answers(), dict[str, str]()
    for name, answer in found.items():
        if name not in asked and len(unread) >= MOST_UNREAD:
            continue
        if name not in asked:
            meant = get_close_matches(name, asked, 1)
            there = f"did you mean {meant[0]}?" if meant else f"there are {', '.join(asked)}"
            unread[name] = f"{place}: {name[:40]} is no question; {there}"
            continue
        try:
            answers[name] = _converted(asked[name], answer, place)
        except LabError as error:
            unread[name] = str(error)
    return answers, unread


def _converted(question: Question, answer: Any, place: str) -> Answer:
    """Return an answer of the type of its question. Raises LabError."""
    name, wanted = question.name, "12" if question.unit else '["One", "Two"]'
    try:
        if not question.unit:
            return msgspec.convert(answer, type=list[str])
        exact = not (question.within or question.played)
        number: int | float = msgspec.convert(answer, type=int if exact else float)
    except (msgspec.ValidationError, OverflowError):
        words = f"{place}: {name} = {str(answer)[:80]!r}; write it as {name} = {wanted}"
        raise LabError(f"{words}, in {question.unit}" if question.within else words) from None
    must_be_possible(place, name, number)
    return number


def as_toml(answers: Answers) -> str:
    """Return answers as a file that `read_answers` reads."""
    return "".join(f"{name} = {msgspec.json.encode(answer).decode()}\n" for name, answer in answers.items())


def compared(real: Answer, predicted: Answer) -> str:
    """Return how a prediction compares with the answer."""
    if real == predicted:
        return "you predicted it"
    if isinstance(real, list) or isinstance(predicted, list):
        return "you predicted something else"
    return f"you predicted {predicted:,.12g}, {'within' if near(predicted, real) else 'not within'} {WITHIN}x"


def _in_words(question: Question, answer: Answer | None) -> str:
    if answer is None:
        return "-"
    if isinstance(answer, list):
        return ", ".join(answer)[:80]
    return f"rank {answer}" if question.unit == "rank" else f"{answer:,.12g} {question.unit}"
