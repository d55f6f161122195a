"""A lab: what its folder says. `lab.toml` is its data, and this file is the meaning of each key.

Used by every command of `mooncake-lite labs`. It finds the tree in which one works and reads labs from it.
Explained in docs/explain/labs.md, "A lab is a folder".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec

from mooncake_lite.errors import LabError

FOLDER = Path("tutorials/labs")
MOST_REGIONS = 5
_NAME = re.compile(r"(\d\d)_\w+")

Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A deterministic cost of a task.

        name   what is counted, as prediction.toml names it: bytes_hashed
        unit   of the number: bytes
        about  the case that is counted, in one sentence

    A test of the task says how much there may be.
    """

    name: str
    unit: str
    about: str


class Points(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Points of a task: its public tests, the same tests with private seeds, its cost, its tidiness."""

    public: int
    private: int
    cost: int
    tidiness: int

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.public + self.private + self.cost + self.tidiness


class LabTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One region and what is asked of it; in a lab of numbers, some of its questions.

    id, title   "2a" and a few words
    file        of the region, from the root of the tree
    function    whose body is the region: "Pages.grow"
    names       names that the region may use beside the lab's `names`, its arguments and its own names
    private     attributes with a leading underscore that it may use
    hints       three, the first one the weakest
    kernels     CUDA kernels that the region is, as gpu_lowering calls them: they must lower to PTX
    driver      the file of the lab's folder that calls the region in the child
    key         names of the tests of what the task is about: who fails one keeps at most half of its points
    """

    id: str
    title: str
    file: str = ""
    function: str = ""
    names: list[str] = []
    private: list[str] = []
    hints: list[str]
    cost: Cost = Cost("", "", "")
    points: Points
    key: list[str] = []
    kernels: list[str] = []
    driver: str = "drive.py"


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the processes of one task may use; they are killed when they use more.

    seconds       of processor time
    memory_mb     resident, and address space of each process
    tasks         processes and threads
    task_seconds  on the clock, for all tests of the task together
    """

    seconds: Positive
    memory_mb: Positive
    tasks: Positive
    task_seconds: Positive = 60


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure of the report, and the questions of which each class gets one."""

    title: str
    questions: list[str]


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question of a lab without regions. data.py of the lab's tests computes its answer.

    name, unit  as the student's file names it, and of its number; an answer without a unit is a list of words
    text        the question, one sentence
    look        where the answer can be seen
    task        to which it belongs, in a lab of numbers
    within      share of the answer by which a number may differ; 0: none
    played      whether trial.py of the lab's tests judges it, in place of the answer
    """

    name: str
    unit: str
    text: str
    look: str
    task: str = ""
    within: float = 0.0
    played: bool = False


class Lab(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of lab.toml. A lab has tasks, which are graded, or questions, which are not.

    A lab of numbers has both: its tasks have no regions, and each question belongs to a task.

    names     builtins that every region may use
    variant   size -> the values of which each class gets one; the sheet names them in braces
    """

    number: Natural
    title: str
    hours: str
    variant: dict[str, list[int]]
    names: list[str] = []
    resources: Resources = Resources(seconds=6, memory_mb=1024, tasks=32)
    figures: list[Figure] = []
    tasks: list[LabTask] = []
    questions: list[Question] = []
    folder: str = ""

    @property
    def tests(self) -> str:
        """Return the folder of the tests, from the root of the tree."""
        return f"{self.folder}/tests_{self.number:02}"

    def task(self, task: str) -> LabTask:
        """Return a task by its id. Raises LabError if there is none."""
        for found in self.tasks:
            if found.id == task:
                return found
        there = ", ".join(self.ids) or "questions, and no tasks"
        raise LabError(f"lab {self.number} has no task {task!r}; it has {there}")

    @property
    def ids(self) -> list[str]:
        """Return the ids of the tasks."""
        return [task.id for task in self.tasks]

    @property
    def answers_file(self) -> str:
        """Return the name of the file with a student's answers to the questions."""
        return "numbers.toml" if self.tasks else "answers.toml"

    @property
    def drivers(self) -> list[str]:
        """Return the drivers of the tasks, from the root of the tree."""
        return sorted({f"{self.folder}/{task.driver}" for task in self.tasks if task.file})

    def must_be_graded(self) -> None:
        """Raise LabError for a lab without tasks."""
        if not self.tasks:
            raise LabError(
                f"lab {self.number} is not graded: it has questions and no tasks, so nothing is handed in; "
                f"mooncake-lite labs check {self.number} compares the answers"
            )

    @property
    def files(self) -> dict[str, dict[str, str]]:
        """Return {file: {function: task}} of all regions."""
        found: dict[str, dict[str, str]] = {}
        for task in (task for task in self.tasks if task.file):
            found.setdefault(task.file, {})[task.function] = task.id
        return found


def find_root(start: Path) -> Path:
    """Return the tree in which one works: the folder above `start` that has labs, else the tree of this code.

    Raises LabError when neither has any.
    """
    here = Path(__file__).resolve().parents[2]
    for folder in (start.resolve(), *start.resolve().parents, here):
        if (folder / FOLDER).is_dir() and (folder / "mooncake_lite").is_dir():
            return folder
    raise LabError(f"there is no {FOLDER}/ here; change into a checkout of mooncake-lite, or into a release")


def labs_in(root: Path) -> dict[int, Lab]:
    """Return the labs of a tree by number. Raises LabError for a lab.toml that cannot be used."""
    folders = sorted((root / FOLDER).glob("*/lab.toml"))
    labs = [read_lab(root, path.parent.name) for path in folders]
    return {lab.number: lab for lab in labs}


def lab_in(root: Path, number: int) -> Lab:
    """Return one lab of a tree. Raises LabError if it is not there or cannot be used."""
    labs = labs_in(root)
    if number not in labs:
        there = ", ".join(map(str, labs)) or "none"
        raise LabError(f"there is no lab {number} in {root}; there is: {there}")
    return labs[number]


def lab_here(number: int) -> tuple[Path, Lab]:
    """Return the tree in which one works, and one of its labs. Raises LabError."""
    root = find_root(Path.cwd())
    return root, lab_in(root, number)


def read_lab(root: Path, name: str) -> Lab:
    """Read one lab.toml. Raises LabError, which names the file and the key."""
    path = root / FOLDER / name / "lab.toml"
    try:
        data = msgspec.toml.decode(path.read_bytes())
        lab: Lab = msgspec.convert({**data, "folder": str(FOLDER / name)}, Lab)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LabError(f"{path}: {error}") from None
    if problem := _problem(lab, name):
        raise LabError(f"{path}: {problem}")
    return lab


def _problem(lab: Lab, name: str) -> str:
    """What is wrong with a lab; empty when nothing is."""
    match = _NAME.fullmatch(name)
    if match is None or int(match[1]) != lab.number:
        return f"number = {lab.number}, and the folder is called {name}"
    if not lab.tasks and not lab.questions:
        return "a lab has either [[tasks]] or [[questions]]"
    if lab.questions and {question.task for question in lab.questions} != set(lab.ids or [""]):
        return "each question names a task, and each task has questions"
    if len(lab.tasks) > MOST_REGIONS:
        return f"{len(lab.tasks)} tasks, and a lab has at most {MOST_REGIONS}"
    if len(set(lab.ids)) != len(lab.ids):
        return "two tasks have one id"
    for task in lab.tasks:
        if not re.fullmatch(rf"{lab.number}[a-z]", task.id):
            return f"task {task.id!r} must be called {lab.number}a, {lab.number}b and so on"
        if len(task.hints) != 3:
            return f"task {task.id} has {len(task.hints)} hints, and a task has 3"
        if bool(task.file and task.function and task.cost.name) == bool(lab.questions):
            return f"task {task.id} has either questions, or a file, a function and a cost"
    return ""
