"""Links to a conductor that a test plays, for loops of ranks without a cluster."""

from __future__ import annotations

from typing import Any

from mooncake_lite import messages as m
from mooncake_lite.ranks.conductor_link import ConductorLink
from tests.mooncake_lite.conductor.fake_hub import ROLES

DEAD_AFTER_S = 3.0


class Signs:
    """A heart: the number of the latest conductor, and for how long it has been silent."""

    def __init__(self, term: int = 0) -> None:
        self.term, self.silence_s = term, 0.0

    def seconds_since_monitor(self) -> float:
        return self.silence_s


def link_to(spoke: Any, hello: m.RankHello, transfers: Any, signs: Signs | None = None) -> ConductorLink:
    """The link of a rank with what is behind a spoke."""
    heart: Any = signs or Signs(hello.epoch)
    return ConductorLink(spoke, heart, DEAD_AFTER_S, hello, ROLES, transfers)
