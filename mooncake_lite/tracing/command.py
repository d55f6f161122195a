"""`mooncake-lite join-trace FILE`: makes a trace of the parts that a killed run has left.

Mounted by `mooncake_lite.cli`. Explained in docs/how-to/trace.md.
"""

from __future__ import annotations

from pathlib import Path

import click

from mooncake_lite.tracing.merge import merge


@click.command("join-trace")
@click.argument("file", type=click.Path(path_type=Path))
def command(file: Path) -> int:
    """Join the parts of a trace, FILE.parts, after a run of `serve --trace FILE` was killed.

    A run that ends by itself does this at its end.
    """
    done = merge(file)
    click.echo(f"trace of {done.parts} processes: {file} ({done.nbytes / 1e6:,.1f} MB)")
    if done.torn:
        click.echo(f"{done.torn} of them ended in the middle of an event, which was left out")
    return 0
