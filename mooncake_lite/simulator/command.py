"""`mooncake-lite simulate`: the group of everything that is played instead of run.

Mounted by `mooncake_lite.cli`. Explained in docs/explain/eviction.md and
docs/explain/experiments.md.
"""

from __future__ import annotations

import click

from mooncake_lite.simulator.cache import cache
from mooncake_lite.simulator.cluster_command import cluster
from mooncake_lite.simulator.experiment_commands import admission, policies
from mooncake_lite.simulator.sweep_command import sweep


@click.group()
def simulate() -> None:
    """Play traces and made requests against the policies that serve."""


for command in (cluster, sweep, cache, policies, admission):
    simulate.add_command(command)
