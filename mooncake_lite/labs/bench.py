"""The bench of `labs dev`: a copy of the tree in which a lab is under test, one change at a time.

Explained in docs/explain/labs.md, "What labs dev check enforces".
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from mooncake_lite.labs import regions
from mooncake_lite.labs.judging import Outcome
from mooncake_lite.labs.lab import Lab, LabTask
from mooncake_lite.labs.lowering import lower
from mooncake_lite.labs.release import CONFTEST
from mooncake_lite.labs.running import run_variants
from mooncake_lite.labs.trees import child_files, compiled, copied, tracked_files
from mooncake_lite.labs.variant import private_seed, public_seed

PUBLIC = {"public": public_seed("dev check")}
SEEDS = {**PUBLIC, "private": private_seed("dev check")}

TIME = 3
"""A mutant has this part of a student's processor time."""

S = TypeVar("S")
T = TypeVar("T")


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

    def with_regions(
        self,
        task: LabTask,
        texts: Sequence[str],
        seeds: dict[str, int] = PUBLIC,
        *,
        only: Sequence[str] = (),
        first: bool = False,
    ) -> list[Outcome]:
        """Run the tests of a task with each of these texts in its region, and put the reference back.

        A text has less processor time than a student's, because many mutants never end. only, first: as in
        `run_variants`.
        """
        if not texts:
            return []
        source = self.source(task)
        files = [regions.replace(source, task.function, text) for text in texts]
        seconds = -(-self.lab.resources.seconds // TIME)
        try:
            return run_variants(
                self.root, self.lab, task, self.tree, files, seeds, seconds=seconds, only=only, first=first
            )
        finally:
            (self.tree / task.file).write_text(source, encoding="utf-8")

    def lowers(self, task: LabTask, text: str) -> bool:
        """Tell whether the kernels of a task lower to PTX with another text in its region."""
        path, source = self.tree / task.file, self.source(task)
        path.write_text(regions.replace(source, task.function, text), encoding="utf-8")
        try:
            return not lower(self.tree, self.lab, [task], level="none").problems
        finally:
            path.write_text(source, encoding="utf-8")

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
        compiled(bench.tree)
        yield bench


@contextmanager
def benches_like(bench: Bench) -> Iterator[list[Bench]]:
    """Copy a bench for each processor, until the block of this context ends. All but regions is shared."""
    with tempfile.TemporaryDirectory(prefix="mlab") as folder:
        trees = [Path(folder) / str(number) for number in range(os.cpu_count() or 1)]
        for tree in trees:
            shutil.copytree(bench.tree, tree, copy_function=os.link)
            for file in bench.lab.files:
                (tree / file).unlink()
                shutil.copy(bench.tree / file, tree / file)
        yield [replace(bench, tree=tree) for tree in trees]


def dealt(
    benches: Sequence[Bench], items: Sequence[S], work: Callable[[Bench, Sequence[S]], list[T]]
) -> list[T]:
    """Deal items out to benches that work at the same time. Return what came of each item, in order."""
    with ThreadPoolExecutor(len(benches)) as pool:
        own = [items[number :: len(benches)] for number in range(len(benches))]
        parts = [iter(found) for found in pool.map(work, benches, own)]
    return [next(parts[number % len(benches)]) for number in range(len(items))]
