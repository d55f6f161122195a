"""`mooncake-lite cluster status`: whether a cluster serves, what does not work in it, and its ranks.

Mounted by `mooncake_lite.cli`. Asks /health and /metrics once. Explained in docs/how-to/survive-failures.md.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import click
import httpx
import msgspec

from mooncake_lite.config.options import API_KEY, URL
from mooncake_lite.config.progress import plain_table, wide_console
from mooncake_lite.errors import UserError
from mooncake_lite.launch.running import where_else
from mooncake_lite.tools.client import open_client
from mooncake_lite.tools.top import numbers
from mooncake_lite.tools.top.command import LIMITS
from mooncake_lite.tools.top.figures import Figures, Rank, figures_of
from mooncake_lite.tools.top.sample import NoAnswer, Sample, harmless
from mooncake_lite.tools.top.scrape import fetch, scrape

MOST_LINE = 500
"""Characters of a line of /health; the rest is cut."""


class Health(msgspec.Struct):
    """The answer of /health, as far as it is shown here."""

    status: str
    detail: str = ""
    degraded: list[str] = []


@click.group("cluster")
def cluster() -> None:
    """Ask a running cluster how it is."""


@cluster.command("status")
@URL
@API_KEY
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status_command(url: str, api_key: str | None, as_json: bool) -> int:
    """Print whether the cluster serves, what does not work in it, and its ranks.

    The exit code is 0 if all of it works, 1 if something does not, and 2 if no server answers.
    """
    health, sample = asyncio.run(_ask(url, api_key))
    figures, term = figures_of(sample, sample), int(sample.total("conductor_term") or 0)
    if as_json:
        ranks = [asdict(rank) for rank in figures.ranks]
        found = {**msgspec.to_builtins(health), "conductor_term": term, "ranks": ranks}
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    else:
        _show(health, figures, term)
    return 0 if health.status == "ok" and not health.degraded else 1


async def _ask(url: str, api_key: str | None) -> tuple[Health, Sample]:
    """Raises UserError when no mooncake-lite server answers."""
    async with open_client(httpx.AsyncClient, url, api_key, LIMITS) as client:
        try:
            health = msgspec.json.decode(await fetch(client, "/health", (200, 503)), type=Health)
            sample = await scrape(client)
        except (NoAnswer, msgspec.MsgspecError) as error:
            raise UserError(f"no cluster answers at {harmless(url)} ({error}); {where_else()}") from None
    return health, sample


def _show(health: Health, figures: Figures, term: int) -> None:
    console = wide_console()
    state = f"{health.status}, but degraded" if health.degraded else health.status
    about = f"{figures.model}, version {figures.version}, up {numbers.age(figures.uptime_s)}"
    words = about if health.status == "ok" else health.detail
    console.print(harmless(f"{state}: {words}", MOST_LINE), markup=False)
    for line in health.degraded:
        console.print(f"  {harmless(line, MOST_LINE)}", markup=False)
    if term:
        console.print(
            f"  the conductor was replaced {term} times" if term > 1 else "  the conductor was replaced"
        )
    table = plain_table("rank", "role", "used", "waiting", "running", "moved", left={"role"}, no_wrap=True)
    for rank in figures.ranks:
        table.add_row(*_row(rank))
    console.print(table)


def _row(rank: Rank) -> list[str]:
    used = f"{numbers.count(rank.used)} / {numbers.count(rank.total)} pages"
    if rank.role == "store":
        used = numbers.of_size(rank.used, rank.total)
    moved = numbers.moved(rank.moved_bytes)
    figures = [numbers.count(rank.waiting), numbers.count(rank.running), moved]
    return [rank.name, rank.role, rank.trouble or used, *figures]
