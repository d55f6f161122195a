"""`mooncake-lite simulate`: the group of everything that is played instead of run.

Mounted by `mooncake_lite.cli`. Explained in docs/explain/eviction.md.
"""

from __future__ import annotations

import click

from mooncake_lite.simulator.cache import cache


@click.group()
def simulate() -> None:
    """Play traces against the policies that serve."""


simulate.add_command(cache)
