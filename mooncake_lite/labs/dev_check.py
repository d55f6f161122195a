"""`labs dev check`: what an author of labs promises, tested on every lab of the tree.

It changes one thing at a time in a copy of the tree, and looks whether the tests notice. Each rule yields
problems; a lab is good when there are none.
Explained in docs/explain/labs.md, "What labs dev check enforces".
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mooncake_lite.errors import LabError
from mooncake_lite.labs import regions, sandbox
from mooncake_lite.labs.bench import PUBLIC, SEEDS, Bench, bench_of, benches_like, dealt
from mooncake_lite.labs.checking import PREDICTION, check
from mooncake_lite.labs.gates import look_at
from mooncake_lite.labs.grading import Grade, Grader
from mooncake_lite.labs.hostile import HOSTILE, hostile_text
from mooncake_lite.labs.judging import Outcome
from mooncake_lite.labs.lab import Lab, LabTask
from mooncake_lite.labs.lowering import lower
from mooncake_lite.labs.mutants import mutants
from mooncake_lite.labs.questions import TRACE, Answer, as_toml, check_answers, real_answers
from mooncake_lite.labs.release import release
from mooncake_lite.labs.running import run_tests
from mooncake_lite.labs.scores import score
from mooncake_lite.labs.starting import write_data
from mooncake_lite.labs.submission import Submission
from mooncake_lite.labs.survivors import equal_of, unnoticed
from mooncake_lite.labs.tidy import untidy
from mooncake_lite.labs.trees import child_files, copied
from mooncake_lite.labs.variant import class_of, sheet

CHECK_S = 60.0
"""`labs check` of a lab ends within this time."""

SAMPLED = 20
"""Mutants of a task that a check tries; `labs dev mutants` tries all."""

Problems = Iterator[str]


def dev_check(root: Path, lab: Lab, *, quick: bool, say: Callable[[str], None]) -> bool:
    """Test all rules on one lab, or those that take seconds. Return whether there are no problems."""
    rules = [*QUICK_RULES, *(() if quick else SLOW_RULES)] if lab.files else list(QUESTION_RULES)
    good = True
    with bench_of(root, lab) as bench:
        for rule in rules:
            began = time.monotonic()
            problems = list(rule(bench))
            sentence = (rule.__doc__ or "").split("\n")[0].rstrip(".")
            say(f"{'FAILED' if problems else 'ok':<6} {sentence} ({time.monotonic() - began:.0f} s)")
            for problem in problems:
                say(f"       {problem}")
            good = good and not problems
    return good


# ------------------------------------------------------------------------------------------- rules


def marks_agree(bench: Bench) -> Problems:
    """The marks in the modules are those of lab.toml, around whole bodies of at most 40 lines."""
    for file, tasks in bench.lab.files.items():
        source = (bench.root / file).read_text(encoding="utf-8")
        marked = regions.marked(source)
        own = {task for task in marked if task.startswith(str(bench.lab.number))}
        if own != set(tasks.values()):
            yield f"{file} has marks for {sorted(own)}, and lab.toml names {sorted(tasks.values())}"
            continue
        for function, task in tasks.items():
            body, span = regions.find(source, function), marked[task]
            if (body.begin + 1, body.end - 1) != (span.begin, span.end):
                yield f"{file}: the marks of {task} do not enclose the whole body of {function}"
            if span.end - span.begin > regions.MOST_LINES:
                yield f"{file}: {task} has more than {regions.MOST_LINES} lines"


def sheet_is_complete(bench: Bench) -> Problems:
    """The sheet names every task, its names and cost, or question; its numbers are there for every class."""
    for seed in range(20):
        text = sheet(bench.lab, bench.root, seed)
        missing = [task.id for task in bench.lab.tasks if task.id not in text or task.cost.name not in text]
        if missing:
            yield f"lab.md does not name {', '.join(missing)} or their costs"
            return
        names = {name for task in bench.lab.tasks for name in (*task.names, *task.private)}
        if left := sorted(name for name in names if f"`{name}`" not in text):
            yield f"lab.md does not name {', '.join(left)}, which regions may use"
            return
        if left := [question.name for question in bench.lab.questions if question.name not in text]:
            yield f"lab.md does not name the questions {', '.join(left)}"
            return


def answers_are_computed(bench: Bench) -> Problems:
    """Each question has an answer for every class, and classes have different answers."""
    names = [question.name for question in bench.lab.questions]
    found = [real_answers(bench.root, bench.lab, seed) for seed in range(20)]
    for seed, answers in enumerate(found):
        if list(answers) != names:
            yield f"seed {seed}: data.py answers {', '.join(answers)}, and lab.toml asks {', '.join(names)}"
            return
    if all(answers == found[0] for answers in found):
        yield "all classes have the same answers"


def only_right_answers_are_accepted(bench: Bench) -> Problems:
    """The check accepts the real answers, and with one wrong answer it is red and names the question."""
    folder = bench.tree / bench.lab.folder
    seed = class_of(bench.tree).seed
    write_data(bench.root, bench.tree, bench.lab, seed)
    real = real_answers(bench.root, bench.lab, seed)

    def checked(answers: dict[str, Answer], tasks: Sequence[LabTask]) -> tuple[bool, list[str]]:
        said: list[str] = []
        (folder / bench.lab.answers_file).write_text(as_toml(answers), encoding="utf-8")
        return check_answers(bench.tree, bench.lab, tasks, said.append), said

    try:
        (folder / TRACE).touch()
        (folder / PREDICTION).write_text(as_toml(real), encoding="utf-8")
        good, said = checked(real, bench.lab.tasks)
        if not good:
            yield f"the real answers are not accepted: {said}"
        for question, answer in zip(bench.lab.questions, real.values(), strict=True):
            name, tasks = question.name, [task for task in bench.lab.tasks if task.id == question.task]
            wrong = [*answer, "One"] if isinstance(answer, list) else 99 * answer + 1
            good, said = checked(real | {name: wrong}, tasks)
            named = {line.split()[0] for line in said if "not right" in line}
            if good or name not in named or (named != {name} and not question.played):
                yield f"{name} = {wrong} is not named as the wrong answer: {said}"
    finally:
        for name in (bench.lab.answers_file, PREDICTION, TRACE):
            (folder / name).unlink(missing_ok=True)


def reference_gets_all_points(bench: Bench) -> Problems:
    """The reference of each task gets all automatic points, with stubs for all other tasks."""
    lab, outcome = bench.lab, Outcome()

    def alone(own: Bench, tasks: Sequence[LabTask]) -> list[Outcome]:
        found = []
        for task in tasks:
            with own.stubs([other for other in lab.tasks if other != task]):
                found.append(run_tests(own.root, lab, [task.id], own.tree, SEEDS, level="none"))
        return found

    with benches_like(bench) as benches:
        for seen in dealt(benches, lab.tasks, alone):
            outcome.add(seen)
    lowered = lower(bench.tree, lab, lab.tasks, level="none")
    for task in lab.tasks:
        source = bench.source(task)
        if state := look_at(lab, task, source) or lowered.problems.get(task.id):
            yield f"{task.id}: {state}"
        found = score(task, outcome, untidy(source, task.function))
        if found.points != task.points.total:
            reasons = [*found.failed.values(), *found.untidy, found.costs]
            yield f"{task.id} gets {found.points} of {task.points.total}: {reasons}"


def stubs_fail_and_key_tests_are_there(bench: Bench) -> Problems:
    """Each stub fails every test of its own task, and at most half of these are key tests, at least one."""
    lab = bench.lab
    with bench.stubs(lab.tasks):
        outcome = run_tests(bench.root, lab, lab.ids, bench.tree, PUBLIC, level="none")
    yield from (
        f"with stubs for all tasks, {case.task} {case.name} passes" for case in outcome.cases if case.passed
    )
    for task in lab.tasks:
        names = {case.name for case in outcome.cases if case.task == task.id}
        if not task.key or 2 * len(task.key) > len(names) + 1:
            yield f"{task.id} has {len(task.key)} key tests of {len(names)} tests"
        if unknown := sorted(set(task.key) - names):
            yield f"{task.id} has no tests {', '.join(unknown)}, which lab.toml calls key tests"


def errors_are_red_and_named(bench: Bench) -> Problems:
    """A 1/0 in a student's file turns the check red and names that file."""
    for file in bench.lab.files:
        task = next(task for task in bench.lab.tasks if task.file == file)
        said: list[str] = []
        (bench.tree / file).write_text(bench.source(task) + "1/0\n", encoding="utf-8")
        try:
            good = check(bench.tree, bench.lab, [task], said.append)
        finally:
            (bench.tree / file).write_text(bench.source(task), encoding="utf-8")
        if good or not any("ZeroDivisionError" in line and file in line for line in said):
            yield f"1/0 in {file} is not named: {said}"


