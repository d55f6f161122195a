"""Blocks and shared memory of Numba's simulator, faster and stricter than its own, and open to an observer.

Used by the tests of the CUDA kernels and by the race checker of the labs, in processes with
NUMBA_ENABLE_CUDASIM=1. Shared memory holds poison at the beginning of every block, so that a missing barrier
shows, and local arrays hold it until they are written. Knows no kernel.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import numpy as np
from numba.cuda.simulator import kernel as simulator
from numba.cuda.simulator import kernelapi

from kernels_numba.gpu import backend_twins

LIMIT_S = 90.0
"""Longer than a warp waits for its lanes (backend_twins.WAIT_S)."""

INTEGER_POISON = 0x5A
"""Each byte of an integer of four or eight bytes that no thread has written. As an index it is out of range.
Integers of two bytes may be the bits of a float, so they begin as a NaN of bfloat16 and float16."""

ATOMICS = kernelapi.__file__
"""The file whose functions are those of cuda.atomic: frames of it access arrays for a kernel."""

NOT_KERNELS = (simulator.__file__, ATOMICS, __file__, backend_twins.__file__)
"""Files whose frames stand between a thread's access and the line of the kernel that makes it."""


class Observer(Protocol):
    """Hears what the blocks of a launch do. A thread is its number in its block."""

    def begin(self, block: tuple[int, ...], kernel: Any, arguments: tuple) -> tuple:
        """A block begins. Returns the arguments that its threads are to get."""
        ...

    def shared(self, array: np.ndarray, frame: FrameType) -> np.ndarray:
        """A shared array is made by a line of a kernel. Returns the array that the threads are to get."""
        ...

    def barrier(self, waiting: Sequence[tuple[int, FrameType]], threads: int) -> None:
        """All threads that still run have come to a barrier: (thread, its frame). threads: of the block."""
        ...


_observers: list[Observer] = []
"""The present observer is the last one."""


def use() -> None:
    """Use these blocks from now on, for every simulated kernel of this process."""
    kernelapi.FakeCUDAShared = PoisonedShared  # type: ignore[misc]
    kernelapi.FakeCUDALocal = PoisonedLocal  # type: ignore[misc]
    simulator.BlockManager = Block  # type: ignore[misc]


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Use these blocks, and tell `observer` about them, until the block of this context ends."""
    before = kernelapi.FakeCUDAShared, kernelapi.FakeCUDALocal, simulator.BlockManager
    use()
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
        kernelapi.FakeCUDAShared, kernelapi.FakeCUDALocal, simulator.BlockManager = before  # type: ignore[misc]


def kernel_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame at or outside of `frame` that belongs to a kernel."""
    while frame.f_code.co_filename in NOT_KERNELS and frame.f_back is not None:
        frame = frame.f_back
    return frame


def poisoned(shape: Any, dtype: Any) -> np.ndarray:
    """Return an array that nobody has written: NaN in every float, a number out of range in integers."""
    array = np.empty(shape, dtype)
    is_number = array.dtype.kind in "iu" and array.itemsize > 2
    array.reshape(-1).view(np.uint8)[:] = INTEGER_POISON if is_number else 0xFF
    return array


class PoisonedShared(kernelapi.FakeCUDAShared):
    """Shared memory that is poison until it is written. Each call in the text of a kernel is one array, as on
    a GPU. The simulator's own look-up takes two calls on one line for one array, and two threads can enter it
    at once."""

    LOCK = threading.Lock()

    def array(self, shape: Any, dtype: Any, alignment: Any = None) -> np.ndarray:
        """Return the array of the calling instruction; the first thread of a block to come makes it."""
        frame = sys._getframe(1)
        place = (frame.f_code, frame.f_lasti)
        with self.LOCK:
            if place not in self._allocations:
                array = poisoned(shape, dtype)
                self._allocations[place] = _observers[-1].shared(array, frame) if _observers else array
            return self._allocations[place]

    def forget(self) -> None:
        """A new block begins."""
        self._allocations.clear()


class PoisonedLocal(kernelapi.FakeCUDALocal):
    """Arrays of one thread, which are poison until they are written."""

    def array(self, shape: Any, dtype: Any, alignment: Any = None) -> np.ndarray:
        """Return a new array."""
        return poisoned(shape, dtype)


class SimulatedThread(simulator.BlockThread):
    """A simulated thread that tells its block when it waits and when it ends."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.gate = threading.Lock()
        self.gate.acquire()

    def run(self) -> None:
        """Run the kernel as one thread."""
        super().run()
        self._manager.leave(self)

    def syncthreads(self) -> None:
        """Wait for the other threads. Raises RuntimeError when one has failed or does not come."""
        self._manager.arrive(self, kernel_frame(sys._getframe()))
        if not self.gate.acquire(timeout=LIMIT_S) or self._manager.failed:
            raise RuntimeError("another thread of the block failed, or never came to the barrier")


class Block(simulator.BlockManager):
    """The simulator's own manager asks its threads without a pause what they do, and so keeps them from
    running; here they tell. Three times as fast. As there, a barrier is for the threads that still run."""

    def run(self, grid_point: Any, *arguments: Any) -> None:
        """Run a block. Raises what a thread of it raised."""
        self.changing, self.failed = threading.Lock(), None
        self.waiting: list[tuple[SimulatedThread, FrameType]] = []
        self.observer = _observers[-1] if _observers else None
        simulator._get_kernel_context().shared.forget()
        places = list(np.ndindex(*self._block_dim))
        self.size = self.running = len(places)
        if self.observer:
            arguments = self.observer.begin(tuple(grid_point), self._f, arguments)
        threads = [
            SimulatedThread(lambda: self._f(*arguments), self, grid_point, place, self._debug)
            for place in places
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert self.failed or not thread.is_alive(), f"{thread} hangs"
        if self.failed:
            raise self.failed[0].with_traceback(self.failed[1])

    def arrive(self, thread: SimulatedThread, frame: FrameType) -> None:
        """A thread has come to the barrier."""
        with self.changing:
            self.waiting.append((thread, frame))
            self._open_when_all_came()

    def leave(self, thread: SimulatedThread) -> None:
        """A thread has ended; one that failed takes the others with it."""
        with self.changing:
            self.running -= 1
            self.failed = self.failed or thread.exception
            self._open_when_all_came()

    def _open_when_all_came(self) -> None:
        if self.failed or len(self.waiting) == self.running:
            if self.waiting and self.observer and not self.failed:
                self.observer.barrier([(one.thread_id, frame) for one, frame in self.waiting], self.size)
            for thread, _ in self.waiting:
                thread.gate.release()
            self.waiting.clear()
