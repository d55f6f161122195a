"""Transfers between ranks: on one node, and between two (network namespaces of this machine).

Ranks under mpirun run `transport_ranks`, which measures; here they are started and their rows collected.
Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec

from mooncake_lite.config.machine import find_mpirun
from mooncake_lite.launch import namespaces
from mooncake_lite.launch.open_mpi import inspect_open_mpi
from mooncake_lite.launch.ranks_program import run_ranks
from mooncake_lite.tools.bench.result import Row

LIMIT_S = 50.0

ONLY_TCP = ["-x", "UCX_TLS=tcp,self"]
"""UCX would find out that both nodes are one machine, and copy from process to process."""


def run(quick: bool) -> list[Row]:
    """The rows of both. Raises ClusterError when ranks fail.

    Where no namespaces can be made (they need root and iproute2) a note says that its rows are left out.
    """
    speed = "quick" if quick else "full"
    rows = _rows(4, ["near", speed])
    if reason := namespaces.problem():
        click.echo(f"mooncake-lite: note: no rows between two nodes: {reason}", err=True)
        return rows
    folder = tempfile.TemporaryDirectory(prefix="mooncake-lite-nodes-")
    with folder as path, namespaces.two_nodes(Path(path)) as nodes:
        prefix, spread = nodes.on(0), nodes.mpirun_args(1, 1)
        rows += _rows(2, ["far", speed], prefix=prefix, mpirun_args=spread)
        if reason := inspect_open_mpi(find_mpirun()).refusal("fast"):
            click.echo(f"mooncake-lite: note: no rows for one-sided MPI: {reason}", err=True)
            return rows
        spread += ONLY_TCP
        one_sided = ["far", speed, "one_sided"]
        return rows + _rows(2, one_sided, profile="fast", prefix=prefix, mpirun_args=spread)


def _rows(ranks: int, arguments: list[str], **how: Any) -> list[Row]:
    data = run_ranks(ranks, "mooncake_lite.tools.bench.transport_ranks", arguments, LIMIT_S, **how)
    return msgspec.json.decode(data, type=list[Row])
