"""`mooncake-lite serve`: flags and a TOML file into a ServeConfig, then a launcher or a rank.

Mounted by `mooncake_lite.cli`. Every field of ServeConfig is a flag; a flag wins over the environment,
the environment over the file, the file over the default. Explained in docs/reference/cli.md.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from mooncake_lite.config import ServeConfig, config_from, read_toml
from mooncake_lite.launch.mpirun import SECRET
from mooncake_lite.launch.place import world_from_environment

HELP: dict[str, str] = {
    "served_model_name": "Id under which the model answers; by default its folder's name.",
    "dtype": "Of weights and KV. bfloat16 is correct on CPUs, not fast.",
    "device": "cpu, or cuda for the ranks that compute.",
    "weights": "published: the default model's 4- and 8-bit GGUF blocks, never unpacked as a whole; float32: "
    "what was made of them; auto: blocks in decode and float32 in prefill, each where it is faster.",
    "host": "Address of the HTTP server.",
    "port": "Port of the HTTP server.",
    "api_key": f"Key that clients must send. Better set {SECRET}: a flag can be read by every user here.",
    "prefill": "Ranks that compute prompts.",
    "decode": "Ranks that generate.",
    "store": "Ranks that lend DRAM to the KVCache pool, and keep the HDF5 tier.",
    "profile": "ft survives a killed rank; fast uses UCX, for RDMA fabrics.",
    "hosts": "Hosts and their slots for mpirun, as a:2,b:2.",
    "control_host": "Address at which other hosts reach the conductor.",
    "mpi_arg": "More words for mpirun, as '--mca NAME VALUE'. May be repeated.",
    "pool_bytes": "DRAM of one store rank, in /dev/shm, as 512MiB.",
    "lend_bytes": "DRAM that each prefill and decode rank lends to the pool as well; none by default.",
    "ssd_dir": "Folder of the HDF5 tier; no tier without it.",
    "ssd_bytes": "Capacity of one store rank's tier.",
    "block_size": "Tokens of one pool block; divides 512.",
    "kv_codec": "How blocks are encoded in the pool and on SSD; int8 takes a quarter of float32.",
    "eviction": "Policy that chooses what leaves the pool's DRAM: lru, lfu, arc, s3fifo, ... [+second-hit].",
    "copy_cold_s": "A hot block's copy on another node leaves first when it was not read for so long.",
    "kv_cache_bytes": "KV pages of one prefill or decode rank.",
    "staging_bytes": "Shared memory through which one of them moves KV.",
    "max_model_len": "Tokens of prompt and answer together; 0 takes the model's own.",
    "max_num_seqs": "Sequences that one decode rank runs at once.",
    "max_num_batched_tokens": "Prompt tokens that a prefill rank computes in one pass.",
    "max_queue": "Requests that may wait; one more is refused with 429.",
    "enable_prefix_caching": "Reuse the KV of prefixes seen before.",
    "kv_events_config": "JSON, as vLLM's: publish what the pool stores and removes.",
    "threads": "Of each rank that computes; 0 follows cores and ranks (see doctor).",
    "dead_after_s": "Silence after which a rank counts as dead.",
    "start_timeout_s": "Limit for starting up.",
}

SIZES = ("pool_bytes", "lend_bytes", "ssd_bytes", "kv_cache_bytes", "staging_bytes")


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command one flag per field of ServeConfig; unset ones arrive as None."""
    hints = typing.get_type_hints(ServeConfig)
    for field in reversed(fields(ServeConfig)):
        if field.name == "model":
            continue
        command = _option(field.name, hints[field.name], field.default)(command)
    return command


def _option(name: str, hint: Any, default: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    flag = "--" + name.replace("_", "-")
    text = HELP[name] + ("" if default in ("", (), False) else f"  [default: {_shown(name, default)}]")
    if isinstance(default, bool):
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)
    if name == "api_key":
        return click.option(flag, name, default=None, envvar=SECRET, metavar="KEY", help=text)
    if name == "mpi_arg":
        return click.option(flag, name, multiple=True, metavar="WORDS", help=text)
    if name in SIZES:
        return click.option(flag, name, default=None, metavar="SIZE", help=text)
    if typing.get_origin(hint) is typing.Literal:
        return click.option(flag, name, default=None, type=click.Choice(typing.get_args(hint)), help=text)
    return click.option(flag, name, default=None, type=type(default), help=text)


def _shown(name: str, default: Any) -> str:
    return f"{default >> 20}MiB" if name in SIZES else str(default).lower()


def build_config(model: str | None, flags: dict[str, Any], file: Path | None) -> ServeConfig:
    """The configuration of flags over a file over defaults.

    Raises ConfigError for an unknown key, a wrong type or a value out of range.
    """
    values = read_toml(file) if file else {}
    config_from(values, f"config file {file}")  # so that its own errors name it
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    if model is not None:
        given["model"] = model
    for name in given:
        values.pop(name.replace("_", "-"), None)
    config = config_from({**values, **given}, "flags")
    return _with_absolute_paths(config)


def _with_absolute_paths(config: ServeConfig) -> ServeConfig:
    """Ranks may start in another folder than this command."""
    changes: dict[str, Any] = {}
    if config.ssd_dir:
        changes["ssd_dir"] = str(Path(config.ssd_dir).expanduser().absolute())
    if os.sep in config.model or config.model in (".", ".."):
        changes["model"] = str(Path(config.model).expanduser().absolute())
    return config_from({**config.to_dict(), **changes}, "flags") if changes else config


@click.command()
@click.argument("model", required=False)
@options
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    help="TOML file with the same names as the flags; a flag wins over it.",
)
@click.option("--dry-run", is_flag=True, help="Print the mpirun line and end.")
@click.option(
    "--restart",
    is_flag=True,
    help="Say that this comes back on the tier of --ssd-dir, as every start with the same folder does.",
)
def serve(model: str | None, file: Path | None, dry_run: bool, restart: bool, **flags: Any) -> int:
    """Start a cluster: conductor, prefill, decode and store ranks, and an OpenAI-compatible server.

    MODEL is a pulled model's name or a Hugging Face folder; SmolLM2-135M-Instruct by default. Outside of
    mpirun this starts mpirun itself; inside of it (mpirun -n 4 mooncake-lite serve ...) it is a rank.
    SIGTERM and Ctrl-C stop everything within 5 s, exit code 0; a second Ctrl-C kills at once (130).
    """
    config = build_config(model, flags, file)
    if restart and not config.ssd_dir:
        raise click.UsageError("--restart needs --ssd-dir, the folder to come back on")
    if world_from_environment() is not None and not dry_run:
        from mooncake_lite.roles.rank import run

        return run(config)
    if dry_run:
        return _print_line(config)
    from mooncake_lite.launch.launcher import Launcher
    from mooncake_lite.launch.preflight import preflight

    for note in preflight(config):
        click.echo(f"mooncake-lite: note: {note}", err=True)
    return Launcher(config).run()


def _print_line(config: ServeConfig) -> int:
    from mooncake_lite.launch.machine import find_mpirun
    from mooncake_lite.launch.mpirun import dry_run

    click.echo(dry_run(find_mpirun(), config))
    return 0
