"""Records `mooncake-lite demo` beside `mooncake-lite top`, and draws docs/explain/figures/demo.svg.

pip install pyte                    a terminal in memory; nothing else of the project needs it
python docs/tools/draw_demo.py      plays the demo once (two minutes on two idle cores), then draws

The SVG repeats LOOP_S seconds by CSS, without JavaScript. Without animations it shows the last frame.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path

import pyte

from mooncake_lite.tools.top.svg import FONTS

PICTURE = Path(__file__).parents[1] / "explain/figures/demo.svg"
COLUMNS, LINES = 80, 34  # of both terminals

KEY = re.compile(rb"top --url (\S+)\s|: first token after")
"""The picture just before the demo prints one of these is kept, and the last one."""

LIMIT_S = 600.0
"""For one play of the demo."""

TICK_S, LOOP_S, LAST_S, SHORTEST_S = 0.2, 20.0, 4.0, 0.35
CELL_X, CELL_Y, FONT_SIZE, MARGIN, TITLE_Y = 6, 12, 10, 10, 22
GROUND, TEXT, FAINT = "#16181d", "#d0d0d0", "#8a8a8a"
COLOURS = {"default": TEXT, "brightblack": FAINT, "red": "#f07178", "green": "#a5d46a"}
COLOURS |= {"brown": "#e6c35c", "blue": "#6cb0f0", "magenta": "#d08fe0", "cyan": "#5fd0d0"}

Frame = tuple[float, list[str], list[str]]
"""Seconds since the start, and the lines of both terminals as SVG, "" for an empty one."""


class Terminal:
    """A command of mooncake-lite in a terminal of its own, and all that it has printed."""

    def __init__(self, owner: contextlib.ExitStack, *words: str) -> None:
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self._screen)
        self.printed = b""
        self._end, child = pty.openpty()
        termios.tcsetwinsize(child, (LINES, COLUMNS))
        os.set_blocking(self._end, False)
        env = os.environ | {"COLUMNS": f"{COLUMNS}", "LINES": f"{LINES}", "TERM": "xterm-256color"}
        argv = [sys.executable, "-m", "mooncake_lite", *words]
        self.process = subprocess.Popen(argv, stdin=child, stdout=child, stderr=child, env=env)
        os.close(child)
        owner.callback(self.process.wait, LIMIT_S)
        owner.callback(self.process.terminate)  # runs first; the demo then stops its cluster

    def read(self) -> None:
        """Take what was printed since the last call."""
        with contextlib.suppress(OSError):  # nothing now, or nothing more
            while some := os.read(self._end, 65536):
                self.printed += some
                self._stream.feed(some)

    def lines(self) -> list[str]:
        """What the screen shows."""
        buffer = self._screen.buffer
        return [svg_of([buffer[line][column] for column in range(COLUMNS)]) for line in range(LINES)]


def svg_of(cells: Sequence[pyte.screens.Char]) -> str:
    """A line as texts that are as wide as in the terminal, in any font. The home folder is shown as ~."""
    texts, column = "", 0
    for (colour, bold), group in groupby(cells, lambda cell: (cell.fg, cell.bold)):
        data = "".join(cell.data for cell in group)
        text = data.strip().replace(str(Path.home()), "~")
        x = CELL_X * (column + len(data) - len(data.lstrip()))
        column += len(data)
        if text:
            fill = "" if colour == "default" else f' fill="{COLOURS.get(colour, f"#{colour}")}"'
            weight = ' font-weight="bold"' if bold else ""
            size = f'textLength="{CELL_X * len(text)}" lengthAdjust="spacingAndGlyphs"'
            texts += f'<text x="{x}" {size}{fill}{weight}>{escape(text, quote=False)}</text>'
    return texts


def record(owner: contextlib.ExitStack) -> list[Frame]:
    """Play the demo, watch each of its clusters, and return the key frames. `owner` ends what still runs."""
    demo, top, began = Terminal(owner, "demo"), None, time.monotonic()
    frames: list[Frame] = []
    found, picture = list[bytes](), [""] * LINES
    while demo.process.poll() is None:
        if time.monotonic() - began > LIMIT_S:
            sys.exit(f"the demo takes more than {LIMIT_S:.0f} s; nothing was drawn")
        time.sleep(TICK_S)
        before, known = demo.lines(), len(found)
        demo.read()
        if top is not None and b"Stopping it" in demo.printed.rpartition(b"top --url")[2]:
            top.process.kill()  # before it sees that its cluster is gone
        elif top is not None:
            top.read()
            picture = top.lines()
        found = KEY.findall(demo.printed)
        if len(found) > known:
            frames.append((time.monotonic() - began, before, picture))
        for url in filter(None, found[known:]):
            top = Terminal(owner, "top", "--interval", "0.5", "--url", url.decode())
    demo.read()
    if demo.process.returncode:
        sys.exit(f"the demo ended with exit code {demo.process.returncode}; nothing was drawn")
    return [*frames, (time.monotonic() - began, demo.lines(), picture)]


def draw(frames: Sequence[Frame]) -> str:
    """The animation: each line of text once, and frames that refer to lines."""
    pane, height = COLUMNS * CELL_X + 2 * MARGIN, TITLE_Y + LINES * CELL_Y + MARGIN
    scale = (LOOP_S - LAST_S - SHORTEST_S * (len(frames) - 1)) / frames[-2][0]
    numbers: dict[str, int] = {}
    rules, groups, begins_s, start_s = "", "", 0.0, 0.0
    for index, (at_s, demo, top) in enumerate(frames):
        is_last = index == len(frames) - 1
        ends_s = LOOP_S if is_last else begins_s + SHORTEST_S + scale * (at_s - start_s)
        steps = {0.0: 0, begins_s: 1} | ({} if is_last else {ends_s: 0})
        keys = "".join(f"{100 * at / LOOP_S:.2f}%{{opacity:{opacity}}}" for at, opacity in steps.items())
        rules += f"@keyframes k{index}{{{keys}}}#f{index}{{animation-name:k{index}}}"
        groups += f'<g id="f{index}" class="f" opacity="{int(is_last)}">'
        groups += f'<text x="{pane - MARGIN}" y="15" text-anchor="end">{at_s:.0f} s</text>'
        for row, pair in enumerate(zip(demo, top), start=1):
            for line, x in zip(pair, (MARGIN, pane + MARGIN)):
                number = numbers.setdefault(line, len(numbers))
                groups += f'<use href="#l{number}" x="{x}" y="{TITLE_Y + row * CELL_Y}"/>' if line else ""
        groups += "</g>\n"
        begins_s, start_s = ends_s, at_s
    lines = "".join(f'<g id="l{number}">{line}</g>\n' for line, number in numbers.items())
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * pane} {height}" font-family="{FONTS}"
font-size="{FONT_SIZE}" fill="{TEXT}" xml:space="preserve" role="img">
<title>The terminals of mooncake-lite demo and mooncake-lite top, side by side</title>
<style>.f{{animation:{LOOP_S:.0f}s step-end infinite}}{rules}
@media(prefers-reduced-motion:reduce){{.f{{animation:none}}}}</style>
<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>
<path d="M{pane} 0V{height}M0 {TITLE_Y}H{2 * pane}" stroke="{FAINT}"/>
<text x="{MARGIN}" y="15">$ mooncake-lite demo</text>
<text x="{MARGIN + pane}" y="15">$ mooncake-lite top</text>
<defs>{lines}</defs>
{groups}</svg>
"""


if __name__ == "__main__":
    with contextlib.ExitStack() as stack:
        PICTURE.write_text(draw(record(stack)), encoding="utf-8")
