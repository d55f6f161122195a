"""Message timelines: which process sends what to which other one, in order, as text and as SVG.

Drawn by `labs show`. A lab's data.py makes the trace. Pure: data in, text out.
Explained in docs/explain/labs.md, "Pictures".
"""

from __future__ import annotations

from html import escape

import msgspec

COLUMN = 16
"""Characters between the lines of two processes."""
COLUMNS = (
    "a column is a process, with its rank if it has one; a line is a message or KV, the first one on top"
)
WIDTH, HEIGHT = 120, 26
"""Pixels between two lines, and between two messages."""
COLOURS = ("#08519c", "#a63603", "#54278f", "#006d2c")
"""Of the requests, in their order."""


class Message(msgspec.Struct, frozen=True):
    """What one process sends to another, by their numbers in `ends`. request: whose message it is."""

    source: int
    target: int
    text: str
    request: str = ""


class MessagesTrace(msgspec.Struct, tag_field="kind", tag="messages", frozen=True):
    """Messages in their order. ends: the names of the processes."""

    ends: list[str]
    messages: list[Message]

    def __post_init__(self) -> None:
        """Raise ValueError for a message between processes that are not in `ends`."""
        places = range(len(self.ends))
        for number, each in enumerate(self.messages, 1):
            if each.source not in places or each.target not in places:
                ends = f"from {each.source} to {each.target}, and there are {len(places)} processes"
                raise ValueError(f"message {number} goes {ends}")

    def as_text(self) -> str:
        """Return the timeline as text: a column for each process, a line for each message."""
        names = "".join(name[: COLUMN - 1].ljust(COLUMN) for name in self.ends).rstrip()
        lines = [COLUMNS]
        request = None
        for message in self.messages:
            if message.request != request:
                request = message.request
                lines += ["", request, names]
            lines.append(_arrow(message, len(self.ends)))
        return "\n".join(lines)

    def as_svg(self) -> str:
        """Return the timeline as SVG: time goes down, a colour for each request."""
        width, height = WIDTH * len(self.ends) + 20, 60 + HEIGHT * len(self.messages)
        requests = list(dict.fromkeys(message.request for message in self.messages))
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="11" '
            'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
        ]
        for place, name in enumerate(self.ends):
            x = _x(place)
            for y in (16, height - 4):
                parts.append(f'<text x="{x}" y="{y}" text-anchor="middle">{escape(name)}</text>')
            parts.append(f'<line x1="{x}" y1="22" x2="{x}" y2="{height - 18}" stroke="#bbbbbb"/>')
        for number, message in enumerate(self.messages):
            colour = COLOURS[requests.index(message.request) % len(COLOURS)]
            parts += _drawn(message, 48 + HEIGHT * number, colour)
        return "\n".join([*parts, "</svg>\n"])


def _arrow(message: Message, ends: int) -> str:
    """Return the line of one message: its arrow, and its text to the right of all columns."""
    line = [" "] * (COLUMN * (ends - 1) + 1)
    for place in range(ends):
        line[COLUMN * place] = "|"
    left, right = sorted((COLUMN * message.source, COLUMN * message.target))
    line[left + 1 : right] = "-" * (right - left - 1)
    if message.source < message.target:
        line[right - 1] = ">"
    elif message.source > message.target:
        line[left + 1] = "<"
    return f"{''.join(line)}  {message.text}"


def _x(place: int) -> int:
    return WIDTH // 2 + 10 + WIDTH * place


def _drawn(message: Message, y: int, colour: str) -> list[str]:
    """Return an arrow with its text above, and a note that names the request."""
    begin, end = _x(message.source), _x(message.target)
    back = 6 if begin > end else -6
    return [
        f'<g stroke="{colour}" fill="{colour}">'
        f"<title>{escape(message.request)}: {escape(message.text)}</title>"
        f'<line x1="{begin}" y1="{y}" x2="{end}" y2="{y}"/>'
        f'<polygon points="{end},{y} {end + back},{y - 3} {end + back},{y + 3}"/></g>',
        f'<text x="{(begin + end) // 2}" y="{y - 4}" text-anchor="middle" fill="{colour}">'
        f"{escape(message.text)}</text>",
    ]
