"""Figures in, what rich prints out: the layout of the picture, its bars and its colours.

Used by `command.py`. Pure: it reads no clock and no terminal. Every text that came from a server is a
`rich.text.Text`, so that nothing in it is taken for markup.

    title       what is watched, and how it is
    headline    the figures of the whole cluster
    ranks       as many as the height allows: the busiest
    requests    open ones, by stage
    pool, KV moved
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mooncake_lite.tools.top import numbers
from mooncake_lite.tools.top.figures import SSD, Figures, Flow, Lookups, Rank, Tier, busiest

NARROWEST, LOWEST = 72, 20
"""A smaller terminal cuts the picture off."""

COLOURS = {"prefill": "cyan", "decode": "magenta", "compute": "green", "store": "blue", SSD: "yellow"}
TIER_COLOURS = {"DRAM": "blue", "lent DRAM": "cyan", SSD: "yellow"}
FRAME = "bright_black"
FAINT = "bright_black"
TRACK = "grey35"

FULL, EMPTY = "▆", "▁"
"""The cells of a bar: they differ without colour too."""

WIDE = 96
"""From this width on there is room for what has moved in all."""

MOST_STAGES = 7
"""As many as a life of a request has; a foreign server may name more."""


@dataclass(frozen=True, slots=True)
class Watching:
    """What the picture says of the watch itself.

    address    host and port
    silent_s   since the last answer, 0 when the server answers
    problem    why it does not answer
    hint       the last line: which keys there are
    """

    address: str
    silent_s: float = 0.0
    problem: str = ""
    hint: str = ""


def picture(figures: Figures, watching: Watching, width: int, height: int) -> RenderableType:
    """Return the whole picture, for a terminal of this size."""
    width, height = max(width, NARROWEST), max(height, LOWEST)
    wide = width >= WIDE
    moved_width = 43 if wide else 32
    pool = _pool(figures, width - moved_width - 4)
    low = max(len(pool), 4)
    fixed = 13  # the frames, and all lines but those of ranks, of the pool and of what moved
    spare = max(0, height - fixed - low - len(figures.ranks))
    more = max(0, min(spare, len(figures.flows) - low))
    low += more
    air = 2 if spare - more >= 2 else 0  # empty lines
    ranks, flows = busiest(figures.ranks, max(height - fixed - low - air, 2)), _fastest(figures.flows, low)
    bottom = Table.grid(expand=True)
    bottom.add_column(width=width - moved_width)
    bottom.add_column(width=moved_width)
    has_ssd = any(tier.name == SSD for tier in figures.tiers)
    share = figures.accepted_share
    title = "ranks" if share is None else f"ranks, {numbers.percent(share)} of drafts accepted"
    bottom.add_row(
        _panel(f"pool, hits of DRAM + {SSD}" if has_ssd else "pool", Group(*pool), rows=low),
        _panel(
            "KV moved now, in all" if wide else "KV moved", _moved(flows, wide), rows=low,
            hidden=len(figures.flows) - len(flows),
        ),
    )  # fmt: skip
    return Group(
        _title(figures, watching),
        Padding(_headline(figures), (air // 2, 0)),
        _panel(title, _ranks(ranks, width), hidden=len(figures.ranks) - len(ranks)),
        _panel("requests", _stages(figures.stages)),
        bottom,
        _last_line(figures, watching),
    )


def _panel(title: str, content: RenderableType, rows: int | None = None, hidden: int = 0) -> Panel:
    """Return a framed part of the picture. hidden: number of its lines for which there is no room."""
    return Panel(
        content,
        title=Text(title, "bold"),
        title_align="left",
        subtitle=Text(f"… and {hidden} more") if hidden else None,
        subtitle_align="left",
        border_style=FRAME,
        box=box.ROUNDED,
        padding=(0, 1),
        height=None if rows is None else rows + 2,
    )


def bar(parts: Sequence[tuple[float, str]], width: int) -> Text:
    """Return a bar of `width` cells. parts: (share of the whole, colour), left to right."""
    text, used, share = Text(), 0, 0.0
    for part, colour in parts:
        share = min(share + max(part, 0.0), 1.0)
        cells = max(round(share * width) - used, 1 if part > 0 and used < width else 0)
        text.append(FULL * cells, colour)
        used += cells
    return text.append(EMPTY * (width - used), TRACK)


# ---------------------------------------------------------------------------------------- above


def _title(figures: Figures, watching: Watching) -> Table:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    left = Text.assemble(
        (" mooncake-lite ", "bold"), (f" {figures.model} ", "bold green"), (f" {watching.address}", FAINT)
    )
    grid.add_row(left, _state(figures, watching))
    return grid


def _state(figures: Figures, watching: Watching) -> Text:
    """Return how the server is, in a few words."""
    if watching.silent_s:
        return Text(f"● no answer since {numbers.age(watching.silent_s)} ", "bold red")
    words = [("● not ready", "bold yellow")]
    if figures.ready is None:
        words = [("● answers", "green")]
    elif figures.ready:
        words = [("● ready", "bold green")]
        if figures.degraded:
            words = [(f"● degraded ({numbers.count(figures.degraded)})", "bold yellow")]
    return Text.assemble(*words, (f"  up {numbers.age(figures.uptime_s)} ", FAINT))


def _headline(figures: Figures) -> Table:
    """Return the figures of the whole cluster, each above its name."""
    found = (
        ("requests/s", numbers.count(figures.requests_per_s)),
        ("TTFT median", numbers.duration(figures.ttft_s)),
        ("TPOT median", numbers.duration(figures.tpot_s)),
        ("prompt tok/s", numbers.count(figures.prompt_tokens_per_s)),
        ("answer tok/s", numbers.count(figures.answer_tokens_per_s)),
        ("prompt cached", numbers.percent(figures.cached_share)),
    )
    return _columns([(Text(value, "bold"), Text(name, FAINT)) for name, value in found])


def _columns(found: Sequence[tuple[Text, Text]]) -> Table:
    """Return pairs of texts, one above the other, in columns of equal width."""
    grid = Table.grid(expand=True)
    for _ in found:
        grid.add_column(justify="center", ratio=1, no_wrap=True)
    grid.add_row(*(above for above, _ in found))
    grid.add_row(*(below for _, below in found))
    return grid


# ---------------------------------------------------------------------------------------- ranks


def _ranks(ranks: Sequence[Rank], width: int) -> Table:
    """Return one row for each rank, or instance of several."""
    numbered = min(max([4, *(len(rank.name) for rank in ranks)]), 9)
    cells = max(8, width - 64 - numbered)
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style=FAINT, pad_edge=False)
    table.add_column("rank", justify="right", width=numbered, no_wrap=True)
    table.add_column("role", width=8, no_wrap=True)
    table.add_column("memory", width=cells, no_wrap=True)
    table.add_column("used", justify="right", ratio=1, no_wrap=True)
    for name in ("waiting", "running", "tokens/s"):
        table.add_column(name, justify="right", width=8, no_wrap=True)
    for rank in ranks:
        table.add_row(*_rank(rank, cells))
    return table


def _rank(rank: Rank, cells: int) -> list[Text]:
    colour = COLOURS.get(rank.role, "white")
    is_store = rank.role == "store"
    used = f"{numbers.count(rank.used)} / {numbers.count(rank.total)} pages"
    waiting = Text(numbers.count(rank.waiting), "bold yellow" if rank.waiting else "")
    if is_store:
        used = numbers.of_size(rank.used, rank.total)
        waiting = Text(f"{numbers.count(rank.waiting)} blk") if rank.waiting else Text("")
    share = rank.used / rank.total if rank.used is not None and rank.total else 0.0
    return [
        Text(rank.name),
        Text(rank.role, colour),
        bar([(share, colour)], cells),
        Text(rank.trouble or used, "bold red" if rank.trouble else ""),
        waiting,
        Text("" if is_store else numbers.count(rank.running)),
        Text("" if is_store else numbers.count(rank.tokens_per_s), "bold" if rank.tokens_per_s else ""),
    ]


# ---------------------------------------------------------------------------------------- below


def _stages(stages: dict[str, float]) -> RenderableType:
    """Return the number of requests in each stage, above the stage's name."""
    if not stages:
        return Text("the server does not say", FAINT)
    return _columns(
        [
            (Text(numbers.count(value), "bold" if value else FAINT), Text(stage, "" if value else FAINT))
            for stage, value in list(stages.items())[:MOST_STAGES]
        ]
    )


