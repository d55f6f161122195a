"""Writes the figures of docs/reference/benchmarks.md from the results that lie beside it.

    for part in kernels transport store scheduler engine ideas predictions simulator goodput faults; do
        mooncake-lite bench $part --json docs/reference/measured/$part.json
    done
    python -m kernels_numba.gpu_report --json docs/reference/measured/gpu.json
    python docs/tools/make_benchmarks.py

A test compares the page with what this would write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fill_readme import filled

FOLDER = Path(__file__).parents[1] / "reference"
PAGE = FOLDER / "benchmarks.md"
SIMULATOR = FOLDER.parent / "explain" / "simulator.md"

TITLES = {
    "kernels": "Kernels, float32 unless named otherwise",
    "gpu": "Kernels on a GPU",
    "transport": "Transport",
    "store": "Store: objects, tier and directory",
    "scheduler": "Scheduler: one decision of the control plane",
    "engine": "Engine: the default model on 2 threads",
    "ideas": "Ideas of the engine, on and off",
    "predictions": "Predicted against measured time to first token",
    "simulator": "The simulator beside live ranks",
    "goodput": "Goodput of a cluster of sleeping ranks by form of admission",
    "faults": "Faults: ranks, conductors and gateways killed under eight streams",
}
"""Part of the page -> its title, in this order."""


LIMITS = {"predictions": "goal", "simulator": "goal", "goodput": "best", "ideas": "bound"}
"""What the second table compares with, where that is no limit of the machine."""


def page() -> str:
    """The page with every part whose result is there."""
    there = [part for part in TITLES if (FOLDER / "measured" / f"{part}.json").is_file()]
    return filled(PAGE.read_text(encoding="utf-8"), "measured", "\n".join(map(section, there)))


def section(part: str) -> str:
    """One command's results: where and when, a table of figures, and one of what they are compared with."""
    found = json.loads((FOLDER / "measured" / f"{part}.json").read_text(encoding="utf-8"))
    machine, entries = found["machine"], found["rows"]
    program = "python -m kernels_numba.gpu_report" if part == "gpu" else f"mooncake-lite bench {part}"
    lines = [f"## {TITLES[part]}", "", f"`{program}` on {found['date'][:10]}: {described(machine)}.", ""]
    heads = ["measured", "ours", "peer", "peer's figure", "ratio"]
    if any("published" in entry for entry in entries):
        heads += ["published by", "published figure"]
    lines += table(heads, [row for entry in entries for row in against_peer(entry, len(heads) > 5)])
    limit = LIMITS.get(part, "limit")
    lines += table(["measured", "ours", limit, "its figure", "share"], limits(entries))
    return "\n".join(lines)


def described(machine: dict[str, Any]) -> str:
    """What was measured on."""
    if "gpu" in machine:
        versions = "".join(f", {name} {version}" for name, version in machine["versions"].items())
        return f"one {machine['gpu']}, CUDA {machine['cuda']}, Python {machine['python']}{versions}"
    cores = f"{machine['cores']} cores of {machine['cpu']}, Python {machine['python']}"
    return f"{cores}, load {machine['load']} before the run"


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """A table with one number in a cell, and an empty line after it; nothing when it has no rows."""
    rules = ["---" if column in (0, 2, 5) else "---:" for column in range(len(heads))]  # names, then figures
    cells = [f"| {' | '.join(row)} |" for row in [heads, *rows]]
    return [cells[0], f"|{'|'.join(rules)}|", *cells[1:], ""] if rows else []


def against_peer(entry: dict[str, Any], has_published: bool) -> list[list[str]]:
    """The rows of an entry in the first table: none if it has a limit alone, more for published figures."""
    unit, published = entry["unit"], entry.get("published", [])
    if entry["limit"] and not entry["peer"] and not published:
        return []
    peer = entry["peer"] or {"name": "", "value": None}
    cells = [entry["name"], with_unit(entry["ours"], unit), peer["name"], with_unit(peer["value"], unit)]
    cells.append(number(entry["ratio_to_peer"]))
    if not has_published:
        return [cells]
    found = [[other["name"], with_unit(other["value"], unit)] for other in published] or [["", ""]]
    return [cells + found[0], *([""] * len(cells) + other for other in found[1:])]


def limits(entries: list[dict[str, Any]]) -> list[list[str]]:
    """The rows of the second table: each limit once, however many peers there are."""
    found = {}
    for entry in entries:
        if limit := entry["limit"]:
            figures = [with_unit(entry["ours"], entry["unit"]), limit["name"]]
            figures += [with_unit(limit["value"], entry["unit"]), number(entry["ratio_to_limit"])]
            found[entry["name"], limit["name"]] = [entry["name"], *figures]
    return list(found.values())


def with_unit(value: float | None, unit: str) -> str:
    """A figure with its unit, or nothing."""
    return f"{number(value)} {unit}" if value is not None else ""


def number(value: float | None) -> str:
    """Three digits that mean something, with commas in what is large."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def simulator_page() -> str:
    """The page about the simulator, with how wrong it was."""
    found = json.loads((FOLDER / "measured" / "simulator.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in found["rows"]}
    heads = ["", "live", "simulated", "off", "spread of the live runs", "goal"]
    lines = [f"On {found['date'][:10]}, {described(found['machine'])}:", ""]
    lines += [f"| {' | '.join(heads)} |", "|---|---:|---:|---:|---:|---:|"]
    for name, row in rows.items():
        if error := rows.get(f"{name}, error"):
            spread, runs = error["peer"], row["runs"]
            widest = f"{number(spread['value'])} %, {runs} runs" if spread else "one run"
            goal = error["limit"]["value"]
            off = f"{number(error['ours'])} %"
            if error["ours"] > max(goal, spread["value"] if spread else 0.0):
                off = f"**{off}**"
            values = [with_unit(one, "s") for one in (row["peer"]["value"], row["ours"])]
            lines.append(f"| {name} | {' | '.join(values)} | {off} | {widest} | {number(goal)} % |")
        elif row["unit"] == "%":
            live, ours = row["peer"]["value"], row["ours"]
            off = f"{abs(ours - live):.1f} points"
            lines.append(f"| {name} | {live:.1f} % | {ours:.1f} % | {off} | | 1 point |")
    lines += ["", *covered(found["rows"])]
    return filled(SIMULATOR.read_text(encoding="utf-8"), "how wrong", "\n".join(lines) + "\n")


def covered(rows: list[dict[str, Any]]) -> list[str]:
    """What the page says about intervals."""
    found = [row for row in rows if row["unit"].startswith("of ")]
    shares = [f"{row['name'].split()[2]} for {row['ours']:.0f} {row['unit']}" for row in found]
    goal = found[0]["limit"]["value"]
    return [f"The live mean lay in its interval: {', '.join(shares)} runs; the goal is {goal:.0f}."]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    SIMULATOR.write_text(simulator_page(), encoding="utf-8")
