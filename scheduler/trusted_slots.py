"""Decode slots that go by predicted length, and those that go first come, first served.

Kept by `scheduler.held_line`, for the queue `predicted`. Books only. Explained in docs/explain/conductor.md.

    k slots --+-- floor(trust * k) trusted: for the shortest predicted answer
              `-- the others plain: first come, first served

A free plain slot is always taken before a trusted one. Trusted slots therefore only take requests out of the
line of the plain ones: with fixed service times none begins later than with the plain slots alone.
"""

from __future__ import annotations

from math import floor


class TrustedSlots:
    """Which slots are free.

    trust    0 to 1
    _plain   request -> plain slots that it has; `_trusted` likewise
    """

    def __init__(self, trust: float) -> None:
        self._trust = trust
        self._slots = 0
        self._plain: dict[str, int] = {}
        self._trusted: dict[str, int] = {}
        self._plain_used = 0

    def add(self, slots: int) -> None:
        """Add slots to all that there are."""
        self._slots += slots

    def has_plain(self, slots: int) -> bool:
        """Tell whether so many plain slots are free."""
        return self._plain_used + slots <= self._slots - floor(self._trust * self._slots)

    def take(self, request_id: str, slots: int) -> None:
        """Give a request this many slots instead of those that it has: plain ones if there are enough."""
        had_trusted = self._trusted.pop(request_id, 0)
        self._plain_used -= self._plain.pop(request_id, 0)
        if not slots:
            return
        if not had_trusted and self.has_plain(slots):
            self._plain[request_id] = slots
            self._plain_used += slots
        else:
            self._trusted[request_id] = slots

    def check(self) -> None:
        """Assert the invariants."""
        assert self._plain_used == sum(self._plain.values())
        assert not self._plain.keys() & self._trusted.keys()
