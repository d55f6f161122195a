"""Lost ranks, as rank 0 sees them: processes and hearts that have ended, and threads of rank 0 that died.

Made by `assemble.py`, asked by the conductor role in each turn. Explained in
docs/explain/lifecycle.md, "When a rank dies".
"""

from __future__ import annotations

from collections.abc import Callable

from mooncake_lite.control.events import RankLost


class Losses:
    """Keeps the first loss.

    wake    makes the conductor's loop look; any thread may call it
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._lost: list[RankLost] = []

    def on_fatal(self, thread: str, reason: str) -> None:
        """Note that a thread of this process has died. Called on that thread."""
        self._note(RankLost(0, 0, f"failed: thread {thread} died: {reason}"))

    def on_lost(self, name: str, reason: str) -> None:
        """Note that the rank with this name at the monitor is lost. Called on the monitor's thread."""
        self._note(RankLost(int(name.removeprefix("rank-")), 0, f"died: {reason}"))

    def _note(self, lost: RankLost) -> None:
        self._lost.append(lost)
        self._wake()

    def first(self) -> RankLost | None:
        """Return the first loss, if there is one."""
        return self._lost[0] if self._lost else None
