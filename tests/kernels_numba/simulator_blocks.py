"""Blocks and shared memory of Numba's simulator, faster and stricter than its own: for simulator_checks.py.

Shared memory begins as NaN in every block, so that a missing barrier shows. Knows no kernel.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
from numba.cuda.simulator import kernel as simulator
from numba.cuda.simulator import kernelapi

LIMIT_S = 90.0
"""Longer than a warp waits for its lanes (backend_twins.WAIT_S)."""


def use() -> None:
    """From now on, for every simulated kernel of this process."""
    kernelapi.FakeCUDAShared = PoisonedShared
    simulator.BlockManager = Block


class PoisonedShared(kernelapi.FakeCUDAShared):
    """Shared memory whose every float is NaN until it is written. One array a line of the kernel, as in the
    simulator, whose own look-up two threads can enter at once."""

    LOCK = threading.Lock()

    def array(self, shape: Any, dtype: Any, alignment: Any = None) -> np.ndarray:
        line = sys._getframe(1).f_lineno
        with self.LOCK:
            if line not in self._allocations:
                array = self._allocations[line] = np.empty(shape, dtype)
                array.reshape(-1).view(np.uint8)[:] = 0xFF  # a NaN in every float format
            return self._allocations[line]


class Thread(simulator.BlockThread):
    """A simulated thread that tells its block when it waits and when it ends."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.gate = threading.Lock()
        self.gate.acquire()

    def run(self) -> None:
        super().run()
        self._manager.leave(self)

    def syncthreads(self) -> None:
        self._manager.arrive(self)
        if not self.gate.acquire(timeout=LIMIT_S) or self._manager.failed:
            raise RuntimeError("another thread of the block failed, or never came to the barrier")


class Block(simulator.BlockManager):
    """The simulator's own manager asks its threads without a pause what they do, and so keeps them from
    running; here they tell. Three times as fast. As there, a barrier is for the threads that still run."""

    def run(self, grid_point: Any, *arguments: Any) -> None:
        self.changing, self.waiting, self.failed = threading.Lock(), [], None
        places = list(np.ndindex(*self._block_dim))
        self.running = len(places)
        threads = [
            Thread(lambda: self._f(*arguments), self, grid_point, place, self._debug) for place in places
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert self.failed or not thread.is_alive(), f"{thread} hangs"
        if self.failed:
            raise self.failed[0].with_traceback(self.failed[1])

    def arrive(self, thread: Thread) -> None:
        """At the barrier."""
        with self.changing:
            self.waiting.append(thread)
            self._open_when_all_came()

    def leave(self, thread: Thread) -> None:
        """At the kernel's end; a thread that failed takes the others with it."""
        with self.changing:
            self.running -= 1
            self.failed = self.failed or thread.exception
            self._open_when_all_came()

    def _open_when_all_came(self) -> None:
        if self.failed or len(self.waiting) == self.running:
            for thread in self.waiting:
                thread.gate.release()
            self.waiting.clear()
