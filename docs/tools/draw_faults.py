"""Draws docs/explain/figures/faults.svg: when pieces of streams came, while ranks were killed.

mooncake-lite demo --faults --json docs/reference/measured/demo-faults.json     on an idle machine
python docs/tools/draw_faults.py

A path for each stream keeps the file small; a plotting library makes an element of each mark.
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs/reference/measured/demo-faults.json"
PICTURE = ROOT / "docs/explain/figures/faults.svg"

WIDTH, LEFT, TITLE, ROW, MARK, GAP = 760, 10, 18, 9, 7, 10


def drawing(scenes: list[dict]) -> str:  # type: ignore[type-arg]
    """Return a panel for each scene, with a line for each stream and a mark for each piece."""
    longest_s = max(pieces[-1] for scene in scenes for pieces in scene["pieces_s"])
    scale = (WIDTH - 2 * LEFT) / longest_s
    lines, y = [], 0.0
    for scene in scenes:
        killed = f"after {scene['at_s']:.1f} s a {scene['killed']} is killed"
        title = killed if scene["killed"] else "undisturbed"
        y += TITLE
        lines.append(f'<text x="{LEFT}" y="{y - 5:g}">{title}</text>')
        top = y
        for pieces in scene["pieces_s"]:
            marks = "".join(f"M{LEFT + scale * time:.1f} {y:g}v{MARK}" for time in pieces[1:])
            lines.append(f'<path d="{marks}"/>')
            y += ROW
        if scene["killed"]:
            x = LEFT + scale * scene["at_s"]
            lines.append(f'<path class="dead" d="M{x:.1f} {top:g}V{y:g}"/>')
        y += GAP
    lines.append(
        f'<text x="{LEFT}" y="{y + 6:g}">{longest_s:.1f} s from left to right; a mark for each piece</text>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 14:g}" font-family="sans-serif"'
    )
    style = "path{stroke:#222;stroke-width:.7}.dead{stroke-width:2;stroke-dasharray:4 3}"
    return "\n".join([head, f"<style>{style}</style>", *lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(drawing(json.loads(MEASURED.read_text(encoding="utf-8"))["scenes"]), encoding="utf-8")
