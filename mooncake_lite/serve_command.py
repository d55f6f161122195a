"""`mooncake-lite serve`: reads flags and a TOML file into a ServeConfig, then starts a launcher or a rank.

Mounted by `mooncake_lite.cli`. Every field of ServeConfig is a flag. Flags take precedence over the
environment, the environment over the file, and the file over defaults. Explained in docs/reference/cli.md.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from mooncake_lite.config.modes import BY_MODE
from mooncake_lite.config.reading import SIZES, config_from, help_texts, read_toml
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.config.service_classes import TABLES
from mooncake_lite.errors import ConfigError
from mooncake_lite.launch.mpirun import SECRETS
from mooncake_lite.launch.place import world_from_environment


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command one flag per field of ServeConfig; unset ones arrive as None."""
    hints, texts = typing.get_type_hints(ServeConfig), help_texts()
    for field in reversed(fields(ServeConfig)):
        if field.name == "model":
            continue
        command = _option(field.name, hints[field.name], field.default, texts[field.name])(command)
    return command


def _option(
    name: str, hint: Any, default: Any, text: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    flag = "--" + name.replace("_", "-")
    has_default = default not in ("", (), False, BY_MODE)
    text += f"  [default: {_shown(name, default)}]" if has_default else ""
    if isinstance(default, bool):
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)
    if name == "api_key" or name in TABLES:
        metavar = "JSON" if name in TABLES else "KEY"
        return click.option(flag, name, default=None, envvar=SECRETS.get(name), metavar=metavar, help=text)
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
    _refuse_meaningless(values, f"config file {file}")
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    mode = {name: given[name] for name in ("mode",) if name in given}  # which keys fit together depends on it
    config_from({**values, **mode}, f"config file {file}")  # so that its own errors name it
    _refuse_meaningless(given, "flags")
    if model is not None:
        given["model"] = model
    for name in given:
        values.pop(name.replace("_", "-"), None)
    config = config_from({**values, **given}, "flags")
    return _with_absolute_paths(config)


def _refuse_meaningless(values: dict[str, Any], source: str) -> None:
    """Raises ConfigError for an empty name or key, which an unset variable leaves, and for a limit of 0 on
    latency: no request meets it, and it is no way to set none."""
    for raw, value in values.items():
        name = raw.replace("-", "_")
        if name in ("served_model_name", "api_key") and not str(value).strip():
            raise ConfigError(f"{source}: {raw} is empty; give one, or leave it out")
        if name in ("slo_ttft_ms", "slo_tpot_ms") and value == 0:
            raise ConfigError(f"{source}: {name}=0: a limit must be above 0; leave it out for no limit")


def _with_absolute_paths(config: ServeConfig) -> ServeConfig:
    """Ranks may start in another folder than this command."""
    changes: dict[str, Any] = {}
    for name in ("ssd_dir", "record", "trace", "profile"):
        path = getattr(config, name)
        is_name = name == "profile" and os.sep not in path and not Path(path).exists()  # of a shipped one
        if path and not is_name:
            changes[name] = str(Path(path).expanduser().absolute())
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
    help="TOML file with options under the names of the flags. Flags take precedence.",
)
@click.option("--dry-run", is_flag=True, help="Print the mpirun command line and exit.")
def serve(model: str | None, file: Path | None, dry_run: bool, **flags: Any) -> int:
    """Start a cluster: a conductor, ranks that compute or store, and an OpenAI-compatible server.

    MODEL is the name of a pulled model or a Hugging Face folder, by default SmolLM2-135M-Instruct. Outside of
    mpirun the command starts mpirun. Inside mpirun (mpirun -n 4 mooncake-lite serve ...) it becomes a rank.
    SIGTERM and Ctrl-C stop the cluster within 5 s with exit code 0. A second Ctrl-C kills it at once (130).
    If a rank is lost, the others go on; without rank 0 the cluster ends with exit code 1.
    """
    config = build_config(model, flags, file)
    if world_from_environment() is not None and not dry_run:
        from mooncake_lite.rank import run

        return run(config)
    if dry_run:
        from mooncake_lite.config.machine import find_mpirun
        from mooncake_lite.launch import mpirun

        click.echo(mpirun.dry_run(find_mpirun(), config))
        return 0
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # or NumPy starts threads, which spin
    from mooncake_lite.launch.launcher import Launcher
    from mooncake_lite.launch.preflight import preflight

    for warning in preflight(config):
        click.echo(f"mooncake-lite: warning: {warning}", err=True)
    return Launcher(config).run()
