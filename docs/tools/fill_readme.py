"""Writes what was measured into README.md: the end of the demo's output, and figures of benchmarks.

python docs/tools/fill_readme.py           put the results in docs/reference/measured/ into the page
python docs/tools/fill_readme.py --play    play the demo first (two minutes), on an idle machine

A test compares the page with what this would write.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
MEASURED = ROOT / "docs/reference/measured"
LAST_STEP = "Stopping it"
"""What the last line before the table begins with. The steps before it are worth seeing live only."""

LLAMA = "llama.cpp, GGUF as published"

FIGURES: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "engine", "decode, 1 sequence of 128 + 128 tokens", LLAMA,
        "decode one sequence of 128 + 128 tokens, 4-bit blocks of one GGUF file", "reading the weights once",
    ),
    (
        "engine", "prefill of 2,048 tokens, float32", LLAMA,
        "compute a prompt of 2,048 tokens, the same file", "its matrix products in torch",
    ),
    (
        "kernels", "decode 4 x 4096, 32/8 x 128", "torch SDPA on contiguous KV",
        "decode attention, paged float32 KV of 4 sequences of 4,096 tokens", "reading the KV once",
    ),
    (
        "transport", "read 1 MiB, same node", "MPI request and reply",
        "read 1 MiB from another rank of the same node", "a memory copy",
    ),
    (
        "transport", "read 1 MiB, two nodes (sockets)", "MPI request and reply",
        "the same between two network namespaces, our stand-in for two nodes", "a plain TCP socket",
    ),
    (
        "store", "get 1 MiB", "Mooncake Store, TCP loopback",
        "get 1 MiB from the object store, ours through shared memory", "a memory copy",
    ),
)  # fmt: skip
"""(part of the benchmarks, row, peer, what it measures, the limit)."""


PER_TOKEN = (
    ("in one process", "128 to 160", "TPOT, 1 x 128 + 32 tokens"),
    ("in one process", "2,048 to 2,080", "TPOT, 1 x 2048 + 32 tokens"),
    ("through four ranks", "128 to 256", "TPOT through 1+1+1+1 ranks, 1 stream of 128 + 128 tokens"),
)
"""(where, tokens of context, row of engine.json): times per token of one sequence on the same two cores."""

KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""Of the default model in float32: layers, K and V, KV heads, head dim, bytes."""


def result(part: str) -> Any:
    """What was measured."""
    return json.loads((MEASURED / f"{part}.json").read_text(encoding="utf-8"))


def figures() -> str:
    """The table of figures, and where and when each part was measured."""
    lines = ["| what | ours | the peer | the limit |", "|---|---:|---:|---:|"]
    for part, name, peer, what, limit in FIGURES:
        row = values(part, name, peer)
        unit = row["unit"]
        theirs = f"{amount(row['peer'])} {unit}, {peer}"
        beside = f"{amount(row['limit'])} {unit}, {limit}"
        lines.append(f"| {what} | {amount(row['ours'])} {unit} | {theirs} | {beside} |")
    where: dict[str, list[str]] = {}
    for part in dict.fromkeys(part for part, *_ in FIGURES):
        where.setdefault(measured_on(result(part)), []).append(part)
    lines += ["", *(f"Measured on {place}: {', '.join(found)}." for place, found in where.items())]
    return "\n".join(lines)


def amount(value: float) -> str:
    """A figure with two digits at least."""
    return f"{value:.1f}" if value < 20 else f"{value:,.0f}"


def per_token() -> str:
    """A table of times per token: one process beside the cluster of the demo."""
    rows = [(where, context, values("engine", name, "")["ours"]) for where, context, name in PER_TOKEN]
    demo = statistics.median(1e3 * row["tpot_s"] for row in result("demo")["rows"])
    rows.append(("through the demo's ranks, median", "1,630 to 1,750", demo))
    lines = [f"| {where} | {context} | {each_ms:.0f} ms |" for where, context, each_ms in rows]
    return "\n".join(["| one sequence | tokens of context | time per token |", "|---|---|---:|", *lines])


def break_even() -> str:
    """Below which bandwidth computing a prompt again is faster than loading its KV, on this machine."""
    tokens_per_s = values("engine", "prefill of 2,048 tokens, float32", "")["ours"]
    mb_per_s = tokens_per_s * KV_BYTES_PER_TOKEN / 1e6
    return (
        f"With our default model, of which one process on two cores computes {tokens_per_s:.0f} tokens/s, "
        f"that limit is {mb_per_s * 8e-3:.2f} Gbit/s ({mb_per_s:.0f} MB/s): "
        f"the KV of a token has {KV_BYTES_PER_TOKEN // 1024} KiB."
    )


def values(part: str, name: str, peer: str) -> dict[str, Any]:
    """The figures of one row, with units as measured. Raises LookupError when it was not measured."""
    for row in result(part)["rows"]:
        if row["name"] == name and (not peer or (row["peer"] or {}).get("name", "").startswith(peer)):
            found = {"ours": row["ours"], "unit": row["unit"]}
            found |= {kind: row[kind]["value"] for kind in ("peer", "limit") if row[kind]}
            return found
    raise LookupError(f"{part}.json has no row {name!r} with the peer {peer!r}")


def measured_on(found: dict[str, Any]) -> str:
    """Machine and day."""
    return f"{found['machine']['cores']} cores of {found['machine']['cpu']}, {found['date'][:10]}"


def shown(output: str) -> str:
    """The part of a demo's output that the README shows. Raises ValueError when it is not a whole demo."""
    lines = [line.rstrip() for line in output.rstrip().split("\n")]
    stops = [index for index, line in enumerate(lines) if line.startswith(LAST_STEP)]
    if not stops or not lines[-1].startswith("tokens identical: "):
        raise ValueError(f"no line begins with {LAST_STEP!r}, or the last one not with 'tokens identical: '")
    return "\n".join(lines[stops[-1] + 1 :]).strip("\n")


def filled(page: str, name: str, text: str) -> str:
    """A page with a text between the two marks of a name. Raises ValueError when a mark is missing."""
    first, last = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"the page has no {first.strip()} or no {last.strip()}")
    return f"{before}{first}{text}\n{last}{after}"


def page() -> str:
    """The README with what was measured."""
    demo = result("demo")
    parts = {
        "demo output": f"```text\n{demo['output']}\n```\n\n({measured_on(demo)}, with no other work)",
        "break-even": break_even(),
        "time per token": per_token(),
        "figures": figures(),
    }
    readme = README.read_text(encoding="utf-8")
    for name, text in parts.items():
        readme = filled(readme, name, text)
    return readme


def play() -> None:
    """Play the demo, and keep its rows and the end of its output."""
    file = MEASURED / "demo.json"
    command = [sys.executable, "-m", "mooncake_lite", "demo", "--json", str(file)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    found = {**result("demo"), "output": shown(run.stdout)}
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if "--play" in sys.argv[1:]:
        play()
    README.write_text(page(), encoding="utf-8")
