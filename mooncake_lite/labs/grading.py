"""Grading: each submission is filled into a clean tree, and judged there from outside.

Used by `labs grade`. It works offline; its only output is the table and the pages that it is asked for. A bad
submission costs itself points and never the batch. Explained in docs/explain/labs.md, "Grading".
"""

from __future__ import annotations

import csv
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from mooncake_lite import __version__
from mooncake_lite.errors import LabError
from mooncake_lite.labs import questions, regions, sandbox
from mooncake_lite.labs.checking import compared, prediction_of
from mooncake_lite.labs.gates import look_at, transplanted
from mooncake_lite.labs.judging import Outcome
from mooncake_lite.labs.lab import Lab, LabTask
from mooncake_lite.labs.lowering import Lowered, lower
from mooncake_lite.labs.running import run_tests
from mooncake_lite.labs.scores import TaskScore, not_run, score, sum_of
from mooncake_lite.labs.starting import Recorded, record
from mooncake_lite.labs.submission import Submission, read_submission
from mooncake_lite.labs.tidy import untidy
from mooncake_lite.labs.trees import child_files, copied
from mooncake_lite.labs.variant import class_of, private_seed, public_seed

MARKS = "marks.csv"
MOST_MARKS = {"prediction": 10, "report": 15}
"""Points that a teacher gives."""

PARTS = ("public", "private", "cost", "tidiness")


