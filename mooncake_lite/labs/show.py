"""Pictures of traces, as text for a terminal or as SVG: block maps, tables, kernel accesses, timelines.

Used by `labs show`. A trace is what a test has noted with `lab.trace`; its `kind` says what it is. This file
draws block maps and tables. Explained in docs/explain/labs.md, "Pictures".
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from html import escape
from typing import Any

import msgspec

from mooncake_lite.errors import LabError
from mooncake_lite.labs.access_map import AccessMap
from mooncake_lite.labs.timeline import MessagesTrace

CELL = 14
COLOURS = ("#eeeeee", "#9ecae1", "#6baed6", "#3182bd", "#08519c")
"""Of a page with 0, 1, 2, 3, and 4 or more users."""
WIDTH = 90
"""Characters of a value in a line of a picture."""


class PagesTrace(msgspec.Struct, tag_field="kind", tag="pages", frozen=True):
    """The steps of a history, and after each step the pages that every sequence holds."""

    steps: list[list[str | int]]
    held: list[dict[str, list[int]]]

    def __post_init__(self) -> None:
        """Raise ValueError unless there is something held after each step."""
        if len(self.steps) != len(self.held):
            raise ValueError(f"{len(self.steps)} steps, and what is held after {len(self.held)}")

    def _block_map(self) -> tuple[list[int], list[list[int]]]:
        """Return (pages, users[page][step]) of all pages that are ever held."""
        after = [Counter(page for pages in held.values() for page in pages) for held in self.held]
        pages = sorted({page for users in after for page in users})
        return pages, [[users[page] for users in after] for page in pages]

    def as_text(self) -> str:
        """Return the block map as text: a row for each page, a column for each step."""
        pages, users = self._block_map()
        lines = ["users of each page (row) after each step (column); . is no user"]
        for page, row in zip(pages, users):
            lines.append(
                f"page {page:>4}  " + "".join("." if not count else str(min(count, 9)) for count in row)
            )
        lines += [
            f"step {number + 1:>4}  {' '.join(map(str, step))}" for number, step in enumerate(self.steps[:20])
        ]
        if len(self.steps) > 20:
            lines.append(f"          ... {len(self.steps)} steps")
        return "\n".join(lines)

    def as_svg(self) -> str:
        """Return the block map as SVG, darker for more users."""
        pages, users = self._block_map()
        width, height = 70 + CELL * len(self.steps), 30 + CELL * len(pages)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="10" '
            'font-family="sans-serif"><text x="2" y="12">users of each page after each step</text>'
        ]
        for row, page in enumerate(pages):
            y = 20 + CELL * row
            parts.append(f'<text x="2" y="{y + 11}">page {page}</text>')
            for column, count in enumerate(users[row]):
                step = escape(" ".join(map(str, self.steps[column])))
                parts.append(
                    f'<rect x="{60 + CELL * column}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" '
                    f'fill="{COLOURS[min(count, 4)]}"><title>{step}: {count} users</title></rect>'
                )
        return "\n".join([*parts, "</svg>\n"])


class TableTrace(msgspec.Struct, tag_field="kind", tag="table", frozen=True):
    """A case in words: a title, and rows of texts under the names of columns."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def __post_init__(self) -> None:
        """Raise ValueError for a row that does not fit the columns."""
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row has {len(row)} texts, and there are {len(self.columns)} columns")

    def _lines(self) -> list[str]:
        """Return the names of the columns and each row, every text as wide as its column."""
        table = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*table)]
        return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]

    def as_text(self) -> str:
        """Return the title and the table as text."""
        return "\n".join([self.title, *self._lines()])

    def as_svg(self) -> str:
        """Return the table as SVG, in letters of one width."""
        lines = self.as_text().split("\n")
        width, height = 12 + 7 * max(map(len, lines)), 12 + CELL * len(lines)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="11" '
            'font-family="monospace"><rect width="100%" height="100%" fill="white"/>'
        ]
        for number, line in enumerate(lines, 1):
            parts.append(f'<text x="6" y="{CELL * number}" xml:space="preserve">{escape(line)}</text>')
        return "\n".join([*parts, "</svg>\n"])


Drawn = PagesTrace | AccessMap | MessagesTrace | TableTrace


def read_trace_of(trace: Any) -> Drawn:
    """Read a trace of the notes. Raises LabError if nothing can be drawn of it."""
    try:
        return msgspec.convert(trace, Drawn)  # type: ignore[arg-type]
    except msgspec.ValidationError as error:
        raise LabError(f"the trace cannot be drawn: {error}; run the check again") from None


def beside(said: list[str]) -> list[str]:
    """Return the lines of a failed test below its picture: what came back above what was expected.

    said   the lines of its message, each one with a word of 11 characters in front
    """
    parts = {line[:11].strip(): line[11:] for line in said}
    if "came back" not in parts or "expected" not in parts:
        return ["", *said] if said else []
    came, expected = parts["came back"], parts["expected"]
    same = next((place for place, pair in enumerate(zip(came, expected)) if len(set(pair)) > 1), None)
    at = min(len(came), len(expected)) if same is None else same
    lines = [f"called     {parts['called']}"]
    for begin in range(0, max(len(came), len(expected)), WIDTH):
        for name, text in (("came back", came), ("expected", expected)):
            if part := text[begin : begin + WIDTH]:
                lines.append(f"{name:<11}{part}")
        if begin <= at < begin + WIDTH:
            lines.append(" " * (11 + at - begin) + "^ here they begin to differ")
    return ["", *lines, f"breaks     {parts['breaks']}"]


def with_lines(svg: str, lines: list[str]) -> str:
    """Return an SVG with lines of text below the picture."""
    size = re.match(r'<svg [^>]*width="(\d+)" height="(\d+)"', svg)
    if size is None or not lines:
        return svg
    width, height = map(int, size.groups())
    lines = [
        part for line in lines for part in textwrap.wrap(line, WIDTH + 40, drop_whitespace=False) or [""]
    ]
    grown = f'width="{max(width, 12 + 7 * max(map(len, lines)))}" height="{height + CELL * (len(lines) + 1)}"'
    svg = svg.replace(f'width="{width}" height="{height}"', grown, 1)
    texts = [
        f'<text x="6" y="{height + CELL * number}" font-size="11" font-family="monospace" '
        f'xml:space="preserve">{escape(line)}</text>'
        for number, line in enumerate(lines, 1)
    ]
    return svg.replace("</svg>", "\n".join([*texts, "</svg>"]))
