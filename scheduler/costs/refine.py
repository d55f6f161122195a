"""Refinement: corrects predictions by what was measured, while the cluster runs.

Used by `scheduler.costs`, and its `Average` wherever a rate is measured. Pure. Explained in
docs/explain/costs.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from scheduler.columns import Column

WEIGHT = 0.2
"""Weight of a new measurement in a moving average, which follows a change within about ten of them.

Any value of this order works: a smaller one follows later, a larger one follows each outlier.
"""

LEAST_SIZE = 1 / 16
"""Smaller measurements are ignored: the seconds of a full hit, which computes one token, say nothing about a
prompt."""

LIMIT = 8.0
"""Largest factor by which a profile is corrected, and 1 / LIMIT the smallest. A rank that was suspended
for a moment must not change predictions a hundredfold. Any factor works that exceeds the error of a
profile. A guess has no limit: it may be wrong by any factor."""


@dataclass(slots=True)
class Average:
    """A moving average over measurements of different sizes.

    weight   of a measurement of size 1 or more

    The average of w * value is divided by the average of w, as in Adam's bias correction. The first
    measurement therefore counts alone, whatever its weight, and a heavier one soon outweighs it.
    """

    weight: float = WEIGHT
    _weight: float = 0.0
    _weighted: float = 0.0

    def add(self, value: float, size: float = 1.0) -> None:
        """Add a measurement. A size below 1 has less weight in proportion; one below 1/16 changes nothing."""
        if size >= LEAST_SIZE:
            weight = self.weight * min(1.0, size)
            self._weight += weight * (1.0 - self._weight)
            self._weighted += weight * (value - self._weighted)

    @property
    def is_measured(self) -> bool:
        """Tell whether there was a measurement."""
        return self._weight > 0

    @property
    def value(self) -> float:
        """Return the average. There must have been a measurement."""
        return self._weighted / self._weight


class Corrections:
    """Factors on the predictions of one kind: measured / predicted, of each instance and of all together.

    full_s   predicted seconds from which a measurement has its full weight
    limit    largest factor
    of_all   the factor over all instances; 1 before any measurement

        _factors   (largest measured instance + 2,) float64   by instance number
        _is_own    the same length, bool                      whether that instance was measured
        _column    the last column of instances, and its factors: most decisions ask for the same ones

    What is known before the first measurement counts as one of full size: the profile, and for an instance
    the factor over all instances. A guess does not count.

    Invariant: a factor that is not its instance's own is the one over all instances. The last factor stands
    for all larger numbers and is never an instance's own.
    """

    def __init__(self, full_s: float, limit: float) -> None:
        self._full_s, self._limit = max(full_s, 1e-9), limit  # above 0, also where every prediction is 0
        self.of_all = 1.0
        self._all = Average()
        if limit < inf:
            self._all.add(1.0)
        self._own: dict[int, Average] = {}
        self._factors = np.ones(1)
        self._is_own = np.zeros(1, bool)
        self._column: tuple[Column, Column] | None = None

    def measured(self, instance: int, predicted_s: float, measured_s: float) -> None:
        """Add a measurement, with the uncorrected prediction. Without a time, nothing changes."""
        size = predicted_s / self._full_s
        if size < LEAST_SIZE or measured_s <= 0:
            return
        factor = min(max(measured_s / predicted_s, 1 / self._limit), self._limit)
        own = self._own.get(instance)
        if own is None:
            own = self._own[instance] = Average()
            if self._all.is_measured:
                own.add(self.of_all)
        own.add(factor, size)
        self._all.add(factor, size)
        if missing := max(0, instance + 2 - len(self._factors)):
            self._factors = np.append(self._factors, np.ones(missing))
            self._is_own = np.append(self._is_own, np.zeros(missing, bool))
        self._is_own[instance] = True
        self.of_all = self._factors[~self._is_own] = self._all.value
        self._factors[instance] = own.value
        self._column = None

    def of(self, instances: Column) -> Any:
        """Return the factors of instances; of one without measurements, the one over all instances.

        The result for a column is kept for the next call, so a column must not be changed after a call.
        """
        if isinstance(instances, int):
            return self._factors.item(min(instances, len(self._factors) - 1))
        if self._column is not None and self._column[0] is instances:
            return self._column[1]
        found = self._factors.take(instances, mode="clip")  # type: ignore[call-overload]
        if isinstance(instances, np.ndarray):
            found.flags.writeable = False
            self._column = instances, found
        return found

    @property
    def is_measured(self) -> bool:
        """Tell whether there was a measurement on any instance."""
        return bool(self._own)
