"""The type of what the cost functions take: a number, or a NumPy column of numbers."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Column: TypeAlias = "float | NDArray[np.floating[Any]] | NDArray[np.integer[Any]]"
"""Numbers give a number. If any argument is an array, the result is an array of the same length."""
