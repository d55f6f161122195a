"""What came of races: a table, a figure, and a page of HTML. Names are escaped wherever they are shown."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping
from statistics import fmean

import numpy as np
from rich.markup import escape
from rich.table import Table

from mooncake_lite.config.progress import plain_table
from mooncake_lite.tools.arena.race import RATE, RUNS, Race, Scores, goodput

BEST = "kvcache-centric"
"""The bot with which every policy is compared, run by run: all of them get the same requests."""

HEADS = ("goodput, requests/s", "+-", f"runs ahead of {BEST}", "within limits", "mean TTFT, s")

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Arena</title>
<style>body{{font:16px sans-serif;max-width:50em;margin:2em auto}}td,th{{padding:.2em 1em;text-align:right}}
td:nth-child(2),th:nth-child(2){{text-align:left}}.bot{{color:#777}}</style>
<h1>Arena</h1>
<p>{runs} runs of {requests:,} requests, {rate:g} a second. Goodput counts those within both limits, over all
that came: the mean of the runs, and half of its 90 % interval.</p>
<table><tr><th></th><th>policy</th>{heads}</tr>
{rows}
</table>
{forfeits}
</html>
"""


def ordered(scores: Mapping[str, Scores]) -> list[tuple[str, Scores]]:
    """Return names and scores, the best mean first."""
    return sorted(scores.items(), key=lambda one: (-goodput(one[1])[0], one[0]))


def cells(scores: Scores, best: Scores) -> list[str]:
    """Return the cells of a row, without the name. best: the scores of BEST."""
    mean, half = goodput(scores)
    ahead = sum(one.goodput_rps > other.goodput_rps for one, other in zip(scores, best))
    share, ttft_s = fmean(one.share for one in scores), fmean(one.ttft_s for one in scores)
    return [f"{mean:.3f}", f"{half:.3f}", f"{ahead} of {len(scores)}", f"{share:.1%}", f"{ttft_s:.2f}"]


def table(scores: Mapping[str, Scores]) -> Table:
    """Return a table, the best first. BEST is among them."""
    found = plain_table("policy", *HEADS, left={"policy"})
    for name, ones in ordered(scores):
        found.add_row(escape(name), *cells(ones, scores[BEST]))
    return found


def draw(scores: Mapping[str, Scores]) -> bytes:
    """Draw how many requests each policy had served in time, the mean over its runs. Returns an SVG."""
    from mooncake_lite.simulator.figure import canvas

    file = io.BytesIO()
    with canvas(file, ".svg", "arena", (8, 4)) as (axes,):
        for name, ones in ordered(scores):
            curve = np.mean([one.curve for one in ones], axis=0)
            axes.plot(np.linspace(0, 1, len(curve)), curve, linewidth=1.2, label=name.replace("$", r"\$"))
        axes.set(xlabel="share of a run", ylabel="requests within both limits, of all", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return file.getvalue()


def leaderboard(
    scores: Mapping[str, Scores], bots: Mapping[str, Scores], forfeits: Mapping[str, str], race: Race
) -> str:
    """Return the page of a class. Our policies stand among theirs, without a place."""
    rows, place = [], 0
    for name, ones in ordered({**{f"{bot} (ours)": one for bot, one in bots.items()}, **scores}):
        is_theirs = name in scores
        place += is_theirs
        columns = [str(place) if is_theirs else "", name, *cells(ones, bots[BEST])]
        inner = "".join(f"<td>{html.escape(one)}</td>" for one in columns)
        rows.append(f"<tr>{inner}</tr>" if is_theirs else f'<tr class="bot">{inner}</tr>')
    lost = "".join(
        f"<li>{html.escape(name)}: {html.escape(reason)}</li>" for name, reason in forfeits.items()
    )
    return PAGE.format(
        runs=RUNS, requests=race.requests, rate=RATE, heads="".join(f"<th>{head}</th>" for head in HEADS),
        rows="\n".join(rows), forfeits=f"<h2>Forfeits</h2><ul>{lost}</ul>" if lost else "",
    )  # fmt: skip
