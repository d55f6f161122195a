"""What came of races: a table, a figure, and a page of HTML. Names are escaped wherever they are shown."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping

import numpy as np
from rich.table import Table

from mooncake_lite.config.progress import plain_table
from mooncake_lite.tools.arena.race import RATE, Race, Score

HEADS = ("goodput, requests/s", "within limits", "mean TTFT, s")

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Arena</title>
<style>body{{font:16px sans-serif;max-width:50em;margin:2em auto}}td,th{{padding:.2em 1em;text-align:right}}
td:nth-child(2),th:nth-child(2){{text-align:left}}.bot{{color:#777}}</style>
<h1>Arena</h1>
<p>{requests:,} requests, {rate:g} a second. Goodput counts those within both limits, over all that came.</p>
<table><tr><th></th><th>policy</th>{heads}</tr>
{rows}
</table>
{forfeits}
</html>
"""


def ordered(scores: Mapping[str, Score]) -> list[tuple[str, Score]]:
    """Return names and scores, the best first."""
    return sorted(scores.items(), key=lambda one: (-one[1].goodput_rps, one[0]))


def cells(score: Score) -> list[str]:
    """Return the cells of a row, without the name."""
    return [f"{score.goodput_rps:.3f}", f"{score.share:.1%}", f"{score.ttft_s:.2f}"]


def table(scores: Mapping[str, Score]) -> Table:
    """Return a table, the best first."""
    found = plain_table("policy", *HEADS, left={"policy"})
    for name, score in ordered(scores):
        found.add_row(name, *cells(score))
    return found


def draw(scores: Mapping[str, Score]) -> bytes:
    """Draw how many requests each policy had served in time, over the race. Returns an SVG."""
    from mooncake_lite.simulator.figure import canvas

    file = io.BytesIO()
    with canvas(file, ".svg", "arena", (8, 4)) as (axes,):
        for name, score in ordered(scores):
            axes.plot(np.linspace(0, 1, len(score.curve)), score.curve, linewidth=1.2, label=name)
        axes.set(xlabel="share of the race", ylabel="requests within both limits, of all", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return file.getvalue()


def leaderboard(
    scores: Mapping[str, Score], bots: Mapping[str, Score], forfeits: Mapping[str, str], race: Race
) -> str:
    """Return the page of a class. Our policies stand among theirs, without a place."""
    rows, place = [], 0
    for name, score in ordered({**{f"{bot} (ours)": one for bot, one in bots.items()}, **scores}):
        is_theirs = name in scores
        place += is_theirs
        columns = [str(place) if is_theirs else "", name, *cells(score)]
        inner = "".join(f"<td>{html.escape(one)}</td>" for one in columns)
        rows.append(f"<tr>{inner}</tr>" if is_theirs else f'<tr class="bot">{inner}</tr>')
    lost = "".join(
        f"<li>{html.escape(name)}: {html.escape(reason)}</li>" for name, reason in forfeits.items()
    )
    return PAGE.format(
        requests=race.requests, rate=RATE, heads="".join(f"<th>{head}</th>" for head in HEADS),
        rows="\n".join(rows), forfeits=f"<h2>Forfeits</h2><ul>{lost}</ul>" if lost else "",
    )  # fmt: skip
