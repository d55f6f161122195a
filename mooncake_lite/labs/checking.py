"""Checking: what `mooncake-lite labs check` does with a student's own tree.

It looks at the regions, runs the public tests of those that are written, and says what it saw. It never says
that all is well: private seeds and the report are not its business. Explained in docs/explain/labs.md.
"""

from __future__ import annotations

import os
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from mooncake_lite.errors import LabError
from mooncake_lite.labs import regions
from mooncake_lite.labs.child import file_digest
from mooncake_lite.labs.gates import look_at, outside_of
from mooncake_lite.labs.judging import Counted, Outcome
from mooncake_lite.labs.lab import Lab, LabTask
from mooncake_lite.labs.lowering import Lowered, device, lower
from mooncake_lite.labs.notes import read_notes, write_notes
from mooncake_lite.labs.regions import stripped
from mooncake_lite.labs.running import run_tests
from mooncake_lite.labs.scores import TaskScore, not_run, possible, score, sum_of
from mooncake_lite.labs.tidy import untidy
from mooncake_lite.labs.trees import child_files, copied
from mooncake_lite.labs.variant import class_of

PREDICTION = "prediction.toml"
WITHIN = 3
MOST_PREDICTED = 10**12
"""The largest prediction that is read. The counts of all labs are far below it."""

MOST_LINE = 500
"""Characters of a line of TOML: to read a key of thousands of parts takes as many seconds as a whole lab."""
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What `read_toml` raises."""

Say = Callable[[str], None]
T = TypeVar("T")


def check(root: Path, lab: Lab, tasks: Sequence[LabTask], say: Say, *, gpu: bool = False) -> bool:
    """Check these tasks and report. Return whether they are written, and pass every public test and gate.

    gpu: run kernels on a GPU too. Raises LabError when nothing can be tested.
    """
    predictions = read_prediction(root, lab)
    given = {file: _source(root, file) for file in lab.files}
    stubs = {file: found for file, text in given.items() if (found := _unreadable(text, lab.files[file]))}
    texts = {file: stripped(text, stubs[file]) if file in stubs else text for file, text in given.items()}
    without = {task for found in stubs.values() for task in found.values()}
    states = {
        task.id: look_at(lab, task, (given if task.id in without else texts)[task.file]) for task in tasks
    }
    ready = [task for task in tasks if not states[task.id]]
    outcome, lowered = Outcome(), Lowered({})
    seeds = {"public": class_of(root).seed}
    with _readable(root, lab, stubs) as tree:
        if ready:
            outcome, lowered = _tried(root, lab, ready, tree, seeds)
        scores = {task.id: not_run(task, states[task.id]) for task in tasks if states[task.id]}
        scores |= {task.id: score(task, outcome, untidy(texts[task.file], task.function)) for task in ready}
        scores |= {task: scores[task].nothing(state) for task, state in lowered.problems.items()}
        for task in tasks:
            _report(task, scores[task.id], predictions, say)
        texts = {task.file: texts[task.file] for task in tasks}
        for line in (*_tested(tree, texts, stubs, outcome), *_edited_outside(root, lab, texts)):
            say(line)
        if lowered.skipped:
            say(f"not lowered to PTX: {lowered.skipped}")
        kernels = [task for task in ready if task.kernels]
        good_on_gpu = not gpu or _on_gpu(root, lab, kernels, tree, seeds, say)
    _remember(root, lab, tasks, scores, outcome, predictions)
    public = f"public {sum_of(scores, 'public')}/{sum(task.points.public for task in tasks)}"
    say(f"{public} . private seeds not run . report not graded")
    passed = all(each.state == "graded" and not each.failed for each in scores.values())
    return bool(ready) and passed and good_on_gpu


def _tried(
    root: Path, lab: Lab, tasks: Sequence[LabTask], tree: Path, seeds: Mapping[str, int]
) -> tuple[Outcome, Lowered]:
    """Run the tests of these tasks in a run for each processor, and lower their kernels beside them."""
    runs = min(len(tasks), os.cpu_count() or 1)

    def run(number: int) -> Outcome:
        return run_tests(root, lab, [task.id for task in tasks[number::runs]], tree, seeds, level="none")

    outcome = Outcome()
    with ThreadPoolExecutor(runs + 1) as pool:
        lowered = pool.submit(lower, tree, lab, tasks, level="none")
        for seen in pool.map(run, range(runs)):
            outcome.add(seen)
        return outcome, lowered.result()


def _unreadable(source: str, functions: Mapping[str, str]) -> dict[str, str]:
    """Return {function: task} of the regions because of which Python cannot read a file."""
    if _compiles(source):
        return {}
    found = {}
    for function, task in functions.items():
        with suppress(LabError):  # its first line is gone
            text = textwrap.indent(textwrap.dedent(regions.body(source, function)), "    ")
            if not _compiles(f"def region():\n{text}"):
                found[function] = task
    return found


def _compiles(text: str) -> bool:
    try:
        regions.read(text, flags=0)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


@contextmanager
def _readable(root: Path, lab: Lab, stubs: Mapping[str, Mapping[str, str]]) -> Iterator[Path]:
    """Yield the tree to test: this one, or a copy with stubs for what Python cannot read.

    So such a region costs its own task alone, as in grading.
    """
    if not stubs:
        yield root
        return
    with tempfile.TemporaryDirectory(prefix="mlab") as folder:
        copied(root, Path(folder), child_files(root, lab), stubs)
        yield Path(folder)


def _on_gpu(root: Path, lab: Lab, tasks: list[LabTask], tree: Path, seeds: dict[str, int], say: Say) -> bool:
    """Run the tests of kernels on a GPU; without one say why. Return whether none has failed."""
    found = device(root, lab)
    if not tasks or not found.name:
        say(f"no GPU run: {found.error or 'none of these tasks is a kernel that is written'}")
        return True
    outcome = run_tests(root, lab, [task.id for task in tasks], tree, seeds, level="none", gpu=True)
    failed = [case for case in outcome.cases if not case.passed]
    say(f"on {found.name}: {len(outcome.cases) - len(failed)} of {len(outcome.cases)} tests of kernels")
    for case in failed:
        say(f"  test       {case.name.replace('_', ' ')}")
        say(textwrap.indent(case.message, "  "))
    return not failed


def read_prediction(root: Path, lab: Lab) -> dict[str, float]:
    """Return {name of a cost: predicted number}. Raises LabError for a file that says something else."""
    path = root / lab.folder / PREDICTION
    if not path.exists():
        return {}
    return prediction_of(path.read_bytes(), str(path), lab)


def prediction_of(data: bytes, place: str, lab: Lab) -> dict[str, float]:
    """Return the predictions of a file. Raises LabError, which names its place."""
    names = [task.cost.name for task in lab.tasks]
    try:
        found = read_toml(data, dict[str, float])
    except UNREADABLE as error:
        raise LabError(f"{place}: {str(error)[:200]}; write one line per cost: {names[0]} = 12") from None
    if unknown := found.keys() - set(names):
        raise LabError(f"{place}: {', '.join(sorted(unknown))[:80]} is no cost; there are {', '.join(names)}")
    for name, number in found.items():
        must_be_possible(place, name, number)
    return found


def read_toml(data: bytes, kind: type[T]) -> T:
    """Return what a student's TOML file says. Raises one of UNREADABLE."""
    text = data.decode("utf-8-sig")
    if any(len(line) > MOST_LINE for line in text.split("\n")):
        raise ValueError(f"a line has more than {MOST_LINE} characters")
    return msgspec.toml.decode(text, type=kind)


