"""What a forward pass calls at each of its layers, so that KV can move by layers beside it.

Used by the forward passes, real and emulated; `mooncake_lite.engine.by_layers` has the form that moves KV.
"""

from __future__ import annotations


class LayerHook:
    """Does nothing at each layer.

    moves   KV comes in or leaves through this hook, so that no pass may go on without calling it
    """

    moves = False

    def before(self, layer: int) -> None:
        """Make sure that the KV of earlier tokens is there. May wait; raises to give the pass up."""

    def after(self, layer: int) -> None:
        """Note that the KV of the pass's own tokens is in its pages."""