@dataclass(slots=True)
class Grade:
    """The grade of one submission.

    name         of the archive, without .zip
    scores       {task: its points}
    marks        what the teacher gave, of MOST_MARKS; None for a part that is not marked yet
    predictions  how each prediction compares with what was counted
    messages     what is wrong with the submission as a whole
    """

    name: str
    submission: Submission
    scores: dict[str, TaskScore] = field(default_factory=dict)
    marks: dict[str, int | None] = field(default_factory=dict)
    predictions: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def part(self, part: str) -> int:
        """Return the points of a part."""
        return sum_of(self.scores, part)

    @property
    def automatic(self) -> int:
        """Return the points that no teacher has to give."""
        return sum(each.points for each in self.scores.values())

    @property
    def total(self) -> int:
        """Return all points so far."""
        return self.automatic + sum(points or 0 for points in self.marks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Grader:
    """What all submissions of a batch share.

    root         the full repository, with the tests
    clean        a release tree: packages and driver, with stubs
    level        how children are confined
    recorded     what the answers to questions are compared with, in a lab of numbers
    check_names  whether a region that uses other names than lab.toml lists is refused
    """

    root: Path
    lab: Lab
    clean: Path
    seeds: Mapping[str, int]
    level: sandbox.Level
    recorded: Recorded | None = None
    check_names: bool = True

    def judged(self, name: str, submission: Submission) -> Grade:
        """Grade what was read from an archive. Never raises for what is in it."""
        grade = Grade(name, submission, messages=list(submission.messages))
        try:
            self._judge(submission, grade)
        except Exception as error:  # whatever it is, the batch goes on
            what = f"{type(error).__name__}: {error}"
            grade.messages.append(f"the grader failed, and the teacher must look: {what}")
            grade.scores = {task.id: not_run(task, "not graded") for task in self.lab.tasks}
        return grade

    def _judge(self, submission: Submission, grade: Grade) -> None:
        if self.recorded is not None:
            self._judge_numbers(self.recorded, submission, grade)
            return
        sources = {file: (self.clean / file).read_text(encoding="utf-8") for file in self.lab.files}
        states = {task.id: self._fill_in(task, submission, sources) for task in self.lab.tasks}
        ready = [task for task in self.lab.tasks if not states[task.id]]
        outcome, lowered = self._run(sources, ready) if ready else (Outcome(), Lowered({}))
        grade.messages += [f"{task}: {why}" for task, why in outcome.stopped.items()]
        if lowered.skipped:
            grade.messages.append(f"not lowered to PTX: {lowered.skipped}")
        for task in self.lab.tasks:
            if states[task.id]:
                grade.scores[task.id] = not_run(task, states[task.id])
                continue
            seen = score(task, outcome, untidy(sources[task.file], task.function))
            problem = lowered.problems.get(task.id, "")
            grade.scores[task.id] = seen.nothing(problem) if problem else seen
        self._compare(submission, grade)

    def _judge_numbers(self, recorded: Recorded, submission: Submission, grade: Grade) -> None:
        """Compare the numbers of a submission with those of the class, and its predictions too."""
        lab, numbers = self.lab, submission.numbers
        grade.scores = {task.id: not_run(task, "not handed in") for task in lab.tasks}
        try:
            answers, unread = questions.parse_answers(numbers.encode(), "numbers.toml", lab)
            if numbers.strip():
                verdicts = questions.judged(self.root, lab, lab.questions, recorded, answers, unread)
                outcome = questions.outcome_of(lab.questions, verdicts)
                grade.scores = {task.id: score(task, outcome, []) for task in lab.tasks}
                grade.messages += [words for name, words in unread.items() if name not in verdicts]
            predicted, wrong = questions.parse_answers(submission.prediction.encode(), "prediction.toml", lab)
        except LabError as error:
            grade.messages.append(str(error))
            return
        grade.messages += wrong.values()
        grade.predictions += [
            f"{name}: {questions.compared(recorded.answers[name], number)}"
            for name, number in predicted.items()
        ]

    def _fill_in(self, task: LabTask, submission: Submission, sources: dict[str, str]) -> str:
        """Put a region into its file. Return why it is not tested; empty when it is."""
        text = submission.regions.get(task.id, "")
        if regions.is_stub(text):
            return "not handed in" if not text.strip() else "not written yet: the region is a stub"
        try:
            filled = transplanted(self.lab, task, sources[task.file], text)
        except LabError as error:
            return str(error)
        if state := look_at(self.lab, task, filled, check_names=self.check_names):
            return state
        sources[task.file] = filled
        return ""

    def _run(self, sources: dict[str, str], ready: list[LabTask]) -> tuple[Outcome, Lowered]:
        """Test and lower these tasks in a clean tree of their own, with these files in it."""
        with tempfile.TemporaryDirectory(prefix="mlab") as folder:
            tree = Path(folder) / "tree"
            shutil.copytree(self.clean, tree)
            for file, source in sources.items():
                (tree / file).write_text(source, encoding="utf-8")
            ids = [task.id for task in ready]
            outcome = run_tests(self.root, self.lab, ids, tree, self.seeds, level=self.level)
            return outcome, lower(tree, self.lab, ready, level=self.level)

    def _compare(self, submission: Submission, grade: Grade) -> None:
        """Put each prediction beside what was counted, for the teacher."""
        if not submission.prediction:
            return
        try:
            predicted = prediction_of(submission.prediction.encode(), "prediction.toml", self.lab)
        except LabError as error:
            grade.messages.append(str(error))
            return
        for task in self.lab.tasks:
            for cost in grade.scores[task.id].costs:
                if cost.seed == "public" and task.cost.name in predicted:
                    grade.predictions.append(compared(task, cost, predicted[task.cost.name]))


def grade_folder(
    root: Path,
    lab: Lab,
    folder: Path,
    seed: str,
    *,
    jobs: int,
    trusted: bool,
    check_names: bool = True,
    told: Callable[[Grade], None] = lambda grade: None,
    warn: Callable[[str], None] = lambda line: None,
) -> list[Grade]:
    """Grade every archive of a folder, several at a time; the result is in the order of their names.

    Raises SandboxRefused before the first one where the machine refuses a sandbox, unless `trusted`, and
    LabError for a folder without archives, for a seed that is not that of their class, and for a tree with
    solutions where only the user changes.
    """
    archives = sorted(path for path in folder.glob("*") if _is_submission(path))
    if not archives:
        raise LabError(f"{folder} has no submissions: archives that end with .zip")
    marks = read_marks(folder / MARKS)
    names = [path.stem if path.suffix == ".zip" else path.name for path in archives]
    names = [name.encode(errors="surrogateescape").decode(errors="replace") for name in names]
    submissions = [read_submission(path, lab) for path in archives]
    must_be_of_one_class(root, seed, submissions)
    level: sandbox.Level = "none"
    if lab.files and not trusted:
        level, why = sandbox.required()
    if level == "uid" and (found := solved_trees(root, lab)):
        raise LabError(
            f"a submission could read the solutions in {', '.join(found)}: there are no namespaces ({why}); "
            "allow them, or grade with the archive of `labs release --autograder`"
        )
    if sandbox.CANNOT_PROMISE[level]:
        warn(f"without namespaces {sandbox.CANNOT_PROMISE[level]}")
    with tempfile.TemporaryDirectory(prefix="mlab") as clean:
        copied(root, Path(clean), child_files(root, lab), lab.files)
        seeds = {"public": public_seed(seed), "private": private_seed(seed)}
        recorded = record(root, lab, seeds["public"]) if lab.questions else None
        grader = Grader(
            root=root, lab=lab, clean=Path(clean), seeds=seeds, level=level, recorded=recorded,
            check_names=check_names,
        )  # fmt: skip
        with ThreadPoolExecutor(jobs) as pool:
            grades = []
            for grade in pool.map(grader.judged, names, submissions):
                grade.marks = {part: marks.get(grade.name, {}).get(part) for part in MOST_MARKS}
                told(grade)
                grades.append(grade)
    return grades


def solved_trees(root: Path, lab: Lab) -> list[str]:
    """Return which of `root` and the tree of this code hold a region of the lab that is no stub."""
    here = Path(__file__).resolve().parents[2]
    return [
        str(tree)
        for tree in sorted({root, here})
        if any(
            not regions.is_stub(regions.body((tree / task.file).read_text(encoding="utf-8"), task.function))
            for task in lab.tasks
        )
    ]


def must_be_of_one_class(root: Path, seed: str, submissions: Sequence[Submission]) -> None:
    """Look whether the seed is that of the release in `root`; in the full repository, of any of the archives.

    An archive that says something else gets a message at most, because a student can write anything there.
    Raises LabError for a seed that belongs to no class that is named.
    """
    public, here = public_seed(seed), class_of(root)
    packed = [(each, each.about) for each in submissions if each.about is not None and each.about.seed]
    known = {here.seed: here.name} if here.lab else {about.seed: about.class_name for _, about in packed}
    if known and public not in known:
        names = ", ".join(map(repr, known.values()))
        raise LabError(f"--seed is not the seed of class {names}; give the one that its labs release had")
    for submission, about in packed:
        if about.seed != public:
            submission.messages.append(f"packed in a release of another class, {about.class_name!r}")
        if about.version != __version__:
            said = f"packed in a release of version {about.version}, and graded with {__version__}"
            submission.messages.append(said)


def class_name_of(root: Path, grades: Sequence[Grade]) -> str:
    """Return the name of the class of a release; in the full repository, that which most archives name."""
    named = Counter(each.submission.about.class_name for each in grades if each.submission.about)
    return class_of(root).name if class_of(root).lab or not named else named.most_common(1)[0][0]


def _is_submission(path: Path) -> bool:
    """Tell whether a file gets a row. A folder that somebody unpacked gets one too, which says so."""
    if path.name.startswith(".") or path.name == MARKS:
        return False
    return path.is_file() or (path / "regions").is_dir()


def read_marks(path: Path) -> dict[str, dict[str, int]]:
    """Read {student: {part: points}} from marks.csv. Raises LabError, which names the line."""
    if not path.exists():
        return {}
    found: dict[str, dict[str, int]] = {}
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        if rows.fieldnames is None or set(rows.fieldnames) != {"student", *MOST_MARKS}:
            raise LabError(f"{path}: the first line must be student,{','.join(MOST_MARKS)}")
        for number, row in enumerate(rows, 2):
            marks = found.setdefault(row["student"], {})
            for part, most in MOST_MARKS.items():
                text = (row[part] or "").strip()
                if text and not (text.isdigit() and int(text) <= most):
                    raise LabError(f"{path}:{number}: {part} is {text!r}, and must be from 0 to {most}")
                if text:
                    marks[part] = int(text)
    return found