def must_be_possible(place: str, name: str, number: float) -> None:
    """Raise LabError for a prediction or an answer that no count can be."""
    if not 0 <= number <= MOST_PREDICTED:
        raise LabError(f"{place}: {name} = {number}; write a number from 0 to {MOST_PREDICTED:,}")


def compared(task: LabTask, cost: Counted, predicted: float) -> str:
    """Return how a prediction compares with what was counted and with our own count.

    It may be near either. A count above the limit does not matter: no right prediction is as high.
    """
    near_own = cost.value <= cost.limit and near(predicted, cost.value)
    fewer = " (fewer are as good)" if cost.value < cost.needed else ""
    ours = f"; our solution has {cost.needed:,}{fewer}" if cost.value != cost.needed else ""
    allowed = f", and {cost.limit:,} are allowed" if ours and cost.limit != cost.needed else ""
    of = "that count" if near_own or not ours else "ours" if near(predicted, cost.needed) else "either"
    good = near_own or near(predicted, cost.needed)
    return (
        f"{task.cost.name}: {cost.value:,} {task.cost.unit} were counted{ours}{allowed}. You predicted "
        f"{predicted:,g}, {'within' if good else 'not within'} {WITHIN}x of {of}"
    )


def near(predicted: float, count: float) -> bool:
    """Tell whether a prediction is within a factor of WITHIN of a count."""
    return count / WITHIN <= predicted <= count * WITHIN


def over(task: LabTask, cost: Counted) -> str:
    """Return what to say of a cost that is above its limit; empty when it is not."""
    if cost.value <= cost.limit:
        return ""
    few = f"allowed, and {cost.needed:,} are needed" if cost.needed < cost.limit else "needed"
    return f"{task.cost.name}: at most {cost.limit:,} {task.cost.unit} are {few}. {task.cost.about}"


