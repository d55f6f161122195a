"""Threads whose unexpected end is reported: the one way to start a thread in these packages.

Used by all parts of this package with a thread, by the store's tier, and by the ranks. Knows no transfers.
Explained in docs/explain/transport.md, "When a thread dies".
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

OnFatal = Callable[[str, str], None]
"""Ends the program in order. Called on the dying thread, with (its name, the reason)."""

_log = logging.getLogger(__name__)


def start_thread(
    name: str,
    target: Callable[..., object],
    *args: object,
    on_death: Callable[[str], object] | None = None,
    on_fatal: OnFatal | None = None,
) -> threading.Thread:
    """Start target(*args) on a daemon thread. A target that returns has ended in order; one that raises died.

    on_death    called with the reason, "thread NAME died: ..."; fails the thread's work
    on_fatal    called after on_death; a user's own program gives none, and continues without the thread

    Raises RuntimeError when the process may start no more threads.
    """

    def run() -> None:
        try:
            target(*args)
        except BaseException as error:  # also SystemExit, which would end the thread without a word
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            _log.exception("thread %s died", name)
            if on_death is not None:
                _last_resort(name, lambda: on_death(f"thread {name} died: {why}"))
            if on_fatal is not None:
                _last_resort(name, lambda: on_fatal(name, why))

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _last_resort(name: str, act: Callable[[], object]) -> None:
    """Call a handler and log what it raises, so that the other handler is still called."""
    try:
        act()
    except BaseException:
        _log.exception("a handler of the end of thread %s failed", name)
