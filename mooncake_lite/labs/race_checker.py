"""A race checker for CUDA kernels in Numba's simulator: it remembers which threads touched which cells.

A child process of a lab calls `watch` around a launch and returns the findings as data. Two accesses of a
cell of shared memory race if different threads make them, at least one of them writes, and no barrier lies
between them. All accesses between two barriers are compared, in whatever order the simulator ran the threads.
Therefore a kernel has the same findings in every run. Explained in docs/explain/race-checker.md.

    with watch() as recording:
        kernel[grid, threads](arguments)
    recording.findings()
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

import msgspec
import numpy as np

READS, WRITES, ATOMIC, WAITS, ENDED = "reads", "writes", "changes atomically", "waits", "has ended"

Cell: TypeAlias = tuple[str, int]
"""Name of an array, and the number of an element in C order."""


class Access(msgspec.Struct, frozen=True, order=True):
    """What one thread does at one line of a kernel.

    thread      its number in its block
    operation   one of the names above; ENDED has no file and line 0
    code        the text of the line; the accesses of a finding have it
    """

    thread: int
    operation: str
    file: str = ""
    line: int = 0
    code: str = ""

    def __str__(self) -> str:
        """Name the thread, what it does, the place, and the code of the line."""
        place = f" at {Path(self.file).name}:{self.line}" if self.file else ""
        return f"thread {self.thread} {self.operation}{place}" + (f" ({self.code})" if self.code else "")

    def with_code(self) -> Access:
        """Return the access with the text of its line."""
        return msgspec.structs.replace(self, code=linecache.getline(self.file, self.line).strip())


class Finding(msgspec.Struct, frozen=True):
    """One fault of a kernel, at one pair of lines.

    kind      "race": no barrier between two accesses; "unwritten": a read before the first write; "barrier":
              some threads of a block wait at a barrier, and the others at another one, or they have ended
    array     name of the shared array; empty for "barrier"
    cell      index of the first cell that is concerned; empty for "barrier"
    cells     number of cells of the array that are concerned, in any block and phase
    block     the first block, (x, y, z)
    phase     number of barriers that this block passed before
    accesses  one for "unwritten", two otherwise
    """

    kind: str
    array: str
    cell: tuple[int, ...]
    cells: int
    block: tuple[int, ...]
    phase: int
    accesses: tuple[Access, ...]

    def __str__(self) -> str:
        """Say in one sentence what is wrong."""
        what = ", ".join(map(str, self.accesses))
        if self.kind == "barrier":
            return f"not all threads of block {self.block} come to the same barrier: {what}"
        more = f" (and {self.cells - 1} more cells)" if self.cells > 1 else ""
        where = f"{self.array}{list(self.cell)}{more}"
        if self.kind == "unwritten":
            return f"{where} is read before it is written: {what}"
        return f"race on {where}: {what}, and no barrier lies between"


class Phase(msgspec.Struct):
    """What the threads of one block did between two barriers."""

    block: tuple[int, ...]
    number: int
    accesses: dict[Cell, set[Access]]
    unwritten: dict[Cell, set[Access]]


class Recording:
    """The accesses of launches, and what is wrong with them. It observes the blocks of the simulator.

    phases   in the order in which they happened; those of a block stand together
    shapes   array -> shape, of shared arrays and of the watched global ones
    shared_names  the arrays of `shapes` that are shared
    threads  of a block, as far as they accessed a watched array
    """

    def __init__(self, global_arrays: Sequence[str] = ()) -> None:
        from kernels_numba.gpu import simulator_blocks  # loads Numba, which only the child process needs

        self._simulator = simulator_blocks
        self.phases: list[Phase] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.threads = 0
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._global = frozenset(global_arrays)
        self.shared_names: set[str] = set()
        self._names: dict[tuple[CodeType, int], str] = {}
        self._written: set[Cell] = set()
        self._barriers: list[Finding] = []

    def findings(self) -> list[Finding]:
        """Return every fault once, in the order of phases and cells."""
        found: dict[tuple[Any, ...], Finding] = {}
        cells: dict[tuple[Any, ...], set[tuple[int, ...]]] = defaultdict(set)
        for one in [*self._barriers, *(one for phase in self.phases for one in self._faults(phase))]:
            key = (one.kind, one.array, *((a.operation, a.file, a.line) for a in one.accesses))
            found.setdefault(key, one)
            cells[key].add(one.cell)
        return [
            msgspec.structs.replace(
                one,
                cells=one.cells and len(cells[key]),
                accesses=tuple(access.with_code() for access in one.accesses),
            )
            for key, one in found.items()
        ]

    def count(self, array: str, operation: str) -> int:
        """Return how many elements of an array were accessed so, each as often as a thread did it."""
        return sum(self._counts_by_thread(array, operation))

    def most_of_a_thread(self, array: str, operation: str) -> int:
        """Return the largest count, as above, of the threads with one number in all blocks."""
        return max(self._counts_by_thread(array, operation), default=0)

    def _counts_by_thread(self, array: str, operation: str) -> list[int]:
        return [
            count for (name, label, _), count in self._counts.items() if (name, label) == (array, operation)
        ]

    def _faults(self, phase: Phase) -> Iterator[Finding]:
        """Yield the faults of a phase, one for each cell that has one."""
        for name, cell in sorted(phase.accesses):
            if name not in self.shared_names:
                continue
            index = tuple(int(i) for i in np.unravel_index(cell, self.shapes[name]))
            where = (name, index, 1, phase.block, phase.number)
            if pair := conflict(phase.accesses[name, cell]):
                yield Finding("race", *where, pair)
            elif reads := phase.unwritten.get((name, cell)):
                yield Finding("unwritten", *where, (min(reads),))

    def begin(self, block: tuple[int, ...], kernel: Any, arguments: tuple) -> tuple:
        """Replace the global arrays that are to be watched. The simulator calls it for each block."""
        self._written.clear()
        self.phases.append(Phase(block, 0, defaultdict(set), defaultdict(set)))
        names = inspect.signature(kernel).parameters
        return tuple(
            self._watched(argument._item._ary, name) if name in self._global else argument
            for name, argument in zip(names, arguments)
        )

    def shared(self, array: np.ndarray, frame: FrameType) -> np.ndarray:
        """Watch a new shared array. Its name is the variable that the line of the kernel assigns."""
        place = (frame.f_code, frame.f_lasti)
        if place not in self._names:
            self._names[place] = self._new_name(frame)
        name = self._names[place]
        self.shared_names.add(name)
        return self._watched(array, name)

    def _new_name(self, frame: FrameType) -> str:
        """Name the array that this call makes. The calls of one line come in the order of its variables."""
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        assigned = re.match(r"\s*(\w+(?:\s*,\s*\w+)*)\s*=(?!=)", line)
        variables = re.findall(r"\w+", assigned[1]) if assigned else []
        free = [name for name in variables if name not in self._names.values()]
        return free[0] if free else f"shared array {len(self._names) + 1}, of line {frame.f_lineno}"

    def barrier(self, waiting: Sequence[tuple[int, FrameType]], threads: int) -> None:
        """Begin a new phase, after a look at who has come."""
        phase = self.phases[-1]
        here: dict[tuple[str, int], Access] = {}
        for thread, frame in sorted(waiting, key=lambda one: one[0]):
            place = (frame.f_code.co_filename, frame.f_lineno)
            here.setdefault(place, Access(thread, WAITS, *place))
        ended = set(range(threads)) - {thread for thread, _ in waiting}
        apart = [*here.values(), *(Access(thread, ENDED) for thread in sorted(ended))]
        if len(apart) > 1:
            pair = (apart[0], apart[1])
            self._barriers.append(Finding("barrier", "", (), 0, phase.block, phase.number, pair))
        self.phases.append(Phase(phase.block, phase.number + 1, defaultdict(set), defaultdict(set)))

    def note(self, name: str, cells: Any, operation: str) -> None:
        """Note what the running thread of the kernel does with cells, at the line that it executes."""
        caller = sys._getframe(2)
        frame, thread = self._simulator.kernel_frame(caller), threading.current_thread()
        label = ATOMIC if caller.f_code.co_filename == self._simulator.ATOMICS else operation
        number: int = thread.thread_id  # type: ignore[attr-defined]
        self.threads = max(self.threads, number + 1)
        access = Access(number, label, frame.f_code.co_filename, frame.f_lineno)
        phase = self.phases[-1]
        self._counts[name, label, number] += cells.size  # no other thread has this key now
        for cell in cells.ravel().tolist() if isinstance(cells, np.ndarray) else (int(cells),):
            phase.accesses[name, cell].add(access)
            if operation == WRITES:
                self._written.add((name, cell))
            elif (name, cell) not in self._written:
                phase.unwritten[name, cell].add(access)

    def _watched(self, array: np.ndarray, name: str) -> np.ndarray:
        """Return a view of an array that tells this recording what threads do with it."""
        self.shapes[name] = array.shape
        view = array.view(WatchedArray)
        view.watch(self, name, np.arange(array.size).reshape(array.shape))
        return view


class WatchedArray(np.ndarray):
    """A view of an array of a kernel. It reports the elements that are read and written by index."""

    _recording: Recording | None = None
    _name = ""
    _cells: Any = None

    def watch(self, recording: Recording, name: str, cells: Any) -> None:
        """Report to a recording from now on. cells: the number, in the whole array, of each element here."""
        self._recording, self._name, self._cells = recording, name, cells

    def __getitem__(self, index: Any) -> Any:
        """Return elements. A part of the array reports what is done with it later."""
        value = super().__getitem__(index)
        if self._recording is not None:
            if isinstance(value, WatchedArray):
                value.watch(self._recording, self._name, self._cells[index])
            else:
                self._recording.note(self._name, self._cells[index], READS)
        return value

    def __setitem__(self, index: Any, value: Any) -> None:
        """Set elements."""
        if self._recording is not None:
            self._recording.note(self._name, self._cells[index], WRITES)
        super().__setitem__(index, value)


def conflict(accesses: set[Access]) -> tuple[Access, Access] | None:
    """Return two accesses of one cell that race, the one that changes it first; None if all may stay."""
    for one in sorted(access for access in accesses if access.operation != READS):
        for other in sorted(accesses):
            if one.thread != other.thread and not one.operation == other.operation == ATOMIC:
                return one, other
    return None


@contextmanager
def watch(global_arrays: Sequence[str] = ()) -> Iterator[Recording]:
    """Record the launches of this context: every shared array, and the parameters named in `global_arrays`.

    Shared memory begins as NaN, or as an index out of range. A kernel that fails raises as it does without.
    Raises BackendError when Numba does not simulate.
    """
    from kernels_numba.errors import BackendError
    from kernels_numba.gpu.backend_cuda import SIMULATED
    from kernels_numba.gpu.simulator_blocks import observed

    if not SIMULATED:
        raise BackendError(
            "races are found in Numba's simulator only: set NUMBA_ENABLE_CUDASIM=1 before the start"
        )
    recording = Recording(global_arrays)
    with observed(recording):
        yield recording
