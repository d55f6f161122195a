"""A hub without sockets, and a conductor role behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mooncake_lite import messages as m
from mooncake_lite.conductor.loop import ConductorRole
from mooncake_lite.conductor.settings import control_config
from mooncake_lite.config.serve import ServeConfig
from store.layout import BlockLayout
from tests.mooncake_lite.conductor.wording import kind
from transport.channel import Hub
from transport.errors import WireError
from transport.wire import DEFAULT_MAX_BYTES, Decoder, encode

ROLES = ["steward", "prefill", "decode", "store", "store"]
"""Of the ranks in these tests."""


class Counters:
    def as_dict(self) -> dict[str, int]:
        return {"messages_sent": 1}


class FakeHub:
    """Keeps what was sent, in `held` what store ranks are to remember, and apart what the steward was told.

    Every message must survive its own encoding.
    """

    def __init__(self) -> None:
        self.sent: list[tuple[str, m.Message]] = []
        self.held: list[tuple[str, m.Message]] = []
        self.to_steward: list[m.Message] = []
        self.counters = Counters()
        self.unreachable: set[str] = set()
        self.too_large: type[m.Message] | None = None
        self.max_bytes = DEFAULT_MAX_BYTES

    def send(self, peer: str, message: m.Message) -> bool:
        if self.too_large is kind(message):
            raise WireError(f"{kind(message).__name__} is too large")
        Decoder(type(message)).decode(encode(message, self.max_bytes))
        if peer == "steward":
            self.to_steward.append(message)
            return True
        (self.held if isinstance(message, m.HoldBlocks) else self.sent).append((peer, message))
        return peer not in self.unreachable

    @property
    def killed(self) -> list[tuple[int, str]]:
        """The ranks that the steward is to kill, and why."""
        return [(one.rank, one.reason) for one in self.to_steward if isinstance(one, m.EndRank)]


def new_role(
    config: ServeConfig,
    layout: BlockLayout,
    hub: FakeHub | Hub,
    *,
    nodes: Sequence[int] = (),
    clock: Callable[[], float] = time.monotonic,
    **more: Any,
) -> ConductorRole:
    """A conductor of the configured ranks, all of them on one node unless said otherwise.

    more   for the configuration of its control plane
    """
    at = list(nodes) or [0] * config.ranks
    decides = control_config(config, layout, at, **more)
    return ConductorRole(config, hub, decides, clock=clock)  # type: ignore[arg-type]


class Playable:
    """What a test tells a conductor role. A class that inherits makes the role and its hub."""

    hub: FakeHub
    role: ConductorRole

    def tell(self, peer: str, message: m.Message) -> list[Any]:
        """Deliver one message; what was sent because of it. The books are checked every time."""
        before = len(self.hub.sent)
        self.role.step([(peer, message)])
        self.role.control.check()
        return [sent for _, sent in self.hub.sent[before:]]
