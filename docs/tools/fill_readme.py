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

GENERATE = "transformers generate, float32"
LLAMA = "llama.cpp, GGUF as published"

FIGURES: tuple[tuple[str, str, str, str], ...] = (
    (
        "engine", "decode, 1 sequence of 128 + 128 tokens", LLAMA,
        "* From the 4-bit blocks of one GGUF file, with 2 threads in one process, one sequence of 128 + 128 "
        "tokens decodes at {ours:.0f} tokens/s with ours, and at {peer:.0f} with llama.cpp.",
    ),
    (
        "engine", "prefill of 2,048 tokens, float32", LLAMA,
        "* A prompt of 2,048 tokens is computed at {ours:.0f} tokens/s from the same file, and at "
        "{peer:.0f} with llama.cpp.",
    ),
    (
        "engine", "decode, 1 sequence of 128 + 128 tokens", GENERATE,
        "* `generate` of transformers, which reads float32 tensors, decodes {peer:.0f} tokens/s. With "
        "float32 tensors on both sides [a step takes as long as torch's]"
        "(docs/explain/model.md#weights-as-they-are-published): what gains is the format.",
    ),
    (
        "kernels", "decode 4 x 4096, 32/8 x 128", "torch SDPA on contiguous KV",
        "* Decode attention over paged float32 KV is {ratio:.1f} times as fast as torch's over contiguous KV "
        "(4 sequences of 4,096 tokens, 32/8 heads of 128, 2 threads).",
    ),
    (
        "kernels", "gather 71 MB, codec none", "NumPy indexing",
        "* Gathering pages into a pool block runs at {ours:.0f} GB/s; torch's copy of contiguous memory at "
        "{limit:.0f} GB/s (our stores do not read first what they overwrite).",
    ),
    (
        "transport", "read 1 MiB, same node", "MPI request and reply",
        "* A read of 1 MiB from another rank of the same node runs at {ours:.0f} GB/s, {share:.1f} of one "
        "memory copy, through shared memory.",
    ),
    (
        "transport", "read 4 KiB, two nodes (sockets)", "MPI request and reply",
        "* Between two network namespaces of one machine, our stand-in for two nodes, plain MPI is faster: a "
        "request and reply of 4 KiB takes {peer:.0f} us, our read {ours:.0f} us.",
    ),
    (
        "transport", "read 1 MiB, two nodes (sockets)", "MPI request and reply",
        "* Likewise, a read of 1 MiB has {ratio:.2f} of plain MPI's bandwidth.",
    ),
    (
        "store", "tier write, 128 blocks of 1 MiB, 2 files", "plain files, fsync each",
        "* The SSD tier writes {ours:.1f} GB/s durably; plain files, each synced, {peer:.1f} GB/s.",
    ),
    (
        "store", "get 1 MiB", "Mooncake Store, TCP loopback",
        "* A get of 1 MiB from the object store takes {ours:.0f} us through shared memory. Mooncake Store "
        "over TCP takes {peer:.0f} us.",
    ),
    (
        "store", "get 1 MiB, p99", "Mooncake Store, TCP loopback",
        "* The 99th percentile of these gets is {ours:.0f} us with ours, {peer:.0f} us with Mooncake Store.",
    ),
)  # fmt: skip
"""(part of the benchmarks, row, peer or "", sentence)."""


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
    """The list of figures, and where and when each part was measured."""
    lines = [sentence.format(**values(part, name, peer)) for part, name, peer, sentence in FIGURES]
    parts = dict.fromkeys(part for part, *_ in FIGURES)
    where: dict[str, list[str]] = {}
    for part in parts:
        where.setdefault(measured_on(result(part)), []).append(part)
    lines += ["", *(f"Measured on {place}: {', '.join(found)}." for place, found in where.items())]
    return "\n".join(lines)


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


def values(part: str, name: str, peer: str) -> dict[str, float]:
    """The figures of one row, with units as measured. Raises LookupError when it was not measured."""
    for row in result(part)["rows"]:
        if row["name"] == name and (not peer or (row["peer"] or {}).get("name", "").startswith(peer)):
            found = {"ours": row["ours"], "ratio": row["ratio_to_peer"], "share": row["ratio_to_limit"]}
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
