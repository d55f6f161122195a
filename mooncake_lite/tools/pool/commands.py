"""`mooncake-lite store ls|stat|get|pin|unpin|rm|verify|compact`: KV blocks at rest in a tier's folder, or
live (`live.py`). The group's `master` is another matter (`master.py`).

Mounted by `mooncake_lite.cli`. WHERE is a tier's folder (`_folders`), or names a running cluster (`live.py`),
whose blocks in DRAM are meant. Explained in docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mooncake_lite.errors import UserError
from mooncake_lite.tools.pool.live import live_pool, run_folder
from mooncake_lite.tools.pool.master import master

if TYPE_CHECKING:
    from mooncake_lite.messages.pool import PoolRow
    from store.tier_at_rest import RestingBlock, RestingFolder

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
    if running := run_folder(where):
        with live_pool(running) as pool:
            _show([_live_row(row) for row in pool.rows()], as_json)
        return
    from store.tier_at_rest import blocks

    with _one_line():
        found = blocks(_folders(where))
    rows = [
        {
            "key": f"{block.key:016x}",
            "digest": f"{int(block.file.digests[block.row]):016x}",
            "bytes": block.file.header.layout.nbytes,
            "file": _name(block.file.path),
            "row": block.row,
            "state": block.state,
        }
        for block in found
    ]
    _show(rows, as_json)


@store.command("stat")
@WHERE
@AS_JSON
def stat_command(where: Path, as_json: bool) -> None:
    """Sum up each folder in WHERE: files, blocks, bytes, what is broken or dead, and who has it."""
    if running := run_folder(where):
        with live_pool(running) as pool:
            _show([{"figure": name, "value": value} for name, value in pool.figures().items()], as_json)
        return
    from store.tier_at_rest import blocks

    with _one_line():
        folders = _folders(where)
    served = [block for block in blocks(folders) if block.state == "served"]
    rows = []
    for folder in folders:
        count = sum(file.header.blocks for file in folder.files)
        live = sum(block.file.path.parent == folder.path for block in served)
        rows.append(
            {
                "folder": str(folder.path),
                "files": len(folder.files),
                "bytes": sum(file.header.file_nbytes for file in folder.files),
                "blocks": live,
                "dead": count - live,
                "models": len({file.header.fingerprint for file in folder.files}),
                "broken": len(folder.broken),
                "set aside": len(folder.set_aside),
                "unsealed": len(folder.unsealed),
                "held by": "" if folder.held_by is None else f"process {folder.held_by or '?'}",
            }
        )
    _show(rows, as_json)


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
    if running := run_folder(where):
        with live_pool(running) as pool:
            data = pool.get(number)
    else:
        data = _resting_block(where, number)
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
    kept = 0
    if running := run_folder(where):
        with live_pool(running) as pool:
            if every:
                count, kept = pool.remove_all(force=force)
            else:
                count = pool.remove(numbers, force=force)
    else:
        count = _remove_resting(where, None if every else numbers)
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
    if running := run_folder(where):
        return _verify_live(running, as_json)
    from store.tier_at_rest import blocks, verify

    with _one_line():
        folders = _folders(where)
    found = [block for block in blocks(folders) if block.state != "removed"]
    rows = {
        file.path: {"file": _name(file.path), "blocks": 0, "bytes": 0, "bad": 0, "problem": ""}
        for folder in folders
        for file in folder.files
    }
    with _progress("verifying", sum(block.file.header.layout.nbytes for block in found)) as advance:
        for block, problem in verify(found):
            _count(rows[block.file.path], block, problem)
            advance(block.file.header.layout.nbytes)
    for folder in folders:
        for path, reason in folder.broken:
            rows[path] = {"file": _name(path), "blocks": 0, "bytes": 0, "bad": 0, "problem": reason}
    _show(list(rows.values()), as_json)
    return int(any(row["problem"] for row in rows.values()))


@store.command("compact")
@WHERE
def compact_command(where: Path) -> None:
    """Rewrite the files in WHERE that are half dead, and merge small ones; nobody may be using it.

    As at every start, what was not sealed is deleted and what is broken is set aside.
    """
    if running := run_folder(where):
        with live_pool(running) as pool:
            pool.compact()
        click.echo("every store rank rewrites its tier as soon as it has nothing else to do")
        return
    from store.tier_at_rest import compact

    with _one_line():
        before = _unused(where)
        with _progress("compacting", None) as advance:
            for folder in before:
                compact(folder.path, advance)
        after = _folders(where)
    rows = []
    for old, new in zip(before, after):
        row: dict[str, Any] = {"folder": str(old.path)}
        for name, folder in (("before", old), ("after", new)):
            row[f"files {name}"] = len(folder.files)
            row[f"bytes {name}"] = sum(file.header.file_nbytes for file in folder.files)
        rows.append(row)
    _show(rows, as_json=False)


def _folders(where: Path) -> list[RestingFolder]:
    """Everything at rest in WHERE. Raises TierFolderError."""
    from store.tier_at_rest import find_folders, look

    return [look(folder) for folder in find_folders(where)]


def _resting_block(where: Path, number: int) -> bytes:
    from store.tier_at_rest import blocks, read_block

    with _one_line():
        found = [b for b in blocks(_folders(where)) if b.key == number and b.state == "served"]
        if not found:
            raise UserError(f"{where} holds no block {number:016x}; `mooncake-lite store ls` lists its keys")
        return read_block(found[-1])


def _remove_resting(where: Path, numbers: list[int] | None) -> int:
    """Out of the folders in WHERE, which nobody may be using; None: all that they serve."""
    from store.tier_at_rest import blocks, remove

    with _one_line():
        folders = _unused(where)
        there = {block.key for block in blocks(folders) if block.state == "served"}
        wanted = there if numbers is None else set(numbers)
        if missing := wanted - there:
            raise UserError(
                f"{where} holds no block {min(missing):016x}; `mooncake-lite store ls` lists its keys"
            )
        for folder in folders:
            remove(folder.path, wanted)
    return len(wanted)


def _unused(where: Path) -> list[RestingFolder]:
    """Everything at rest in WHERE. Raises TierInUse, TierFolderError."""
    from store.errors import TierInUse

    folders = _folders(where)
    for folder in folders:
        if folder.held_by is not None:
            raise TierInUse(folder.path, folder.held_by)
    return folders


def _live_row(row: PoolRow) -> dict[str, Any]:
    return {
        "key": f"{row.key:016x}", "tier": row.tier, "rank": row.rank, "bytes": row.nbytes, "state": row.state
    }  # fmt: skip


def _verify_live(running: Path, as_json: bool) -> int:
    with live_pool(running) as pool, _progress("verifying", None) as advance:
        count, bad = pool.verify(advance)
    _show([{"blocks": count, "bad": len(bad)}] if not bad else [_live_row(row) for row in bad], as_json)
    return int(bool(bad))


def _parse_key(text: str) -> int:
    try:
        number = int(text, 16)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 64:
        raise UserError(f"KEY {text!r} is not a key: up to 16 hexadecimal digits, as `store ls` prints them")
    return number


def _name(path: Path) -> str:
    """A segment file, and the folder that it is numbered in."""
    return f"{path.parent.name}/{path.name}"


def _count(row: dict[str, Any], block: RestingBlock, problem: str) -> None:
    row["blocks"] += 1
    row["bytes"] += block.file.header.layout.nbytes
    row["bad"] += bool(problem)
    row["problem"] = row["problem"] or problem


@contextmanager
def _one_line() -> Iterator[None]:
    """What the store complains of is the user's to know: one line, exit code 2."""
    from store.errors import StoreError

    try:
        yield
    except StoreError as error:
        raise UserError(str(error)) from None


@contextmanager
def _progress(what: str, total_bytes: int | None) -> Iterator[Any]:
    """A bar; gives a function that takes more bytes done."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    from mooncake_lite.config.progress import bar

    with bar(what, total_bytes, DownloadColumn(), TransferSpeedColumn()) as update:
        yield lambda nbytes: update(advance=nbytes)


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    """JSON, or a table: numbers to the right."""
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("nothing there")
        return
    from rich.table import Table

    from mooncake_lite.config.progress import wide_console

    table = Table(box=None, pad_edge=False)
    for name, value in rows[0].items():
        table.add_column(name, justify="right" if isinstance(value, int) else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else value for value in row.values()))
    wide_console().print(table)
