"""`mooncake-lite demo`: the command around the story. Exit code 0 when all tokens are identical, 1 when not.

Mounted by `mooncake_lite.cli`, which turns UserError and ClusterError into one line. Imports nothing heavy
before it runs, so that `mooncake-lite --help` stays fast.
"""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mooncake_lite.config.options import OUT_FILE, write_out

if TYPE_CHECKING:
    from rich.console import Console

    from mooncake_lite.tools.demo.report import Row

PLAIN_WIDTH = 100
"""Columns when the output is not a terminal (a log, a pipe): the table fits, and lines stay readable."""


@click.command("demo")
@click.option("--faults", is_flag=True, help="Kill ranks under eight streams, and show how long they pause.")
@click.option("--json", "json_file", type=OUT_FILE, help="Write the rows to FILE.")
def demo(faults: bool, json_file: Path | None) -> None:
    """Measure the same questions cold, from DRAM, from HDF5, on two prefill ranks, and with reuse off."""
    from mooncake_lite.config.progress import wide_console

    console = wide_console(PLAIN_WIDTH)
    # SIGTERM ends the demo as Ctrl-C does: through the code that stops the cluster.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        different, found = (_faults if faults else _questions)(console)
    except KeyboardInterrupt:
        console.print("interrupted; the cluster is stopped")
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    if json_file is not None:
        _write(json_file, found)
    for line in different:
        console.print(line, markup=False, highlight=False)
    click.echo(f"tokens identical: {'no' if different else 'yes'}")
    raise SystemExit(1 if different else 0)


def _questions(console: Console) -> tuple[list[str], dict[str, Any]]:
    """Play the story. Returns a line for each difference, and the result for --json."""
    from mooncake_lite.model.tokenizer import load_tokenizer
    from mooncake_lite.tools.demo.report import differences, speedups, warnings
    from mooncake_lite.tools.demo.story import Story

    def play(model_dir: Path, work_dir: Path) -> list[Row]:
        tokenizer = load_tokenizer(model_dir)
        return Story(console, model_dir, work_dir, lambda text: len(tokenizer.encode(text))).play()

    rows = _played(console, play)
    _conclude(console, rows)
    different = differences(rows)
    found = {"speedup": speedups(rows), "warnings": warnings(rows), "identical": not different}
    return different, {"rows": [row.to_dict() for row in rows], **found}


def _faults(console: Console) -> tuple[list[str], dict[str, Any]]:
    """Play the deaths of ranks. Returns as `_questions` does."""
    from mooncake_lite.tools.demo.faults import play_faults

    played = _played(console, lambda model_dir, work_dir: play_faults(console, model_dir, work_dir))
    console.print()
    console.print(played.table())
    different = [f"after the death of the {name}, an answer differs" for name in played.differing]
    return different, played.to_dict()


Result = TypeVar("Result")


def _played(console: Console, play: Callable[[Path, Path], Result]) -> Result:
    """Get the model, and play with its folder, and with one that is gone afterwards."""
    from mooncake_lite.config.serve import DEFAULT_MODEL
    from mooncake_lite.model.progress import resolve_visibly

    started = time.monotonic()
    model_dir = resolve_visibly(DEFAULT_MODEL, console)
    console.print(
        f"The model: {model_dir} ({time.monotonic() - started:.1f} s)", highlight=False, soft_wrap=True
    )
    with tempfile.TemporaryDirectory(prefix="mooncake-lite-demo-", ignore_cleanup_errors=True) as work_dir:
        return play(model_dir, Path(work_dir))


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


def _write(path: Path, found: dict[str, Any]) -> None:
    from mooncake_lite.config.machine import machine, signed

    write_out("--json", path, json.dumps(signed(machine(), found), indent=1).encode() + b"\n")
