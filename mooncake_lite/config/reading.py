"""Makes a ServeConfig of what users write: flags, a TOML file, sizes with units.

Used by `serve_command`, by the launcher and by whatever reads a configuration again. Explained in
docs/reference/cli.md.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mooncake_lite.config.modes import BY_MODE, ROLES
from mooncake_lite.config.plain_text import plain_text
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.config.service_classes import TABLES, hint
from mooncake_lite.errors import ConfigError

T = TypeVar("T")

SIZES = ("pool_bytes", "lend_bytes", "ssd_bytes", "kv_cache_bytes", "staging_bytes")

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_bytes(text: str | int, name: str = "size") -> int:
    """Bytes of "512MiB", "1 GB", "4096" or 4096.

    Raises ConfigError when the number or the unit is not understood, or the size is negative.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        number, unit = str(text), ""
    else:
        stripped = str(text).strip()
        number = stripped.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
        unit = stripped[len(number) :].strip().upper()
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"{name}={text!r} is not a size; write bytes or 512MiB, 2GB, ...") from None
    if size < 0:
        raise ConfigError(f"{name}={text!r} is negative")
    return size


def read_private(path: Path, kind: type[T]) -> T:
    """Return what a JSON file that holds secrets says.

    Raises ConfigError when the file is missing, open to others than its owner, or malformed.
    """
    try:
        mode, raw = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(f"{path} holds secrets and has mode {mode & 0o777:o}; it must be 600")
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is malformed: {error}") from None


def help_texts() -> dict[str, str]:
    """What each field means, by name, from the docstring of ServeConfig."""
    found = re.findall(r"^(\w+): (.+(?:\n +.+)*)", inspect.getdoc(ServeConfig) or "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def config_from(values: dict[str, Any], source: str) -> ServeConfig:
    """A ServeConfig from plain values; `source` is named in errors.

    Raises ConfigError for an unknown key, a wrong type or a value out of range.
    """
    known = {field.name: field for field in fields(ServeConfig)}
    checked: dict[str, Any] = {}
    for raw, value in values.items():
        name = raw.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{source}: {_unknown(raw, value, sorted(known))}")
        default = known[name].default
        if name in SIZES:
            value = parse_bytes(value, name)
        elif name in TABLES and isinstance(value, dict):
            value = json.dumps(value, default=str)
        elif name == "mpi_arg":
            if not (isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)):
                raise ConfigError(f"{source}: mpi_arg must be a list of strings, not {value!r}")
            value = tuple(value)
        elif isinstance(default, float) and type(value) is int:
            value = float(value)
        elif type(value) is not type(default):
            wanted = type(default).__name__
            raise ConfigError(f"{source}: {name}={value!r} must be of type {wanted}")
        elif name in ROLES and value == BY_MODE:
            raise ConfigError(f"{source}: {name}={value}: give a number of ranks, or leave it out")
        checked[name] = value
    return ServeConfig(**checked)


def _shown(name: str, value: Any) -> str:
    return f"table [{name}]" if isinstance(value, dict) else f"key {name!r}"


def _unknown(name: str, value: Any, known: list[str]) -> str:
    if isinstance(value, dict):
        near = difflib.get_close_matches(name, TABLES, n=1)
        fix = (
            f"did you mean [{near[0]}.NAME]?" if near else "write the keys without a table, or under [serve]"
        )
    else:
        fix = hint(name.replace("-", "_"), known)
    return f"unknown {_shown(name, value)}; {fix}"


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a configuration file: all of them flat, or all but the tables of TABLES under [serve].

    Raises ConfigError when the file is missing, is not TOML, or has keys in both places.
    """
    try:
        data = tomllib.loads(plain_text(path.read_bytes()).decode())
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not TOML: {error}") from None
    if "serve" not in data:
        return data
    table = data.pop("serve")
    if not isinstance(table, dict):
        raise ConfigError(f"config file {path}: serve={table!r} must be a table; write [serve]")
    table |= {name: data.pop(name) for name in TABLES if name in data and name not in table}
    if data:
        outside = ", ".join(_shown(name, value) for name, value in data.items())
        raise ConfigError(
            f"config file {path}: {outside} beside the table [serve] would be ignored; "
            "write all keys in this table"
        )
    return table