def _pool(figures: Figures, width: int) -> list[Table]:
    """Return one line for each tier, and two for what lookups found."""
    lines = [_tier(tier, width) for tier in figures.tiers]
    has_ssd = any(tier.name == SSD for tier in figures.tiers)
    recently = f"hits {numbers.span(figures.seconds)}" if figures.seconds else "hits now"
    return [
        *lines,
        _hits(recently, figures.recent, has_ssd, width),
        _hits("hits ever", figures.ever, has_ssd, width),
    ]


def _tier(tier: Tier, width: int) -> Table:
    share = tier.used_bytes / tier.capacity_bytes
    used = numbers.of_size(tier.used_bytes, tier.capacity_bytes)
    text = Text.assemble(used.rjust(18), f"{numbers.count(tier.blocks):>6}", (" blk", FAINT))
    return _line(tier.name, [(share, TIER_COLOURS[tier.name])], text, width)


def _hits(name: str, lookups: Lookups, has_ssd: bool, width: int) -> Table:
    """Return which share of the blocks that were looked up was found, and in which tier."""
    if not lookups.asked:
        return _line(name, [], Text("no lookups".rjust(18), FAINT), width)
    dram, ssd = lookups.dram / lookups.asked, lookups.ssd / lookups.asked
    text = Text.assemble((numbers.percent(dram).rjust(6), TIER_COLOURS["DRAM"]))
    if has_ssd:
        text.append(" +", FAINT).append(numbers.percent(ssd).rjust(6), TIER_COLOURS[SSD])
    text = Text(" " * (14 - len(text))).append(text).append(" of ", FAINT)
    text.append(numbers.count(lookups.asked).rjust(6)).append(" blk", FAINT)
    return _line(name, [(dram, TIER_COLOURS["DRAM"]), (ssd, TIER_COLOURS[SSD])], text, width)


