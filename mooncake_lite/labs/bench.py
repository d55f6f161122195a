"""The bench of `labs dev`: a copy of the tree in which a lab is under test, one change at a time.

Explained in docs/explain/labs.md, "What labs dev check enforces".
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mooncake_lite.labs import regions
from mooncake_lite.labs.judging import Outcome
from mooncake_lite.labs.lab import Lab, LabTask
from mooncake_lite.labs.lowering import lower
from mooncake_lite.labs.release import CONFTEST
from mooncake_lite.labs.running import run_tests
from mooncake_lite.labs.trees import child_files, copied, tracked_files
from mooncake_lite.labs.variant import private_seed, public_seed

PUBLIC = {"public": public_seed("dev check")}
SEEDS = {**PUBLIC, "private": private_seed("dev check")}


@dataclass(frozen=True, slots=True)
class Bench:
    """A lab under test: `root` is the repository, `tree` a copy of it that rules may change and put back."""

    root: Path
    lab: Lab
    tree: Path

    def source(self, task: LabTask) -> str:
        """Return the file of a region, with the reference in it."""
        return regions.without_marks((self.root / task.file).read_text(encoding="utf-8"))

    def region(self, task: LabTask) -> str:
        """Return the reference."""
        return regions.body(self.source(task), task.function)

    def with_region(
        self, task: LabTask, text: str, seeds: dict[str, int] = PUBLIC, *, first: bool = False
    ) -> Outcome:
        """Run the tests of a task with another text in its region, and put the reference back.

        first   end with the first test that fails
        """
        with self._changed(task, text):
            return run_tests(self.root, self.lab, [task.id], self.tree, seeds, level="none", first=first)

    def lowers(self, task: LabTask, text: str) -> bool:
        """Tell whether the kernels of a task lower to PTX with another text in its region."""
        with self._changed(task, text):
            return not lower(self.tree, self.lab, [task], level="none").problems

    @contextmanager
    def _changed(self, task: LabTask, text: str) -> Iterator[None]:
        path = self.tree / task.file
        path.write_text(regions.replace(self.source(task), task.function, text), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(self.source(task), encoding="utf-8")

    @contextmanager
    def stubs(self, tasks: Sequence[LabTask]) -> Iterator[None]:
        """Put stubs in place of these regions, until the block of this context ends."""
        files = {task.file for task in tasks}
        for file in files:
            found = {task.function: task.id for task in tasks if task.file == file}
            text = (self.root / file).read_text(encoding="utf-8")
            (self.tree / file).write_text(regions.stripped(text, found), encoding="utf-8")
        try:
            yield
        finally:
            for task in tasks:
                (self.tree / task.file).write_text(self.source(task), encoding="utf-8")


@contextmanager
def bench_of(root: Path, lab: Lab) -> Iterator[Bench]:
    """Copy what a lab needs, until the block of this context ends."""
    with tempfile.TemporaryDirectory(prefix="mlab") as folder:
        bench = Bench(root, lab, Path(folder))
        tests = [name for name in tracked_files(root) if name == CONFTEST or name.startswith(f"{lab.tests}/")]
        sheets = [f"{lab.folder}/{path.name}" for path in (root / lab.folder).glob("lab.*")]
        copied(root, bench.tree, (*child_files(root, lab), *tests, *sheets), {})
        yield bench
