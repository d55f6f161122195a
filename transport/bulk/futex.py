"""Counters in shared memory on whose change other processes sleep: Linux futexes, by system call.

Used by `transport.exchange` alone. Knows no exchanges. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time

import numpy as np

FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
"""Number of the system call. None: waiters sleep for NAP_S at a time and look again."""

NAP_S = 0.0002

IN_ORDER = platform.machine() == "x86_64"
"""Whether each core sees the stores of the others, and does its own loads, in the order of the program."""

_WAIT, _WAKE, _WAKE_OP, _ADD_BIT, _AMOUNT_BIT = 0, 1, 5, 28, 12
_EVERYONE = 2**31 - 1

_sleeping = ctypes.CDLL(None).syscall
_short = ctypes.PyDLL(None).syscall
"""For calls that do not sleep. It keeps the interpreter's lock: to get that back can take milliseconds."""


class _Duration(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("ns", ctypes.c_long))


class Counters:
    """A row of counters of 32 bits. Only one process changes each of them.

    words         uint8, apart_bytes for each counter. Its address must be a multiple of 4.
    apart_bytes   from one counter to the next
    """

    def __init__(self, words: np.ndarray, apart_bytes: int):
        self._values = words.data.cast("I")
        self._apart = apart_bytes // 4
        self._at = [ctypes.c_void_p(words.ctypes.data + at) for at in range(0, words.nbytes, apart_bytes)]

    def value(self, number: int) -> int:
        """Return the value of a counter, from 0 to 2**32 - 1."""
        return self._values[number * self._apart]

    def step(self, number: int) -> None:
        """Add 1 to a counter and wake its waiters. They then see all that this thread has stored before."""
        if FUTEX is None:
            self._values[number * self._apart] = (self.value(number) + 1) % 2**32
        else:
            self._add(1, self._at[number])

    def settle(self, number: int) -> None:
        """Prevent the processor from doing later loads before earlier ones. number: an own counter."""
        if FUTEX is not None and not IN_ORDER:
            self._add(0, self._at[number])

    def _add(self, amount: int, at: ctypes.c_void_p) -> None:
        """Let the kernel add to a counter, which is atomic and a full barrier, and wake the waiters."""
        _short(FUTEX, at, _WAKE_OP, _EVERYONE, None, at, 1 << _ADD_BIT | amount << _AMOUNT_BIT)

    def wait(self, number: int, value: int, limit_s: float) -> None:
        """Sleep while a counter has this value, at most limit_s. May return earlier."""
        if FUTEX is None:
            time.sleep(min(limit_s, NAP_S))
        else:
            limit = _Duration(int(limit_s), int(limit_s % 1 * 1e9))
            _sleeping(FUTEX, self._at[number], _WAIT, ctypes.c_uint32(value), ctypes.byref(limit), None, 0)

    def wake(self) -> None:
        """End all waits for any of the counters, in all processes. Any thread may call this."""
        for at in self._at if FUTEX is not None else ():
            _short(FUTEX, at, _WAKE, _EVERYONE, None, None, 0)
