"""Judging: what a test of a lab may use. It draws inputs, asks the child, and says what was expected.

Used by tutorials/labs, through its conftest. It runs in the parent only: expected values, seeds and scores
never reach the child. Explained in docs/explain/labs.md, "The judge".
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import pytest

from mooncake_lite.errors import LabError
from mooncake_lite.labs.asking import Child, Stopped, in_words, task_child
from mooncake_lite.labs.child import Raised
from mooncake_lite.labs.lab import Lab, find_root, lab_in
from mooncake_lite.labs.sandbox import Level
from mooncake_lite.labs.variant import Sizes, class_of, sizes

MOST_SHOWN = 400
"""Characters of a value in a message."""

MOST_ROWS = 24
"""Rows that `labs show` draws of a table whose failing row is known."""

T = TypeVar("T")


class Variant(msgspec.Struct, frozen=True):
    """Another text of a file of the tree, with which all tests run once. results: gets the Outcome."""

    file: str
    text: str
    results: str


class Run(msgspec.Struct, frozen=True):
    """One run of the tests of a lab.

    tree      whose code the child imports
    seeds     {"public": seed} and perhaps {"private": seed}
    level     how the child is confined
    results   file that gets the Outcome
    gpu       whether kernels run on a GPU, in place of the simulator
    seconds   of processor time for a task; 0: as many as lab.toml gives
    variants  the tests run for each of these, and not for the tree as it is
    """

    tree: str
    lab: int
    seeds: dict[str, int]
    level: Level
    results: str
    gpu: bool = False
    seconds: int = 0
    variants: list[Variant] = []


class Case(msgspec.Struct):
    """One test: which task and seed, whether it passed, and what it says if it did not."""

    task: str
    name: str
    seed: str
    passed: bool
    message: str


class Counted(msgspec.Struct):
    """A deterministic cost that a test has seen, how much there may be, and how much is needed."""

    task: str
    seed: str
    value: int
    limit: int
    needed: int


class Outcome(msgspec.Struct):
    """What a run came to.

    files    {file: digest} of what the children have imported
    traces   {task: what a picture of its last failure shows}
    stopped  {task: why its child was killed or has died}
    broken   why a child could not be started; no student can be to blame
    """

    cases: list[Case] = []
    costs: list[Counted] = []
    files: dict[str, str] = {}
    traces: dict[str, Any] = {}
    stopped: dict[str, str] = {}
    broken: str = ""

    def add(self, other: Outcome) -> None:
        """Take in what a run of other tests came to."""
        self.cases += other.cases
        self.costs += other.costs
        self.files |= other.files
        self.traces |= other.traces
        self.stopped |= other.stopped


class Session:
    """The children of one run, one for each task, and what the tests have seen."""

    def __init__(self, run: Run, root: Path) -> None:
        self.run = run
        self.lab: Lab = lab_in(root, run.lab)
        self.outcome = Outcome()
        self._children: dict[str, Child] = {}

    def child(self, task: str) -> Child:
        """Return the child of a task; it is started for the first question."""
        if task not in self._children:
            run, driver = self.run, f"{self.lab.folder}/{self.lab.task(task).driver}"
            given = self.lab.resources
            if run.seconds:
                given = msgspec.structs.replace(given, seconds=run.seconds)
            try:
                self._children[task] = task_child(Path(run.tree), driver, given, level=run.level, gpu=run.gpu)
            except (LabError, OSError) as error:
                self.outcome.broken = str(error)
                raise
        return self._children[task]

    def close(self) -> None:
        """Kill all children."""
        for child in self._children.values():
            child.close()


class Judge:
    """The fixture `lab` of a test.

        task   id of the task, from the name of the test's file
        seed   "public" or "private"
        size   sizes of the variant
        random a random source of the test's own

    A test fails with `expect`; it never uses `assert` on what the child said, because only `expect` tells a
    student what was called, what came back and what was expected.
    """

    def __init__(self, session: Session, task: str, name: str, seed: str) -> None:
        self._session = session
        self.task, self.seed, self._name = task, seed, name
        self._number = session.run.seeds[seed]
        self.size: Sizes = sizes(session.lab, self._number)
        self.random = self.draw(f"{task} {name}")
        self._trace: object = None
        self._row: int | None = None

    def draw(self, name: str) -> random.Random:
        """Return a random source that tests of one seed share by name."""
        return random.Random(f"{self._number} {name}")

    def ask(self, call: str, inputs: object, kind: type[T], called: str = "") -> T:
        """Ask the child of the task. Fails the test if the call raises, or if there is no answer.

        called   the call, as a student would write it; without it the inputs are shown
        """
        said = self.ask_or_raised(call, inputs, kind)
        if not isinstance(said, Raised):
            return said
        self._fail(f"called     {_short(called or f'{call}({inputs!r})')}", f"raised     {in_words(said)}")

    def ask_or_raised(self, call: str, inputs: object, kind: type[T]) -> T | Raised:
        """Ask the child; an exception of the region is an answer too."""
        child = self._session.child(self.task)
        self._trace = self._row = None  # they belong to another case
        child.printed = b""
        try:
            return child.ask(call, inputs, kind)
        except Stopped as error:
            why = str(error)
        finally:
            self._session.outcome.files |= child.files
            if child.stopped:  # a student sees this: a region could tell private inputs by its exit code
                why_at_all = child.stopped if self.seed == "public" else "its process ended in a private test"
                self._session.outcome.stopped.setdefault(self.task, why_at_all)
        self._fail(f"stopped    {why}")

    def expect(self, came_back: object, expected: object, called: str, breaks: str) -> None:
        """Fail the test unless both are equal.

        called   the call, as a student would write it
        breaks   the rule that another answer breaks
        """
        if came_back != expected:
            self._differs(_short(came_back), _short(expected), called, breaks)

    def at_most(self, came_back: int, most: int, called: str, breaks: str) -> None:
        """Fail the test if a number is larger than it may be. called, breaks: as in `expect`."""
        if came_back > most:
            self._differs(f"{came_back:,}", f"at most {most:,}", called, breaks)

    def cost(self, value: int, limit: int, needed: int | None = None) -> None:
        """Note the cost of the task, and how much there may be. needed: in a good solution, if less."""
        needed = limit if needed is None else needed
        self._session.outcome.costs.append(Counted(self.task, self.seed, value, limit, needed))

    def trace(self, what: object) -> None:
        """Note a picture of the last answer, or None. `labs show` draws it if the test then fails."""
        self._trace = what

    def compares(self, row: int) -> None:
        """Note which row of a table the next `expect` is about. If that fails, the row is drawn last."""
        self._row = row

    def _differs(self, came_back: str, expected: str, called: str, breaks: str) -> NoReturn:
        self._fail(
            f"called     {_short(called)}",
            f"came back  {came_back}",
            f"expected   {expected}",
            f"breaks     {breaks}",
        )

    def _fail(self, *lines: str) -> NoReturn:
        if isinstance(self._trace, dict):
            of_test = {**self._trace, "test": self._name, "said": lines}
            if self._row is not None:
                of_test |= rows_to(self._row, of_test)
            self._session.outcome.traces.setdefault(self.task, of_test)
        said = _short(self._session.child(self.task).printed.decode(errors="replace").strip())
        printed = [f"printed    {said}".replace("\n", "\n           ")] if said else []
        pytest.fail("\n".join([*lines, *printed, repeat(self._session.lab.number, self.task)]), pytrace=False)


def repeat(lab: int, task: str) -> str:
    """Return the line of a message that says how to see it again."""
    return f"repeat     mooncake-lite labs check {lab} {task}"


def rows_to(row: int, table: dict[str, Any]) -> dict[str, Any]:
    """Return the title and the rows of a table that ends with this row, at most MOST_ROWS of them."""
    begin = max(0, row + 1 - MOST_ROWS)
    title = f"{table['title']}; rows {begin + 1} to {row + 1} of {len(table['rows'])}, the last one failed"
    return {"title": title, "rows": table["rows"][begin : row + 1]}


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ... ({len(text):,} characters)"


def task_of(path: Path) -> str:
    """Return the task of a test file: test_2a_copy_on_write.py belongs to 2a."""
    match = re.match(r"test_(\d+[a-z])_", path.name)
    assert match is not None, f"{path.name} must be called test_TASK_words.py"
    return match[1]


SESSIONS = pytest.StashKey[dict[int, Session]]()
RUN = pytest.StashKey[Run]()


def session_of(config: pytest.Config, number: int) -> Session:
    """Return the run of a lab that this pytest makes: that of --lab-run, else the reference in this tree."""
    found = config.stash.setdefault(SESSIONS, {})
    if number not in found:
        root = find_root(config.rootpath)
        default = Run(str(root), number, {"public": class_of(root).seed}, level="none", results="")
        found[number] = Session(config.stash.get(RUN, default), root)
    return found[number]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of a lab once for each seed."""
    if "lab" in metafunc.fixturenames:
        session = session_of(metafunc.config, int(task_of(Path(metafunc.definition.path))[:-1]))
        metafunc.parametrize("lab", list(session.run.seeds), indirect=True)


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Judge:
    """What a test of a lab may use; see Judge."""
    task = task_of(request.path)
    session = session_of(request.config, int(task[:-1]))
    return Judge(session, task, request.function.__name__, request.param)


@pytest.fixture(autouse=True, scope="session")
def _children(request: pytest.FixtureRequest) -> Iterator[None]:
    """No child outlives the tests."""
    yield
    for session in request.config.stash.get(SESSIONS, {}).values():
        session.close()
