"""Counts how often each mechanism of a cluster was tried, and how often that failed.

Kept by `grants.py`, filled by the parts of the control plane, read by the conductor and the simulator: what
is switched on and never works must not look as if it were switched off. Explained in docs/explain/control.md.
"""

from __future__ import annotations

MANY = 20
"""Attempts after which a mechanism that never worked counts as broken. Fewer may fail by one bad moment."""


class Mechanisms:
    """The mechanisms that were tried.

    counts   name -> attempts ("tried") and failures: of prompts, answers and swaps, and otherwise of blocks
    reasons  name -> why the latest attempts failed, if that was said
    """

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, int]] = {}
        self.reasons: dict[str, str] = {}

    def count(self, name: str, tried: int, failed: int, reason: str = "") -> None:
        """Add attempts, some of which have failed. A grant of no mechanism has no name."""
        if name and tried:
            counted = self.counts.setdefault(name, {"tried": 0, "failed": 0})
            counted["tried"] += tried
            counted["failed"] += failed
            if failed and reason:
                self.reasons[name] = reason

    @property
    def broken(self) -> list[str]:
        """Return the names of those that were tried MANY times and never worked."""
        return [name for name, one in self.counts.items() if MANY <= one["tried"] == one["failed"]]
