"""Draws docs/explain/figures/goodput.svg from the result of `mooncake-lite bench goodput`. Needs matplotlib.

mooncake-lite bench goodput --json docs/reference/measured/goodput.json
python docs/tools/draw_goodput.py
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1]
MEASURED = FOLDER / "reference" / "measured" / "goodput.json"
PICTURE = FOLDER / "explain" / "figures" / "goodput.svg"

GOODPUT = re.compile(r"goodput at (\S+) x capacity, (\S+)")
MARKERS = "osv^D<"

Curve = list[tuple[float, float]]


def curves(rows: list[dict[str, Any]]) -> dict[str, Curve]:
    """(load as a multiple of the capacity, goodput) of each form of admission, by load."""
    found: dict[str, Curve] = {}
    for row in rows:
        if match := GOODPUT.fullmatch(row["name"]):
            found.setdefault(match[2], []).append((float(match[1]), row["ours"]))
    return {form: sorted(curve) for form, curve in found.items()}


def draw(rows: list[dict[str, Any]]) -> bytes:
    """The picture: a line for each form, and one for the capacity."""
    import matplotlib
    from matplotlib.figure import Figure

    (capacity,) = (row["ours"] for row in rows if row["name"].startswith("capacity of"))
    with matplotlib.rc_context({"svg.hashsalt": "goodput", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.subplots()
        found = curves(rows)
        for number, (form, curve) in enumerate(found.items()):
            xs, ys = zip(*curve)
            axes.plot(xs, ys, label=form, marker=MARKERS[number % len(MARKERS)], color=f"C{number}")
        axes.axhline(capacity, color="grey", linestyle="--", linewidth=1, label="capacity")
        axes.set_xscale("log")
        loads = sorted({load for curve in found.values() for load, _ in curve})
        axes.set_xticks(loads, [f"{load:g}" for load in loads], minor=False)
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("offered load, as a multiple of the capacity")
        axes.set_ylabel("requests per second within both limits")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


if __name__ == "__main__":
    PICTURE.write_bytes(draw(json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]))
