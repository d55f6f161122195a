"""The picture as an SVG file that needs nothing from elsewhere.

Used by `command.py`. rich's own export links a web font by its address. Here the text is in whichever
monospace font the reader has, and each piece of it is stretched to the width that it has in the terminal.
"""

from __future__ import annotations

import io
import re

from rich.console import Console, RenderableType

FONTS = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"


def as_svg(content: RenderableType, width: int, title: str) -> str:
    """Return what a terminal of this width would show, in a frame with a title."""
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(content)
    svg = console.export_svg(title=title)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("font-family: Fira Code, monospace", f"font-family: {FONTS}")
    svg = svg.replace("textLength=", 'lengthAdjust="spacingAndGlyphs" textLength=')
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"
