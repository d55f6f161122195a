"""What watches a simulated cluster. Experiments ask for no more than an end of each request.

Used by `world.py`. The fault world of the tests has one that checks everything. Explained in
docs/explain/control.md.
"""

from __future__ import annotations

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev


class Checker:
    """Is shown each event and each effect of a run, in their order."""

    def saw(self, event: ev.Event) -> None:
        """Look at an event that the control plane is about to hear."""

    def watch(self, event: ev.Event, effect: fx.Effect) -> None:
        """Look at an effect of an event, before it is carried out."""

    def end(self) -> None:
        """Look at the world when all requests have ended, and nothing happens any more."""