def nothing_collected_is_red(bench: Bench) -> Problems:
    """A check that collects no test is red."""
    tests = bench.tree / bench.lab.tests
    away = tests.with_name("away")
    tests.rename(away)
    try:
        check(bench.tree, bench.lab, bench.lab.tasks, lambda line: None)
        yield "a check without tests ended as if it had tested something"
    except LabError:
        return
    finally:
        away.rename(tests)


def check_is_quick(bench: Bench) -> Problems:
    """A check of the whole lab ends within its time."""
    began = time.monotonic()
    check(bench.tree, bench.lab, bench.lab.tasks, lambda line: None)
    if (took := time.monotonic() - began) > CHECK_S:
        yield f"labs check {bench.lab.number} took {took:.0f} s, and {CHECK_S:.0f} s are allowed"


def nothing_survives_in_a_release(bench: Bench) -> Problems:
    """No line of a solution survives in a release."""
    with tempfile.TemporaryDirectory(prefix="mlab") as folder:
        try:
            release(bench.root, bench.lab, "dev check", "dev check", Path(folder) / "release")
        except LabError as error:
            yield str(error)


def mutants_are_noticed(bench: Bench) -> Problems:
    """Some mutants of each region fail a test, and every test fails for some mutant."""
    known = equal_of(bench)
    with benches_like(bench) as benches:
        for task in bench.lab.tasks:
            yield from unkilled(benches, task, known.get(task.id, {}))


