"""Deaths of the conductor in a modelled cluster: the next one starts, and ranks and gateways learn of it.

Used by `world.py`. Explained in docs/explain/failures.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from msgspec.structs import replace

from mooncake_lite.control import ControlConfig
from mooncake_lite.control.events import RankLost
from mooncake_lite.ranks.computing.machine import NewTerm
from mooncake_lite.simulator.clients import Clients
from mooncake_lite.simulator.custody import Custody
from mooncake_lite.simulator.surroundings import Surroundings

MOST_EFFECTS = 12
"""A conductor that is to die carries out up to so many more effects: it may die between any two of them."""

LEARNS_S = 1.0
"""Time in which a rank or a gateway learns that there is a new conductor, at most."""


class World(Surroundings, Protocol):
    """What the death of a conductor needs of its world, too."""

    custody: Custody
    clients: Clients
    ranks: dict[int, Any]

    def begin_conductor(self, config: ControlConfig) -> None:
        """Begin a conductor that knows nothing but its configuration."""


class Conductors:
    """The conductors of one world.

    term    number of the present one
    lost    ranks that it or an earlier one was told to be lost
    _left   effects that it still carries out; None: it goes on
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.term = 0
        self.lost: list[RankLost] = []
        self._left: int | None = None

    def begin_dying(self) -> None:
        """Have the conductor die soon."""
        self._left = self._world.dice.randrange(MOST_EFFECTS)

    def dies(self) -> bool:
        """Tell whether the conductor dies before the next effect."""
        if self._left is None:
            return False
        self._left -= 1
        if self._left >= 0:
            return False
        self._left = None
        return True

    def take_over(self) -> None:
        """Replace the control plane by one that knows nothing but the losses."""
        world = self._world
        self.term += 1
        world.begin_conductor(replace(world.shape.config, term=self.term, lost=self.lost))
        world.custody.take_over()
        for rank, model in world.ranks.items():
            if rank not in world.dead:
                world.clock.after(world.dice.random() * LEARNS_S, partial(self._learn, model.on, self.term))
        seconds = world.dice.random() * LEARNS_S
        world.clock.after(seconds, partial(self._learn, world.clients.take_over, self.term))

    def _learn(self, tell: Callable[[NewTerm], None], term: int) -> None:
        """Tell a rank or the gateway of the present conductor, unless there is a later one by now."""
        if term == self.term and self._world.stopped is None:
            tell(NewTerm(term))
