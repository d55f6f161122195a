"""Prints what a run came to. Used by `replay`; it shows the keys of `metrics.summary`."""

from __future__ import annotations

from typing import Any

from mooncake_lite.config.progress import plain_table, wide_console

LATENCIES = ("ttft_s", "tpot_s", "itl_s", "tbt_s", "e2e_s")
SPREAD = ("mean", "p50", "p90", "p99")


def show(result: dict[str, Any]) -> None:
    """Print the counts, a table of latencies in ms, and the causes of rejections and failures."""
    console, slo = wide_console(), result["slo"]
    rejected, failed = sum(result["rejected"].values()), sum(result["failed"].values())
    console.print(
        f"{result['requests']:,} requests in {result['span_s']:.1f} s: {result['completed']:,} completed, "
        f"{rejected:,} rejected, {failed:,} failed",
        highlight=False,
    )
    table = plain_table("ms", *SPREAD, left={"ms"})
    for name in LATENCIES:
        values = [result[name][column] for column in SPREAD]
        cells = ["-" if value is None else f"{value * 1e3:,.1f}" for value in values]
        table.add_row(name.removesuffix("_s").upper(), *cells)
    console.print(table)
    if result["slo_share"] is not None:
        console.print(
            f"{result['slo_share']:.1%} of the requests within TTFT {slo['ttft_s'] * 1e3:g} ms and TBT "
            f"{slo['tbt_s'] * 1e3:g} ms; goodput {result['goodput_rps'] or 0:.3f} requests/s",
            highlight=False,
        )
    for outcome in ("rejected", "failed"):
        for cause, count in result[outcome].items():
            console.print(f"{outcome} {count:,}: {cause}", highlight=False, markup=False)
