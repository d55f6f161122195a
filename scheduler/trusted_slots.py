"""Decode slots that go by predicted length, and those that go first come, first served.

Kept by `scheduler.held_line`, for the queue `predicted`. Books only. Explained in docs/explain/conductor.md.

    k slots --+-- q = floor(trust * k) trusted: for the shortest predicted answer
              `-- p = k - q plain: first come, first served

A request of n answers needs n slots. The first in the line has its turn when min(n, p) plain slots are free,
and begins once n slots are free in all. Until then no other request begins. When the first has no turn, the
shortest predicted begins if n trusted slots are free for it.

Trusted slots therefore only take requests out of the line of the plain ones. A wide request, of more than p
answers, needs trusted slots too, and waits until enough of those that have them end.
"""

from __future__ import annotations

from math import floor


class TrustedSlots:
    """The free slots of both kinds, and the slots of each request.

    trust    0 to 1
    plain    number of plain slots
    taken    request -> (plain slots, trusted slots) that it has
    _free    plain slots that are free, and trusted ones
    """

    def __init__(self, trust: float) -> None:
        self._trust = trust
        self._slots = self.plain = 0
        self._free = [0, 0]
        self.taken: dict[str, tuple[int, int]] = {}

    @property
    def trusted(self) -> int:
        """Return the number of trusted slots."""
        return self._slots - self.plain

    def change(self, slots: int) -> None:
        """Add slots; a negative number removes free ones.

        Requests exchange slots for those of the kind that has too many.
        """
        plain, trusted = self.plain, self.trusted
        self._slots += slots
        self.plain = self._slots - floor(self._trust * self._slots)
        self._free = [self._free[0] + self.plain - plain, self._free[1] + self.trusted - trusted]
        for request_id, (plain, trusted) in list(self.taken.items()):
            plain_free, trusted_free = self._free
            more_trusted = min(plain, max(0, -plain_free)) - min(trusted, max(0, -trusted_free))
            self._set(request_id, plain - more_trusted, trusted + more_trusted)

    def is_turn_of_first(self, slots: int) -> bool:
        """Tell whether the first in the line, which needs so many slots, goes before the shortest."""
        return self.plain > 0 and self._free[0] >= min(slots, self.plain)

    def has_free(self, slots: int) -> bool:
        """Tell whether so many slots are free, of both kinds together, or there are not as many at all."""
        return sum(self._free) >= slots or slots > self._slots

    def has_trusted(self, slots: int) -> bool:
        """Tell whether so many trusted slots are free."""
        return self._free[1] >= slots

    def take(self, request_id: str, slots: int, *, is_first: bool) -> None:
        """Give a request slots. The first in the line gets plain ones as far as they go, others trusted."""
        plain_free, trusted_free = self._free
        plain = min(slots, plain_free) if is_first else max(0, slots - trusted_free)
        self._set(request_id, plain, slots - plain)

    def keep(self, request_id: str, slots: int) -> None:
        """Free all slots of a request but these, its plain ones first. Without slots it is forgotten."""
        _, trusted = self.taken[request_id]
        trusted = min(slots, trusted)
        self._set(request_id, slots - trusted, trusted)

    def _set(self, request_id: str, plain: int, trusted: int) -> None:
        had_plain, had_trusted = self.taken.pop(request_id, (0, 0))
        self._free[0] += had_plain - plain
        self._free[1] += had_trusted - trusted
        if plain or trusted:
            self.taken[request_id] = plain, trusted

    def check(self) -> None:
        """Assert the invariants."""
        plain, trusted = (sum(taken) for taken in zip((0, 0), *self.taken.values()))
        assert self._free == [self.plain - plain, self.trusted - trusted]
        assert min(self._free) >= 0
