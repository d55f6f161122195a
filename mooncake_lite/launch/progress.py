"""What the user sees while ranks start and run: a moving line in a terminal, plain lines elsewhere.

Called by the launcher only. It may not decide anything. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.launch.run_dir import RankState

if TYPE_CHECKING:
    from rich.status import Status


class Progress:
    """Shows the state of starting ranks on stderr; everything else passes through `line`."""

    def __init__(self, config: ServeConfig):
        self._config = config
        self._shown: dict[int, str] = {}
        self._status: Status | None = None
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status("starting mpirun")
            self._status.start()

    def show(self, states: dict[int, RankState]) -> None:
        """Tell what has changed since the last call."""
        for rank, state in states.items():
            text = state.reason if state.state == "starting" else state.state
            if self._shown.get(rank) == text:
                continue
            self._shown[rank] = text
            if self._status is None and text:
                self.line(f"{state.name}: {text}")
        if self._status is not None:
            self._status.update(self._summary())

    def _summary(self) -> str:
        """ "2 of 4 ranks ready; prefill-1 compiling kernels 2 of 7: ..., decode-2 loading the model"."""
        busy = [
            f"{self._config.role_of(rank)}-{rank} {text}"
            for rank, text in sorted(self._shown.items())
            if text != "ready"
        ]
        ready = sum(text == "ready" for text in self._shown.values())
        return f"{ready} of {self._config.ranks} ranks ready" + (f"; {', '.join(busy)}" if busy else "")

    def line(self, text: str) -> None:
        """Print a line above the moving one."""
        if self._status is not None:
            self._status.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """End the moving line; may be called twice."""
        if self._status is not None:
            self._status.stop()
            self._status = None
