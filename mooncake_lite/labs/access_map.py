"""Pictures of kernel accesses: which thread touches which cell of an array, between which barriers.

A child process makes an `AccessMap` of what the race checker has recorded, and returns it as data. The parent
draws the map as text for a terminal, or as SVG. Explained in docs/explain/race-checker.md.
"""

from __future__ import annotations

from collections import defaultdict
from html import escape

import msgspec
import numpy as np

from mooncake_lite.labs.race_checker import ATOMIC, READS, WRITES, Phase, Recording, conflict

NOTHING, READ, WRITTEN, BOTH, RACE = ".", "r", "w", "b", "!"
MEANING = {READ: "reads", WRITTEN: "writes", BOTH: "reads and writes", RACE: "races for"}
LEGEND = ", ".join(f"{meaning} ({character})" for character, meaning in MEANING.items())
OPERATIONS = {READS: READ, WRITES: WRITTEN, ATOMIC: BOTH}
COLOURS = {NOTHING: "#f2f2f2", READ: "#9ecae1", WRITTEN: "#fdae6b", BOTH: "#74c476", RACE: "#d62728"}
CELL = 10
"""Pixels of a square in an SVG."""
LEFT = 70
"""Pixels for the names of threads."""


class AccessMap(msgspec.Struct, tag_field="kind", tag="accesses", frozen=True):
    """What the threads of one block did with one array.

    array    its name
    unit     what a column is: a "cell", or what an index of the first axis is called, such as a "page"
    columns  the indices of the first axis that any thread touched, in order
    phases   [phase][thread] -> one of the five characters above for each column; a phase ends with a barrier
    block    (x, y, z) of the block
    """

    array: str
    unit: str
    columns: list[int]
    phases: list[list[str]]
    block: tuple[int, ...] = (0, 0, 0)

    def __post_init__(self) -> None:
        """Raise ValueError for rows that do not fit the columns: a map may come from a child process."""
        for row in (row for rows in self.phases for row in rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"a row has {len(row)} characters, and there are {len(self.columns)} columns"
                )
            if set(row) - COLOURS.keys():
                raise ValueError(f"a row has characters other than {''.join(COLOURS)}")

    def as_text(self) -> str:
        """Return the map as text: a line for each thread, or for neighbours that do the same."""
        lines = [
            f"{self.array}: which thread {LEGEND} which {self.unit}",
            f"columns: {self.unit} {_ranges(self.columns)}; lines: threads of block {self.block}",
        ]
        for number, rows in enumerate(self.phases):
            lines.append(f"after {number} barriers" if number != 1 else "after 1 barrier")
            first = 0
            for thread, row in enumerate(rows):
                if thread + 1 == len(rows) or rows[thread + 1] != row:
                    threads = f"{first}" if first == thread else f"{first}-{thread}"
                    lines.append(f"  thread {threads:>7}  {row}")
                    first = thread + 1
        return "\n".join(lines)

    def as_svg(self) -> str:
        """Return the map as SVG: the phases from left to right, a row for each thread."""
        threads = max((len(rows) for rows in self.phases), default=0)
        step = CELL * (len(self.columns) + 2)
        width, height = LEFT + max(step * len(self.phases), 40 * CELL), 50 + CELL * threads
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="9" '
            f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
            f'<text x="2" y="12" font-size="11">{escape(self.array)}: {escape(self.unit)} '
            f"{escape(_ranges(self.columns))}, block {self.block}</text>"
        ]
        for place, (character, meaning) in enumerate(MEANING.items()):
            x = 2 + 9 * CELL * place
            parts.append(f'<rect x="{x}" y="18" width="8" height="8" fill="{COLOURS[character]}"/>')
            parts.append(f'<text x="{x + 11}" y="26">{meaning}</text>')
        parts += [
            f'<text x="2" y="{49 + CELL * thread}">thread {thread}</text>' for thread in range(0, threads, 4)
        ]
        for number, rows in enumerate(self.phases):
            left = LEFT + step * number
            parts.append(f'<text x="{left}" y="38">{number} barriers before</text>')
            parts += self._squares(rows, left)
        return "\n".join([*parts, "</svg>\n"])

    def _squares(self, rows: list[str], left: int) -> list[str]:
        """Return the squares of one phase, with a note for the reader who points at one."""
        return [
            f'<rect x="{left + CELL * at}" y="{41 + CELL * thread}" width="{CELL - 1}" height="{CELL - 1}" '
            f'fill="{COLOURS[character]}"><title>thread {thread} {MEANING[character]} {escape(self.unit)} '
            f"{self.columns[at]}</title></rect>"
            for thread, row in enumerate(rows)
            for at, character in enumerate(row)
            if character != NOTHING
        ]


def access_map(
    recording: Recording, array: str, *, unit: str = "cell", block: tuple[int, ...] = (0, 0, 0)
) -> AccessMap:
    """Return the map of an array that was recorded. The columns are indices of its first axis.

    Raises KeyError if nothing of this name was recorded.
    """
    width = int(np.prod(recording.shapes[array][1:], dtype=int))
    is_shared = array in recording.shared_names
    phases = [
        _characters(phase, array, width, is_shared) for phase in recording.phases if phase.block == block
    ]
    columns = sorted({column for phase in phases for _, column in phase})
    rows = [
        [
            "".join(phase.get((thread, column), NOTHING) for column in columns)
            for thread in range(recording.threads)
        ]
        for phase in phases
    ]
    return AccessMap(array, unit, columns, rows, block)


def _characters(phase: Phase, array: str, width: int, is_shared: bool) -> dict[tuple[int, int], str]:
    """Return {(thread, column): character} of one phase. width: elements of a column."""
    found: dict[tuple[int, int], set[str]] = defaultdict(set)
    for (name, cell), accesses in phase.accesses.items():
        if name == array:
            races = is_shared and conflict(accesses) is not None
            for access in accesses:
                found[access.thread, cell // width].add(RACE if races else OPERATIONS[access.operation])
    return {place: _joined(characters) for place, characters in found.items()}


def _joined(characters: set[str]) -> str:
    """Return one character for all that a thread does with a column."""
    if RACE in characters:
        return RACE
    return characters.pop() if len(characters) == 1 else BOTH


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as text.

    >>> _ranges([0, 1, 2, 3, 7, 9, 10])
    '0-3, 7, 9-10'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
