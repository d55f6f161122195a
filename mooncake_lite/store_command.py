"""`mooncake-lite store`: the group; its commands live in `mooncake_lite.store_tools`.

Mounted by `mooncake_lite.cli`. Explained in docs/reference/cli.md.
"""

from __future__ import annotations

import click

from mooncake_lite.store_tools.master import master


@click.group(name="store")
def store_group() -> None:
    """A store of its own, without a cluster."""


store_group.add_command(master)
