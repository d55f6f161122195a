"""Hostile regions: what grading must survive, with a score for every submission and no process left.

Used by `labs dev check` and by the sample class of the tests. Each is the body of any region.
Explained in docs/explain/labs.md, "The sandbox".
"""

from __future__ import annotations

HOSTILE: dict[str, tuple[str, ...]] = {
    "endless loop": ("while True:", "    pass"),
    "fork bomb": ("import os", "while True:", "    os.fork()"),
    "memory hog": ('x = [b"x" * 100_000_000 for _ in range(100)]', "return x"),
    "print flood": ("while True:", '    print("x" * 10_000)'),
    "exit": ("import os", "os._exit(0)"),
}
"""name -> lines. The memory hog takes 10 GB."""


def hostile_text(name: str) -> str:
    """Return the text of a hostile region."""
    return "".join(f"        {line}\n" for line in HOSTILE[name])
