"""`mooncake-lite demo`: the command around the story. Exit code 0 when all tokens are identical, 1 when not.

Mounted by `mooncake_lite.cli`, which turns UserError and ClusterError into one line. Imports nothing heavy
before it runs, so that `mooncake-lite --help` stays fast.
"""

from __future__ import annotations

import datetime
import json
import signal
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from mooncake_lite.config.options import OUT_FILE, write_out

if TYPE_CHECKING:
    from rich.console import Console

    from mooncake_lite.tools.demo.report import Row

PLAIN_WIDTH = 100
"""Columns when the output is not a terminal (a log, a pipe): the table fits, and lines stay readable."""


@click.command("demo")
@click.option("--json", "json_file", type=OUT_FILE, help="Write the rows to FILE.")
def demo(json_file: Path | None) -> None:
    """Measure the same questions cold, from DRAM, from HDF5, on two prefill ranks, and with reuse off."""
    from mooncake_lite.config.progress import wide_console
    from mooncake_lite.tools.demo.report import differences

    console = wide_console(PLAIN_WIDTH)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        rows = _play(console)
    except KeyboardInterrupt:
        console.print("interrupted; the cluster is stopped")
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    _conclude(console, rows)
    if json_file is not None:
        _write(json_file, rows)
    different = differences(rows)
    for line in different:
        console.print(line, markup=False, highlight=False)
    click.echo(f"tokens identical: {'no' if different else 'yes'}")
    raise SystemExit(1 if different else 0)


def _play(console: Console) -> list[Row]:
    """Get the model, and play the story in a folder that is gone afterwards."""
    from mooncake_lite.config.serve import DEFAULT_MODEL
    from mooncake_lite.model.progress import console_progress
    from mooncake_lite.model.resolve import resolve_model
    from mooncake_lite.model.tokenizer import load_tokenizer
    from mooncake_lite.tools.demo.story import Story

    started = time.monotonic()
    with console_progress(console) as progress:
        model_dir = resolve_model(DEFAULT_MODEL, progress=progress)
    console.print(
        f"The model: {model_dir} ({time.monotonic() - started:.1f} s)", highlight=False, soft_wrap=True
    )
    tokenizer = load_tokenizer(model_dir)
    with tempfile.TemporaryDirectory(prefix="mooncake-lite-demo-", ignore_cleanup_errors=True) as work_dir:
        return Story(console, model_dir, Path(work_dir), lambda text: len(tokenizer.encode(text))).play()


def _conclude(console: Console, rows: list[Row]) -> None:
    """The table, and what it says."""
    from mooncake_lite.tools.demo.report import speedups, table, warnings

    console.print()
    console.print(table(rows))
    ratio = speedups(rows)
    line = f"the document from DRAM: first token {ratio['dram']:.0f}x sooner than cold"
    console.print(f"{line}; from HDF5: {ratio['hdf5']:.0f}x sooner", highlight=False)
    line = f"two prefill ranks: from the pool {ratio['other_rank']:.0f}x sooner"
    console.print(f"{line}, from own pages {ratio['own_pages']:.0f}x sooner", highlight=False)
    for warning in warnings(rows):
        console.print(f"warning: {warning}", style="yellow", highlight=False)


def _write(path: Path, rows: list[Row]) -> None:
    from mooncake_lite.config.machine import commit, machine
    from mooncake_lite.tools.demo.report import differences, speedups, warnings

    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "commit": commit(),
        "rows": [row.to_dict() for row in rows],
        "speedup": speedups(rows),
        "warnings": warnings(rows),
        "identical": not differences(rows),
    }
    write_out("--json", path, json.dumps(result, indent=1).encode() + b"\n")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the demo as Ctrl-C does: through the code that stops the cluster."""
    raise KeyboardInterrupt
