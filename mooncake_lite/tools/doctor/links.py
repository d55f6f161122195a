"""`mooncake-lite doctor --links`: what every pair of ranks gets from each other, and over which path.

Used by `doctor`. It starts a small MPI job (`links_program.py`) and shows what that measured.
Explained in docs/reference/cli.md.
"""

from __future__ import annotations

import msgspec

from mooncake_lite.errors import ConfigError
from mooncake_lite.launch.mpirun import host_option, parse_hosts, split_words
from mooncake_lite.launch.ranks_program import run_ranks
from mooncake_lite.tools.doctor.links_program import BUDGET_S, Found, Pair

MOST_RANKS = 64
START_S = 40.0
"""For starting and ending the ranks, beside the time in which they measure."""


def measure(ranks: int | None, hosts: str, mpi_arg: tuple[str, ...], profile: str) -> Found:
    """Start the job and return its result.

    ranks    2 unless given; with hosts, as many as they have slots
    profile  of the launch; only "fast" has one-sided MPI between nodes
    Raises ConfigError for bad input, ClusterError when ranks fail.
    """
    places = parse_hosts(hosts)
    slots = sum(count for _, count in places)
    wanted = ranks if ranks is not None else slots or 2
    if not 2 <= wanted <= MOST_RANKS:
        raise ConfigError(f"--ranks {wanted}: a link needs two ends; use 2 to {MOST_RANKS}")
    if places and wanted > slots:
        raise ConfigError(f"--ranks {wanted}: --hosts {hosts} has {slots} slots; write HOST:SLOTS with more")
    arguments = [*host_option(places), *split_words(mpi_arg)]
    module = "mooncake_lite.tools.doctor.links_program"
    data = run_ranks(wanted, module, [], BUDGET_S + START_S, profile=profile, mpirun_args=arguments)
    return msgspec.json.decode(data, type=Found)


def show(found: Found) -> None:
    """The matrix on stdout: a row per reader, a column per source."""
    from rich.text import Text

    from mooncake_lite.config.progress import plain_table, wide_console

    ranks = range(len(found.hosts))
    cells = {(pair.reader, pair.source): pair for pair in found.pairs}
    first = "reader \\ source"
    table = plain_table(first, *(f"rank {rank}\n{found.hosts[rank]}" for rank in ranks), left={first})
    for reader in ranks:
        row = [Text(_cell(cells.get((reader, source)), reader == source)) for source in ranks]
        table.add_row(f"rank {reader} on {found.hosts[reader]}", *row)
    console = wide_console(max(120, 26 * (1 + len(found.hosts))))
    console.print(table)
    console.print("GB/s: reads of 8 MiB; us: reads of 4 KiB; the path that serves, and that of a second try")


def _cell(pair: Pair | None, own: bool) -> str:
    if own:
        return ""
    if pair is None:
        return "not measured"
    if pair.error:
        return f"{pair.path}: failed"
    second = f" ({pair.secondary})" if pair.secondary else ""
    return f"{pair.gb_per_s:.2f} GB/s\n{pair.latency_us:.0f} us\n{pair.path}{second}"
