"""Lost ranks, as rank 0 sees them: processes and hearts that have ended, and threads of rank 0 that died.

Made by `assemble.py`, asked by the conductor role in each turn. Explained in docs/explain/failures.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mooncake_lite.control.events import RankLost


class Losses:
    """Keeps losses until the conductor takes them.

    wake    makes the conductor's loop look; any thread may call it
    end     kills a rank by its name at the monitor, for a reason
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._lost: deque[RankLost] = deque()
        self.end: Callable[[str, str], object] = lambda name, reason: None

    def on_fatal(self, thread: str, reason: str) -> None:
        """Note that a thread of this process has died. Called on that thread."""
        self._note(RankLost(0, 0, f"failed: thread {thread} died: {reason}"))

    def on_lost(self, name: str, reason: str, ended: bool) -> None:
        """Note that the rank with this name at the monitor is lost. Called on the monitor's thread."""
        why = reason if reason.startswith("failed: ") else f"died: {reason}"
        self._note(RankLost(int(name.removeprefix("rank-")), 0, why, ended))

    def end_rank(self, rank: int, reason: str) -> None:
        """Have a rank killed that does not do what it should. It is reported lost when it has ended."""
        self.end(f"rank-{rank}", f"failed: {reason.removeprefix('failed: ')}")

    def take(self) -> RankLost | None:
        """Return the next loss, once."""
        return self._lost.popleft() if self._lost else None

    def _note(self, lost: RankLost) -> None:
        self._lost.append(lost)
        self._wake()
