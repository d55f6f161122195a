"""A bar on stderr for work that takes minutes. Nothing where stderr is no terminal.

Used by `bench.predictions`, `bench.goodput` and `simulator.experiment_commands`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def counted(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show how many of `total` are done. Gives a function to be called once for each."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
