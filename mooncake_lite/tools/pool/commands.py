"""`mooncake-lite store ls|stat|get|pin|unpin|rm|verify|compact`: KV blocks at rest in a tier's folder
(`resting.py`), or live (`live.py`). The group's `master` is another matter (`master.py`).

Mounted by `mooncake_lite.cli`. WHERE is a tier's folder, or names a running cluster, whose blocks in DRAM are
meant. Explained in docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mooncake_lite.errors import UserError
from mooncake_lite.tools.pool.live import LivePool, live_pool, run_folder
from mooncake_lite.tools.pool.master import master

if TYPE_CHECKING:
    from mooncake_lite.tools.pool.resting import RestingPool

WHERE = click.argument("where", type=click.Path(path_type=Path))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("store")
def store() -> None:
    """The KV blocks of a pool: WHERE is "live", or the folder given to --ssd-dir, or one store-<j> in it.

    "live" is the cluster of yours that is running here, and its blocks in DRAM; a run folder names one of
    several. Of a folder, all but rm and compact only read, and may be used while a cluster runs. "master"
    keeps the books of a store without a cluster.
    """


store.add_command(master)


@store.command("ls")
@WHERE
@AS_JSON
def list_command(where: Path, as_json: bool) -> None:
    """List the blocks in WHERE: key, digest, bytes, segment file and row, and whether each is served.

    "removed" was deleted by its key; of a "copy", a younger file holds the block that is served.
    """
    with _pool(where) as pool:
        _show(pool.rows(), as_json)


@store.command("stat")
@WHERE
@AS_JSON
def stat_command(where: Path, as_json: bool) -> None:
    """Sum up each folder in WHERE: files, blocks, bytes, what is broken or dead, and who has it."""
    with _pool(where) as pool:
        _show(pool.figures(), as_json)


@store.command("get")
@WHERE
@click.argument("key")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write to FILE, not to stdout.")
def get_command(where: Path, key: str, out: Path | None) -> None:
    """Write the bytes of the block KEY (16 hexadecimal digits, as ls prints it) to stdout, once verified.

    They are [layers, 2, kv_heads, block_tokens, head_dim], or [layers, 2, kv_heads] units of the cluster's
    --kv-codec; the file's attributes say which and the sizes.
    """
    number = _parse_key(key)
    with _pool(where) as pool:
        data = pool.get(number)
    if out is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    try:
        with open(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}") from None


@store.command("rm")
@WHERE
@click.argument("keys", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All that are not in use.")
@click.option("--force", is_flag=True, help="Live: also blocks that are being read, to the end.")
def remove_command(where: Path, keys: tuple[str, ...], every: bool, force: bool) -> None:
    """Remove the blocks KEYS for good, from DRAM and SSD; all of them, or none when one cannot be.

    What has not been written to SSD yet, or is being written, cannot be removed before it has been.
    """
    if bool(keys) == every:
        raise UserError("name the blocks to be removed, or give --all")
    numbers = sorted(set(map(_parse_key, keys)))
    with _pool(where) as pool:
        count, kept = pool.remove(numbers, force=force)
    click.echo(f"removed {count} blocks" + (f"; {kept} are in use and stay" if kept else ""))


@store.command("pin")
@WHERE
@click.argument("keys", nargs=-1, required=True)
@click.option("--soft", "soft_s", type=float, metavar="SECONDS", help="Only evicted last, for so long.")
def pin_command(where: Path, keys: tuple[str, ...], soft_s: float | None) -> None:
    """Keep the blocks KEYS in the DRAM of the running cluster WHERE: they are not evicted until unpinned.

    For a system prompt, say. A pin is not saved: it ends with its block, at the latest with the cluster.
    """
    if soft_s is not None and not 0 < soft_s < float("inf"):
        raise UserError(f"--soft {soft_s:g}: give seconds, more than 0")
    with live_pool(_running(where)) as pool:
        numbers = sorted(set(map(_parse_key, keys)))
        count = pool.pin(numbers, hard=soft_s is None, soft_s=soft_s or 0.0)
    click.echo(f"pinned {count} blocks" + (f" softly for {soft_s:g} s" if soft_s is not None else ""))


@store.command("unpin")
@WHERE
@click.argument("keys", nargs=-1, required=True)
def unpin_command(where: Path, keys: tuple[str, ...]) -> None:
    """Let the blocks KEYS of the running cluster WHERE be evicted like any other."""
    with live_pool(_running(where)) as pool:
        count = pool.pin(sorted(set(map(_parse_key, keys))))
    click.echo(f"unpinned {count} blocks")


def _running(where: Path) -> Path:
    """The run folder of a running cluster. Raises UserError for files at rest."""
    if running := run_folder(where):
        return running
    raise UserError(f"{where} is no running cluster; blocks are pinned in DRAM: write live in its place")


@store.command("verify")
@WHERE
@AS_JSON
def verify_command(where: Path, as_json: bool) -> int:
    """Read every block in WHERE and compare its checksums; exit code 1 when anything is bad."""
    with _pool(where) as pool:
        rows, is_good = pool.verify()
    _show(rows, as_json)
    return 0 if is_good else 1


@store.command("compact")
@WHERE
def compact_command(where: Path) -> None:
    """Rewrite the files in WHERE that are half dead, and merge small ones; nobody may be using it.

    As at every start, what was not sealed is deleted and what is broken is set aside.
    """
    with _pool(where) as pool:
        rows = pool.compact()
    if rows is None:
        click.echo("every store rank rewrites its tier as soon as it has nothing else to do")
    else:
        _show(rows, as_json=False)


def _pool(where: Path) -> AbstractContextManager[LivePool | RestingPool]:
    """The pool that WHERE means."""
    if running := run_folder(where):
        return live_pool(running)
    from mooncake_lite.tools.pool.resting import resting_pool

    return resting_pool(where)


def _parse_key(text: str) -> int:
    try:
        number = int(text, 16)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 64:
        raise UserError(f"KEY {text!r} is not a key: up to 16 hexadecimal digits, as `store ls` prints them")
    return number


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    """JSON, or a table: numbers to the right."""
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("nothing there")
        return
    from mooncake_lite.config.progress import plain_table, wide_console

    words = [name for name, value in rows[0].items() if not isinstance(value, int)]
    table = plain_table(*rows[0], left=words, no_wrap=True)
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else value for value in row.values()))
    wide_console().print(table)
