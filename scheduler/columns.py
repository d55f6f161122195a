"""Numbers about instances as NumPy columns, which policies compare for all instances at once.

Kept by `scheduler.state`, read by policies. Row i is the i-th instance with the duty, ascending by number.
The books (queues, slots, requests) are in `state.py`; a column repeats a number of theirs. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from scheduler.instances import DecodeInstance, PrefillInstance

Column: TypeAlias = "float | NDArray[np.floating[Any]] | NDArray[np.integer[Any]]"
"""Argument of the costs: a number or a column. The result is a column if any argument is one."""


class PrefillColumns:
    """Instances that prefill.

    row           (n,) int64     0, 1, ... n - 1
    instance      (n,) int64     number
    node_column   (n,) int64     of its node, in the index of the pool
    page_column   (n,) int64     of the instance, in the index of pages
    decode_row    (n,) int64     its row in DecodeColumns, if it has both duties, or else -1
    num_both      number of instances that have both duties
    rack          (n,) int64     of its node
    waiting_s     (n,) float64   predicted seconds of the prefills in its queue, without corrections
    ends_s        (n,) float64   predicted time at which those that have started end; at most now if none runs
    """

    def __init__(
        self,
        instances: Sequence[int],
        node_columns: Sequence[int],
        page_columns: Sequence[int],
        decode_rows: Sequence[int],
        racks: Sequence[int],
    ) -> None:
        self.row = np.arange(len(instances))
        self.row.flags.writeable = False  # it is handed out
        self.instance = np.array(instances, np.int64)
        self.node_column = np.array(node_columns, np.int64)
        self.page_column = np.array(page_columns, np.int64)
        self.decode_row = np.array(decode_rows, np.int64)
        self.num_both = sum(row >= 0 for row in decode_rows)
        self.rack = np.array(racks, np.int64)
        self.waiting_s = np.zeros(len(instances))
        self.ends_s = np.zeros(len(instances))

    def show(self, one: PrefillInstance) -> None:
        """Repeat the numbers of an instance in its row."""
        self.waiting_s[one.row] = one.waiting_s
        self.ends_s[one.row] = one.ends_s

    def check(self, one: PrefillInstance) -> None:
        """Assert that the row of an instance repeats its numbers."""
        shown = self.instance[one.row], self.waiting_s[one.row], self.ends_s[one.row]
        assert shown == (one.instance, one.waiting_s, one.ends_s)


class DecodeColumns:
    """Instances that decode.

    instance    (n,) int64     number
    free        (n,) int64     decode slots that no request has
    batch       (n,) float64   sequences that it decodes, or will: slots that are taken
    context     (n,) float64   tokens that these attend to, half of each predicted answer included
    rack        (n,) int64     of its node
    """

    def __init__(self, instances: Collection[DecodeInstance], rack_of: Callable[[int], int]) -> None:
        self.instance = np.array([one.instance for one in instances], np.int64)
        self.rack = np.array([rack_of(one.node) for one in instances], np.int64)
        self.free = np.array([one.free for one in instances], np.int64)
        self.batch = np.zeros(len(instances))
        self.context = np.zeros(len(instances))

    def show(self, one: DecodeInstance) -> None:
        """Repeat the numbers of an instance in its row."""
        self.free[one.row] = one.free
        self.batch[one.row] = one.slots - one.free
        self.context[one.row] = one.context

    def check(self, one: DecodeInstance) -> None:
        """Assert that the row of an instance repeats its numbers."""
        shown = self.instance[one.row], self.free[one.row], self.batch[one.row], self.context[one.row]
        assert shown == (one.instance, one.free, one.slots - one.free, one.context)
