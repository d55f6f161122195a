"""Types of command-line options that several commands have, and the files that they name.

Used by commands. Knows none of them. Explained in docs/reference/cli.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mooncake_lite.config.files import replace_file
from mooncake_lite.config.reading import parse_bytes
from mooncake_lite.errors import ConfigError


class NumberRange(click.FloatRange):
    """click's range of numbers, to which everything but a number belongs: it lets nan pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Fails for what is none, and outside of the range."""
        number = float(super().convert(value, param, ctx))
        if number != number:
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


class Bytes(click.ParamType):
    """A size, as 1TB or 320GiB."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes. Fails for what is no size."""
        try:
            return parse_bytes(value, param.opts[0] if param is not None else "size")
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class OutFile(click.Path):
    """A file that a command writes at its end. What can be known of it is checked before any work is done."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path. Fails for a folder, in a folder that does not exist, and for a name that cannot be."""
        path = Path(value)
        try:
            is_folder = path.is_dir()
        except OSError as error:
            self.fail(f"{path} cannot be written: {error.strerror}", param, ctx)
        if is_folder:
            self.fail(f"{path} is a folder; name a file", param, ctx)
        if not path.absolute().parent.is_dir():
            self.fail(f"the folder {path.absolute().parent} does not exist; make it first", param, ctx)
        return path


URL = click.option(
    "--url", default="http://127.0.0.1:8000", show_default=True, help="Where the server listens."
)
API_KEY = click.option(
    "--api-key", envvar="MOONCAKE_LITE_API_KEY", default=None, help="Also MOONCAKE_LITE_API_KEY."
)
OUT_FILE = OutFile(dir_okay=False, path_type=Path)

Command = Callable[..., None]


def with_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds these options to a command, in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def write_out(option: str, path: Path, content: bytes) -> None:
    """Write all of the file of an option or nothing, whatever interrupts; follow a link, write to a pipe.

    Raises ConfigError, which names the option.
    """
    file = Path(os.path.realpath(path))
    try:
        if file.exists() and not file.is_file():
            file.write_bytes(content)
        else:
            replace_file(file, content)
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}") from None
