"""Shows a pull in the terminal: a bar for each stage, or a line where there is no terminal.

Used by the commands, and by whatever else resolves a model in front of a user. Explained in
docs/explain/model.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_lite.model import resolve
from mooncake_lite.model.fetch import Progress as Report

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

_LABELS = {
    "download": "downloading the model",
    "check": "checking its sha256",
    "unpack": "unpacking",
    "convert": "converting to float32",
}


def resolve_visibly(model: str | Path, console: Console | None = None) -> Path:
    """Return the folder of a model, as `resolve_model` does, and show a pull. Raises ModelError."""
    with console_progress(console) as progress:
        return resolve.resolve_model(model, progress=progress)


@contextmanager
def console_progress(console: Console | None = None) -> Iterator[Report]:
    """Gives the `progress` argument of `pull` and `resolve_model`; writes to stderr when it is called."""
    reports: list[Report] = []
    with ExitStack() as stack:

        def report(stage: str, done: int, total: int) -> None:
            if not reports:
                reports.append(stack.enter_context(_on_console(console)))
            reports[0](stage, done, total)

        yield report


@contextmanager
def _on_console(console: Console | None) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (TextColumn("{task.description:<24}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(_LABELS.get(stage, stage), total=total)
            bars.update(tasks[stage], completed=done)

        yield report


def _lines(console: Console) -> Report:
    """One line when a stage begins."""
    seen: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        if stage not in seen:
            seen.add(stage)
            console.print(f"{_LABELS.get(stage, stage)} ({total / 1e6:.0f} MB)", highlight=False)

    return report
