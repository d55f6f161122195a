"""Prints what a run came to. Used by `replay` and `simulate cluster`; shows the keys of `metrics.summary`."""

from __future__ import annotations

from typing import Any

from mooncake_lite.config.progress import plain_table, wide_console

COLUMNS = ("mean", "p50", "p90", "p99")


def show(result: dict[str, Any], how: str = "") -> None:
    """Print the counts, a table of latencies, and the causes of what went wrong. how: after the time."""
    console = wide_console()
    refused, failed = (sum(result[kind].values()) for kind in ("rejected", "failed"))
    console.print(
        f"{result['requests']:,} requests over {result['span_s']:,.1f} s{how}: "
        f"{result['completed']:,} completed, {refused:,} refused, {failed:,} failed; "
        f"{result['slo_share'] or 0:.1%} within the limits, {result['goodput_rps'] or 0:.2f} requests/s",
        highlight=False,
    )
    table = plain_table("seconds", *COLUMNS, left={"seconds"})
    for name in ("ttft_s", "tbt_s", "tpot_s", "itl_s", "e2e_s"):
        if result[name]["mean"] is not None:
            table.add_row(name[:-2].upper(), *(f"{result[name][column]:.3f}" for column in COLUMNS))
    console.print(table)
    for kind in ("rejected", "failed"):
        for cause, count in result[kind].items():
            console.print(f"{count:,} {kind}: {cause}", highlight=False, markup=False)
