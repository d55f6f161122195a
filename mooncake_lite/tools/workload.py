"""`mooncake-lite workload`: describes a trace, bounds what serves it, and writes traces.

Mounted by `mooncake_lite.cli`. Explained in docs/how-to/replay-a-trace.md.
"""

from __future__ import annotations

import click

from mooncake_lite.planner.bounds_command import bounds
from mooncake_lite.tools.workload_make import convert, make, merge
from mooncake_lite.tools.workload_stats_command import stats


@click.group()
def workload() -> None:
    """Describe, make, convert and merge traces. What is written has Mooncake's form: JSON lines."""


for command in (stats, bounds, make, convert, merge):
    workload.add_command(command)
