"""What a model asks of the other members of its tensor parallel group, in the middle of a pass.

Used by `forward.py`. `transport/exchange.py` has the exchanges between processes; a test may bring its own.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Exchange(Protocol):
    """Where members meet. All of them make the same calls, in the same order. Raises when one is lost."""

    @property
    def member(self) -> int:
        """Number of this member; 0 draws the tokens."""

    def sum(self, x: np.ndarray) -> None:
        """Add up what all members have, in place: the same bits on all of them. x: float32, contiguous."""

    def gather(self, x: np.ndarray) -> list[np.ndarray]:
        """Return what each member has, by its number. x: (n,), n may differ between members."""
