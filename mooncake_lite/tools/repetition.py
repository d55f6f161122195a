"""Notices that a text has begun to repeat itself and would go on for as long as it may.

Used by `chat`. Pure. A small model often ends in such a loop when it answers greedily.
"""

from __future__ import annotations

REPEATED_CHARS = 240
"""Characters that must be a repetition: three lines. A ruler of dashes or a row of a table is shorter."""

REPEATED_TIMES = 3
LONGEST_PERIOD = 1000
PROBE_CHARS = 40
"""Of the end of the text, which is looked for before itself."""


def repeated(text: str) -> int:
    """Return how many characters at the end of a text repeat what is before them; 0 if it is no loop.

    A loop is a piece of text that comes REPEATED_TIMES times after its first time, with at least
    REPEATED_CHARS characters in all.
    """
    if len(text) <= REPEATED_CHARS:
        return 0
    end = text[-LONGEST_PERIOD * (REPEATED_TIMES + 1) :]
    probe, found = end[-PROBE_CHARS:], len(end) - PROBE_CHARS
    while (found := end.rfind(probe, 0, found + PROBE_CHARS - 1)) >= 0:
        period = len(end) - PROBE_CHARS - found
        length = max(period * REPEATED_TIMES, REPEATED_CHARS)
        if length + period <= len(end) and end[-length:] == end[-length - period : -period]:
            while end[-length - 1 : -length] == end[-length - 1 - period : -length - period] != "":
                length += 1
            return length
    return 0
