"""The link of a computing rank with the gateway, which its tokens go to straight, over ZeroMQ.

Made by `ranks.assemble`, used by `loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from mooncake_lite.messages import GatewayAt, Message
from transport.channel import Spoke


class GatewayLink:
    """A connection to the gateway that lives.

    connect   connects to a gateway's token endpoint
    """

    def __init__(self, connect: Callable[[str], Spoke]) -> None:
        self._connect = connect
        self._spokes: dict[str, Spoke] = {}  # to the one that lives, by name

    def meet(self, at: GatewayAt) -> None:
        """Connect to the gateway that lives. An earlier one has died, and what waits for it is lost."""
        if at.gateway in self._spokes:
            return
        for spoke in self._spokes.values():
            spoke.renew()  # otherwise close() would try to deliver that first
            spoke.close()
        self._spokes = {at.gateway: self._connect(at.endpoint)}

    def send(self, gateway: str, message: Message) -> bool:
        """Send to the gateway that lives. False for an earlier one: its clients are gone."""
        if gateway not in self._spokes:
            return False
        self._spokes[gateway].send(message)
        return True

    def close(self) -> None:
        """Deliver what waits, and close the connection."""
        for spoke in self._spokes.values():
            spoke.close()
