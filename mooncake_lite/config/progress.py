"""How commands show tables and progress: wide where stdout is no terminal, and no bar where stderr is none.

Used by the commands that print tables or take a while. It knows nothing of what they show.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table


def wide_console(columns: int = 150) -> Console:
    """Stdout. Where it is no terminal it has so many columns that a row stays a line."""
    console = Console()
    return console if console.is_terminal else Console(width=columns)


def plain_table(
    *names: str, left: Collection[str] = (), title: str | None = None, no_wrap: bool = False
) -> Table:
    """Make a table without lines. Its columns are right-aligned, as numbers are, but for those in `left`."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=no_wrap)
    return table


@contextmanager
def bar(what: str, total: float | None, *columns: ProgressColumn) -> Iterator[Callable[..., None]]:
    """Show on stderr how far work has come. Gives rich's `Progress.update` of this task.

    columns   what follows the bar; by default the time that remains
    """
    console = Console(stderr=True)
    shown = (TextColumn("{task.description}"), BarColumn(), *(columns or (TimeRemainingColumn(),)))
    with Progress(*shown, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield partial(progress.update, progress.add_task(what, total=total))


@contextmanager
def counted(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show how many of `total` are done. Gives a function to be called once for each."""
    with bar(what, total, MofNCompleteColumn(), TimeRemainingColumn()) as update:
        yield partial(update, advance=1)


@contextmanager
def byte_bar(what: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Show how many bytes are done, and how fast. Gives a function that takes more bytes done."""
    with bar(what, total_bytes, DownloadColumn(), TransferSpeedColumn()) as update:
        yield lambda nbytes: update(advance=nbytes)
