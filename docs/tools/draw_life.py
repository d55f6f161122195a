"""Draws the life of a request into docs/explain/control.md, from the transition table itself.

Run it after a change of mooncake_lite/control/life.py; a test compares the page with the table.
"""

from __future__ import annotations

from pathlib import Path

from fill_readme import filled

from mooncake_lite.control.life import TRANSITIONS, Stage, Step

PAGE = Path(__file__).parents[1] / "explain" / "control.md"


def drawing() -> str:
    """The transition table as a Mermaid diagram, and as a table of what each step means."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {Stage.HELD.value}"]
    for (before, step), after in TRANSITIONS.items():
        target = "[*]" if after is Stage.OVER else after.value
        lines.append(f"    {before.value} --> {target}: {step.name.lower()}")
    lines += ["```", "", "| step | what happens to the request |", "|---|---|"]
    lines += [f"| {step.name.lower()} | {step.value} |" for step in Step]
    return "\n".join(lines)


def drawn(page: str) -> str:
    """The page with the diagram of today between its two marks."""
    return filled(page, "life of a request", drawing())


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