def unkilled(benches: Sequence[Bench], task: LabTask, known: Mapping[str, str]) -> Problems:
    """Yield sampled mutants of a task that nothing notices, and tests that fail for no mutant.

    Stops to mutate when the sample is tried and every test has failed.
    """

    def tried(texts: list[str], only: Sequence[str] = ()) -> list[Outcome]:
        return dealt(benches, texts, lambda bench, own: bench.with_regions(task, own, only=only))

    region = benches[0].region(task)
    found = mutants(region)
    random.Random(task.id).shuffle(found)
    sample = found[:SAMPLED]
    reference, *outcomes = tried([region, *(mutant.text for mutant in sample)])
    if not unnoticed(reference):
        yield f"{task.id}: the reference fails in a part of a student's processor time"
    for mutant, outcome in zip(sample, outcomes):
        is_new = mutant.what not in known and unnoticed(outcome)
        if is_new and benches[0].lowers(task, mutant.text):
            yield f"{task.id}: all tests pass with {mutant.what}"
    waiting = {case.name for case in reference.cases} - _failed(outcomes)
    for begin in range(SAMPLED, len(found), SAMPLED):
        if waiting:
            texts = [mutant.text for mutant in found[begin : begin + SAMPLED]]
            waiting -= _failed(tried(texts, sorted(waiting)))
    for name in sorted(waiting):
        yield f"{task.id} {name} fails for no mutant"


def _failed(outcomes: Sequence[Outcome]) -> set[str]:
    """Return the tests that failed. A mutant that loops forever says nothing about single tests."""
    found = ([case for case in outcome.cases if not case.passed] for outcome in outcomes)
    judged = (cases for cases in found if not all("stopped" in case.message for case in cases))
    return {case.name for cases in judged for case in cases}


def grading_survives_hostile_code(bench: Bench) -> Problems:
    """Grading survives hostile code: its tasks get no points, and all others keep theirs."""
    lab = bench.lab
    texts = {task.id: bench.region(task) for task in lab.tasks}
    level, _ = sandbox.required()
    full = sum(task.points.total for task in lab.tasks)
    with tempfile.TemporaryDirectory(prefix="mlab") as folder:
        clean = Path(folder) / "clean"
        copied(bench.root, clean, child_files(bench.root, lab), lab.files)
        grader = Grader(root=bench.root, lab=lab, clean=clean, seeds=SEEDS, level=level, check_names=False)

        def graded(hostile: dict[str, LabTask]) -> Grade:
            wrong = {task.id: hostile_text(name) for name, task in hostile.items()}
            return grader.judged(" and ".join(hostile), Submission(regions=texts | wrong))

        names = list(HOSTILE)  # two submissions for all: each task has a child of its own
        halves = [dict(zip(names[::2], lab.tasks)), dict(zip(names[1::2], reversed(lab.tasks)))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for hostile, grade in zip(halves, pool.map(graded, halves)):
                expected = full - sum(task.points.total for task in hostile.values())
                if grade.automatic != expected:
                    where = ", ".join(f"{name} in {task.id}" for name, task in hostile.items())
                    yield f"{where}: {grade.automatic} points, expected {expected}; {grade.messages}"


QUICK_RULES = (
    marks_agree,
    sheet_is_complete,
    reference_gets_all_points,
    stubs_fail_and_key_tests_are_there,
    errors_are_red_and_named,
    nothing_collected_is_red,
    nothing_survives_in_a_release,
)
QUESTION_RULES = (
    sheet_is_complete,
    answers_are_computed,
    only_right_answers_are_accepted,
    nothing_survives_in_a_release,
)
"""Of a lab without regions."""
SLOW_RULES = (check_is_quick, mutants_are_noticed, grading_survives_hostile_code)
