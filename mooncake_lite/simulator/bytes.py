"""What blocks hold where prompts are lengths: nothing. The fault world of the tests has real bytes.

Used by `world.py` and its ranks. Explained in docs/explain/simulator.md.
"""

from __future__ import annotations

from typing import Any

from store.objects import BlockRef


class Bytes:
    """The bytes of all places. layers: of a block; as many checksums has it."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._sums = [0] * layers

    def find(self, ref: BlockRef) -> Any:
        """Return what a place holds; None: nothing whole."""
        return ()

    def sums(self, content: Any) -> list[int]:
        """Return the checksums of what a place holds, by layer."""
        return self._sums

    def write(self, ref: BlockRef, content: Any) -> None:
        """Put bytes into a place."""
