"""The link of a working rank with the conductor: all that a rank says and hears whatever its role.

Made by `assemble.py`; used by the loops of computing ranks, of later stages of a pipeline and of store ranks,
each from its one thread. Imports nothing heavy: a store rank never loads torch. See docs/explain/failures.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from mooncake_lite import messages as m
from mooncake_lite.launch.rank_process import STOP_EXTRA_S
from mooncake_lite.launch.verdict import STEWARD
from mooncake_lite.ranks.metrics import REPORT_EVERY_S, rank_stats
from transport.channel import Spoke
from transport.engine import TransferEngine
from transport.errors import WireError
from transport.membership import Heart


class ConductorLink:
    """What a rank and the conductor say to each other whatever the rank's role.

    heart    its term is the number of the latest conductor; dead_after_s: of silence, then it is gone
    hello    of this rank, with the number of the conductor that it has joined already (0 at the start)
    roles    of all ranks, by number

    term, epoch   numbers of the conductor that the link leads to, and of the one that this rank has joined
    stop          the first Stop message; may_leave: the second one has arrived too
    """

    def __init__(
        self,
        spoke: Spoke,
        heart: Heart,
        dead_after_s: float,
        hello: m.RankHello,
        roles: Sequence[str],
        transfers: TransferEngine,
    ) -> None:
        self._spoke, self._heart, self._dead_after_s = spoke, heart, dead_after_s
        self.hello, self._roles, self._transfers = hello, roles, transfers
        self.term = self.epoch = hello.epoch
        self.stop: m.Stop | None = None
        self.may_leave = False
        self._reported_at = 0.0

    # ------------------------------------------------------------------------------ conductors

    def new_term(self) -> int:
        """Connect to a new conductor; what waits for the one before is lost. Returns its number, once; 0
        without one."""
        if self._heart.term == self.term:
            return 0
        self.term = self._heart.term
        self._spoke.renew()
        return self.term

    @property
    def may_join(self) -> bool:
        """Tell whether there is a conductor that this rank has not joined. A rank joins it once no transfer
        is under way that an earlier one wanted: it may give the places away."""
        return self.epoch != self.term

    def join(self) -> None:
        """Say hello to the conductor. The machine of a computing rank says it to later ones by itself."""
        self.epoch = self.term
        self.send(replace(self.hello, epoch=self.epoch))

    def sender(self) -> tuple[int, int]:
        """Return the first fields of what a rank reports: its number, and that of its conductor."""
        return self.hello.rank, self.epoch

    # ------------------------------------------------------------------------------ messages

    def receive(self, wait_s: float) -> Iterator[Any]:
        """Yield the conductor's messages. Waits wait_s at most.

        Stop is noted and not yielded. Before a MarkLost is, transfers with that rank fail.
        """
        for message in self._spoke.receive(wait_s):
            if isinstance(message, m.Stop):
                self.may_leave = self.stop is not None  # the second one; the first says why
                self.stop = self.stop or message
                continue
            if isinstance(message, m.MarkLost):
                self._transfers.mark_lost(message.rank, message.reason)
            yield message

    def wake(self) -> None:
        """End the wait for messages. Any thread may call it."""
        self._spoke.wake()

    def send(self, message: m.Message) -> None:
        """Send a message. If what is found for a request is too large, that request fails, alone.

        Raises WireError for other messages that are too large.
        """
        try:
            self._spoke.send(message)
        except WireError as error:
            failure = _failure(message, str(error))
            if failure is None:
                raise
            self._spoke.send(failure)

    def report_when_due(
        self, values: Callable[[], dict[str, float]], reused: Mapping[str, int] | None = None
    ) -> bool:
        """Send the metrics of this rank every REPORT_EVERY_S. Returns whether it did.

        values, reused   as for `rank_stats`
        """
        now = time.monotonic()
        if now - self._reported_at < REPORT_EVERY_S:
            return False
        self._reported_at = now
        self.send(rank_stats(self.hello.rank, self._roles, values(), self._transfers, reused))
        return True

    # ------------------------------------------------------------------------------ the end

    @property
    def is_gone(self) -> bool:
        """Tell whether the conductor is gone, and no other one comes."""
        return self._heart.seconds_since_monitor() > self._dead_after_s

    @property
    def stopping(self) -> bool:
        """Tell whether the rank must end: a Stop has arrived, or the conductor is gone."""
        return self.stop is not None or self.is_gone

    @property
    def reason(self) -> str:
        """Return why the rank ends."""
        silence = f"{STEWARD} gave no sign of life for {self._heart.seconds_since_monitor():.1f} s"
        return self.stop.reason if self.stop is not None else silence

    def leave(self, stop: m.Stop, dropped: int) -> None:
        """Report that this rank has flushed. Returns when all others have, or after the grace.

        dropped   blocks that could not be saved
        """
        self.send(m.Stopped(dropped))
        deadline = time.monotonic() + stop.grace_s + 2 * STOP_EXTRA_S
        while not self.may_leave and time.monotonic() < deadline and not self.is_gone:
            self.may_leave = any(isinstance(one, m.Stop) for one in self._spoke.receive(0.2))


def _failure(message: m.Message, problem: str) -> m.Message | None:
    """Return what is said of a request in place of what was found for it; None for other messages."""
    if isinstance(message, m.BlocksLoaded):
        count = len(message.ok)
        return replace(message, ok=[False] * count, checksums=[[]] * count, seconds=0.0, problem=problem)
    event: Any = message.event if isinstance(message, m.Report) else None
    if request_id := getattr(event, "request_id", ""):
        return m.RequestFailed(event.rank, event.epoch, request_id, event.attempt, problem)
    return None
