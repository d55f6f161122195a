"""Draws docs/explain/figures/lifecycle.svg: what the processes send each other about one request.

python docs/tools/draw_lifecycle.py
"""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).parents[1] / "explain/figures/lifecycle.svg"
WIDTH, ROW_HEIGHT, TOP, HALO = 960, 30, 46, 'stroke="#fff" stroke-width="4" paint-order="stroke"'
PLACES = ("client", "gateway", "conductor", "prefill rank", "pool", "decode rank")
STEPS = """
client > gateway > HTTP request
gateway > conductor > Submit
conductor > conductor > choose ranks, reserve blocks
conductor > prefill rank > StartPrefill
pool > prefill rank > KV of the prefix
prefill rank > prefill rank > compute the rest
prefill rank > gateway > Tokens: the first
prefill rank > pool > new KV
prefill rank > conductor > PrefillEnded
conductor > decode rank > StartDecode
pool > decode rank > all KV
decode rank > conductor > DecodeLoaded
decode rank > gateway > Tokens: one in each step
gateway > client > text
decode rank > pool > full blocks
decode rank > conductor > DecodeEnded
""".strip().splitlines()
"""From, to, text, from top to bottom. A step from a place to itself is work."""


def draw() -> str:
    """Return the picture: a line down for each place, an arrow for each message, a thick grey one for KV."""
    height = TOP + ROW_HEIGHT * len(STEPS) + 14
    at = {name: (2 * n + 1) * WIDTH // (2 * len(PLACES)) for n, name in enumerate(PLACES)}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" font-family="sans-serif" font-size="13" text-anchor="middle">',
        "<title>one request: messages and transfers</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
    ]
    for name, x in at.items():
        lines.append(f'<text x="{x}" y="22" font-weight="bold">{name}</text>')
        lines.append(f'<path d="M{x} 32V{height - 8}" stroke="#bbbbbb"/>')
    for n, (source, target, text) in enumerate(step.split(" > ") for step in STEPS):
        y, start, end = TOP + ROW_HEIGHT * n + 20, at[source], at[target]
        if start != end:
            tip = 9 if start > end else -9
            colour, width = ("#777", 5) if "pool" in (source, target) else ("#000", 1)
            lines.append(f'<path d="M{start} {y}H{end + tip}" stroke="{colour}" stroke-width="{width}"/>')
            lines.append(f'<path d="M{end} {y}l{tip} -6v12z" fill="{colour}"/>')
        lines.append(f'<text x="{(start + end) // 2}" y="{y - 8}" {HALO}>{text}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw())