def _report(task: LabTask, seen: TaskScore, predictions: dict[str, float], say: Say) -> None:
    tests = f", {seen.passed} of {seen.tests} tests" if seen.tests else ""
    if seen.tests and seen.state != "graded":
        tests += ", which count nothing before the gate is passed"
    say(f"{task.id}  {task.title}: {seen.public}/{task.points.public} public{tests}")
    if seen.state != "graded":
        say(f"  gate       {seen.state}")
    first: dict[str, str] = {}
    same = len(seen.failed) == seen.tests > 1 and len(set(map(_why, seen.failed.values()))) == 1
    for name, message in list(seen.failed.items())[: 1 if same else None]:
        plain = name.partition(" [")[0]
        sentence, why = plain.replace("_", " "), _why(message)
        head = "key test  " if plain in task.key else "test      "
        if why and why in first:
            say(f"  {head} {sentence}: fails like `{first[why]}`")
            continue
        first[why] = sentence
        say(f"  {head} {sentence}")
        say(textwrap.indent(message, "  "))
    if same:
        say(f"  all {seen.tests} tests of the task fail like this one")
    if seen.failed:
        say("  cost       counts when all tests of the task pass")
    for cost in seen.costs if not seen.failed else ():
        if task.cost.name not in predictions:
            say(f"  cost       predict {task.cost.name} in {PREDICTION} first; then the count is shown")
            continue
        say(f"  cost       {compared(task, cost, predictions[task.cost.name])}")
        if excess := over(task, cost):
            say(f"  cost       {excess}")
    for line in seen.untidy:
        say(f"  tidiness   {line}")


def _why(message: str) -> str:
    """Return the lines of a message that say why a test fails, whatever its numbers are."""
    lines = [line for line in message.splitlines() if line.startswith(("breaks ", "raised ", "stopped "))]
    return re.sub(r"\d+", "0", "\n".join(lines))


def _tested(
    tree: Path, sources: dict[str, str], stubs: Mapping[str, Mapping[str, str]], outcome: Outcome
) -> list[str]:
    """Name each file that was tested and its digest. Raises LabError if another file was tested."""
    said = []
    for file in sources if outcome.cases else ():
        digest = file_digest(tree / file)
        tested = outcome.files.get(file)
        if tested is None:
            said.append(f"not tested {file}: it was not imported")
        elif tested != digest:
            raise LabError(f"{file} was changed while it was tested; run the check again")
        elif file in stubs:
            said.append(f"tested     a copy of {file}, without {' '.join(stubs[file].values())}")
        else:
            said.append(f"tested     {file} {digest}")
    return said


def _edited_outside(root: Path, lab: Lab, sources: dict[str, str]) -> list[str]:
    """In a release: say which files are changed outside their regions. Those changes are not handed in."""
    given = class_of(root).outside
    now = outside_of(lab, sources)
    return [
        f"warning    {file} differs outside of its regions; only the regions are handed in and graded"
        for file in sources
        if file in given and given[file] != now[file]
    ]


def _remember(
    root: Path,
    lab: Lab,
    tasks: Sequence[LabTask],
    scores: dict[str, TaskScore],
    outcome: Outcome,
    predictions: Mapping[str, float],
) -> None:
    notes = read_notes(root)
    if len(tasks) == len(lab.tasks):
        notes.public[str(lab.number)] = sum_of(scores, "public")
    for task in tasks:
        notes.traces.pop(task.id, None)
        notes.open[task.id] = unfinished(task, scores[task.id], predictions)
    notes.traces |= outcome.traces
    write_notes(root, notes)


def unfinished(task: LabTask, seen: TaskScore, predictions: Mapping[str, float]) -> list[str]:
    """Return which parts of a task do not have all their points yet, for `labs score`."""
    if seen.state != "graded":
        return ["all of it"]
    if seen.failed:
        return [f"{len(seen.failed)} of {seen.tests} tests", "cost and tidiness, which count after the tests"]
    found = [] if seen.cost else [f"cost: {task.cost.name} is above its limit"]
    if task.cost.name not in predictions:
        found.append(f"prediction of {task.cost.name}")
    return found + ([f"tidiness: {len(seen.untidy)} findings"] if seen.untidy else [])


def open_parts(root: Path, lab: Lab) -> list[str]:
    """Return a line for each task whose last check left something open."""
    left = read_notes(root).open
    return [f"{task}  open: {'; '.join(left[task])}" for task in lab.ids if left.get(task)]


def score_in_words(root: Path, lab: Lab) -> str:
    """Return the points of the last check of a whole lab."""
    points = read_notes(root).public.get(str(lab.number))
    if points is None:
        return "not checked yet"
    return f"public {points}/{possible(lab, 'public')} . private seeds not run . report not graded"


def _source(root: Path, file: str) -> str:
    try:
        return (root / file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{file}: {error}; restore the file") from None
