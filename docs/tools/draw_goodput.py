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

from mooncake_lite.simulator.figure import canvas

FOLDER = Path(__file__).parents[1]
MEASURED = FOLDER / "reference" / "measured" / "goodput.json"
PICTURE = FOLDER / "explain" / "figures" / "goodput.svg"

GOODPUT = re.compile(r"goodput at (\S+) x capacity, (\S+)")

Curve = list[tuple[float, float]]


def curves(rows: list[dict[str, Any]]) -> dict[str, Curve]:
    """(load as a multiple of the capacity, goodput) of each form of admission, by load."""
    found: dict[str, Curve] = {}
    for row in rows:
        if match := GOODPUT.fullmatch(row["name"]):
            found.setdefault(match[2], []).append((float(match[1]), row["ours"]))
    return {form: sorted(curve) for form, curve in found.items()}


def draw(rows: list[dict[str, Any]]) -> bytes:
    """Draw a panel for each form, with a line for the capacity."""
    (capacity,) = (row["ours"] for row in rows if row["name"].startswith("capacity of"))
    found = curves(rows)
    file = io.BytesIO()
    with canvas(file, ".svg", "goodput", (8, 4.2), 2, 3) as panels:
        for axes, (form, curve) in zip(panels, found.items(), strict=True):
            loads, goodputs = zip(*curve)
            axes.plot(loads, goodputs, "o-")
            axes.axhline(capacity, color="black", linestyle="--", linewidth=1)
            axes.set_xscale("log")
            axes.set_xticks(loads, [f"{load:g}" for load in loads])
            axes.minorticks_off()
            axes.set_title(form, fontsize="medium")
            axes.grid(alpha=0.3)
        panels[0].set_ylim(0, 1.2 * capacity)
        panels[0].text(0.5, 1.03 * capacity, "capacity")
        panels[0].figure.supxlabel("offered load, as a multiple of the capacity", fontsize="medium")
        panels[0].figure.supylabel("goodput, requests/s", fontsize="medium")
    return file.getvalue()


if __name__ == "__main__":
    PICTURE.write_bytes(draw(json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]))
