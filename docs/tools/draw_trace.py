"""Draws the last finished request of a trace as an SVG, for docs/how-to/trace.md.

python docs/tools/draw_trace.py run.json docs/explain/figures/trace.svg
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, LEFT, ROW_HEIGHT, TOP = 960, 150, 18, 44

FILLS = {
    "wait": "#f0f0f0",
    **dict.fromkeys(("prefill", "compute"), "#9ecae1"),
    **dict.fromkeys(("decod", "answer"), "#a1d99b"),
    **dict.fromkeys(("load", "begin"), "#fdd0a2"),
    **dict.fromkeys(("stor", "put", "save", "write", "seal"), "#dadaeb"),
    "copy": "#c7b9e0",
}
"""Beginning of a slice's name -> its colour; others are white."""


class Slice(NamedTuple):
    """A slice on a row (process, lane). Times in microseconds; depth: number of slices around it."""

    row: tuple[int, int]
    name: str
    began: float
    ended: float
    depth: int
    args: dict[str, Any]


def slices_of(events: list[dict[str, Any]]) -> list[Slice]:
    """Return all slices that have ended."""
    found = []
    open_ones: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        row, args = (event["pid"], event["tid"]), event.get("args", {})
        if event["ph"] == "X":
            found.append(Slice(row, event["name"], event["ts"], event["ts"] + event["dur"], 0, args))
        elif event["ph"] == "B":
            open_ones[row].append(event)
        elif event["ph"] == "E":
            begun = open_ones[row].pop()
            args = begun.get("args", {}) | args
            found.append(Slice(row, begun["name"], begun["ts"], event["ts"], len(open_ones[row]), args))
    return found


def draw(events: list[dict[str, Any]]) -> str:
    """Return the picture: the time from the arrival of a request to its end, one row per depth of a lane."""
    slices = slices_of(events)
    lives = [one for one in slices if "answer tokens" in one.args]
    life = max(lives, key=lambda one: one.began)
    margin = 0.02 * (life.ended - life.began)
    start, end = life.began - margin, life.ended + margin
    shown = [one for one in slices if one.ended > start and one.began < end]
    shown.sort(key=lambda one: (-(one.row[0] == life.row[0]), one.row, one.depth, one.began))
    rows = list(dict.fromkeys((one.row, one.depth) for one in shown))
    names = {
        (event["pid"], event["tid"], event["name"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name")
    }

    def x(time: float) -> float:
        return LEFT + (WIDTH - LEFT - 10) * (min(max(time, start), end) - start) / (end - start)

    height = TOP + ROW_HEIGHT * (len(rows) + len({row[0] for row, _ in rows})) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" font-family="sans-serif" font-size="11">',
        f"<title>One request in a trace, {(life.ended - life.began) / 1000:.0f} ms</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        *_axis(x, life, height),
    ]
    y, process = TOP, -1
    at = {}
    for row, depth in rows:
        if row[0] != process:
            process = row[0]
            y += ROW_HEIGHT
            title = escape(names[process, 0, "process_name"])
            lines.append(f'<text x="8" y="{y - 5}" font-weight="bold">{title}</text>')
        at[row, depth] = y
        if depth == 0:
            lines.append(f'<text x="16" y="{y + 12}">{escape(names[*row, "thread_name"])}</text>')
        y += ROW_HEIGHT
    for one in shown:
        lines += _box(one, x(one.began), x(one.ended), at[one.row, one.depth])
    return "\n".join([*lines, "</svg>", ""])


def _axis(x: Any, life: Slice, height: int) -> list[str]:
    """Return a line every few milliseconds since the arrival."""
    total_ms = (life.ended - life.began) / 1000
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**6) if total_ms / step < 10)
    lines = []
    for ms in range(0, int(total_ms) + 1, step):
        at = x(life.began + 1000 * ms)
        lines.append(f'<path d="M{at:.1f} 30V{height - 6}" stroke="#dddddd"/>')
        lines.append(f'<text x="{at:.1f}" y="24" text-anchor="middle">{ms} ms</text>')
    return lines


def _box(one: Slice, left: float, right: float, y: float) -> list[str]:
    fill = next((fill for begin, fill in FILLS.items() if one.name.startswith(begin)), "#ffffff")
    width = max(right - left, 0.6)
    name = one.name.split("-")[0] + " ..." if "cmpl-" in one.name else one.name
    lines = [
        f'<rect x="{left:.1f}" y="{y + 1}" width="{width:.1f}" height="{ROW_HEIGHT - 3}" fill="{fill}" '
        'stroke="#666666" stroke-width="0.5"/>'
    ]
    if width > 6.2 * len(name):
        lines.append(f'<text x="{left + 4:.1f}" y="{y + 12}">{escape(name)}</text>')
    return lines


if __name__ == "__main__":
    trace, picture = map(Path, sys.argv[1:3])
    picture.write_text(draw(json.loads(trace.read_text())["traceEvents"]))