def _line(name: str, parts: Sequence[tuple[float, str]], text: Text, width: int) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    cells = max(4, width - 9 - 1 - 28 - 1)
    grid.add_column(width=9, no_wrap=True)
    grid.add_column(width=cells, no_wrap=True)
    grid.add_column(width=28, no_wrap=True)
    grid.add_row(Text(name), bar(parts, cells), text)
    return grid


def _fastest(flows: Sequence[Flow], count: int) -> list[Flow]:
    """Return at most `count` directions in their order: those with the highest rates."""
    ranked = sorted(flows, key=lambda flow: (flow.bytes_per_s or 0.0, flow.total_bytes), reverse=True)
    return [flow for flow in flows if flow in ranked[:count]]


def _moved(flows: Sequence[Flow], wide: bool) -> RenderableType:
    """Return a line for each direction."""
    if not flows:
        return Text("nothing yet", FAINT)
    grid = Table.grid(expand=True, padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    grid.add_column(justify="right", no_wrap=True, width=10)
    if wide:
        grid.add_column(justify="right", no_wrap=True, width=8)
    for flow in flows:
        way = Text.assemble(
            (f"{flow.source:>7}", COLOURS.get(flow.source, "")), (" → ", FAINT),
            (flow.target, COLOURS.get(flow.target, "")),
        )  # fmt: skip
        rate = Text(numbers.rate(flow.bytes_per_s), "bold" if flow.bytes_per_s else FAINT)
        grid.add_row(way, rate, *([Text(numbers.moved(flow.total_bytes), FAINT)] if wide else []))
    return grid


def _last_line(figures: Figures, watching: Watching) -> Text:
    if watching.problem:
        return Text(f" {watching.problem}", "red", no_wrap=True, overflow="ellipsis")
    of = f"rates and medians: last {numbers.span(figures.seconds)}" if figures.seconds else "measuring"
    words = [part for part in (watching.hint, of) if part]
    return Text(" " + "   ".join(words), FAINT, no_wrap=True, overflow="ellipsis")
