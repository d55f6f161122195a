"""Writes the commands of docs/reference/cli.md from the commands themselves.

Run it when a command or a flag has changed:

    python docs/tools/make_reference.py

A test compares the page with what this would write.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click
from fill_readme import filled

from mooncake_lite.cli import cli

PAGE = Path(__file__).parents[1] / "reference" / "cli.md"


def commands(
    command: click.Command, path: str, context: click.Context
) -> Iterator[tuple[str, click.Command]]:
    """(path, command) of every command below and including this one that does something itself."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        if child is not None and not child.hidden:
            yield from commands(child, f"{path} {name}", context)


def section(path: str, command: click.Command) -> str:
    """One command: its words, its arguments, a table of its options."""
    words = inspect.cleandoc(command.help or "").replace("\b", "").replace("\f", "")
    given = [param for param in command.params if isinstance(param, click.Argument)]
    arguments = [param.make_metavar(click.Context(command)) for param in given]
    lines = [f"## `{' '.join([path, *arguments])}`", "", words, ""]
    options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    if options:
        lines += ["| option | default | what it does |", "|---|---|---|"]
        lines += [row(option, click.Context(command)) for option in options]
        lines.append("")
    return "\n".join(lines)


def row(option: click.Option, context: click.Context) -> str:
    """One option as a row of a table."""
    names = " / ".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag or option.count else f" {option.make_metavar(context)}"
    words, _, told = " ".join((option.help or "").split()).partition(" [default: ")
    shown = told.rstrip("]") or (
        str(option.default) if option.show_default and option.default is not None else ""
    )
    cells = [f"`{names}{value}`", f"`{shown}`" if shown else "", words]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    """The page with every command between its marks."""
    context = click.Context(cli, info_name="mooncake-lite")
    sections = [section(path, command) for path, command in commands(cli, "mooncake-lite", context)]
    return filled(PAGE.read_text(encoding="utf-8"), "commands", "\n".join(sections))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
