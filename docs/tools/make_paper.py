"""Plays the paper's experiments on the public trace, and fills docs/explain/reproducing-the-paper.md.

    MOONCAKE_LITE_TRACES=FOLDER make paper      plays all that has no result yet, then writes the page

The runs are the files of docs/tools/paper/, their results docs/reference/measured/paper/. A test compares the
page with what this writes from them.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from fill_readme import filled

from mooncake_lite.profiles.file import named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.figure import canvas
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.workloads.traces import Trace, TraceRequest

DOCS = Path(__file__).parents[1]
RUNS, RESULTS = DOCS / "tools" / "paper", DOCS / "reference" / "measured" / "paper"
PAGE = DOCS / "explain" / "reproducing-the-paper.md"

Row = tuple[dict[str, Any], dict[str, Any]]
"""The values of a run, and its result."""

MEAN_TTFT_S = {"random": 19.65, "least-loaded": 5.27, "local-cache": 3.58, "kvcache-centric": 3.07}
BANDWIDTH = {24: 5.09, 40: 2.40, 80: 1.73, 100: 1.60, 160: 1.41, 320: 1.25, 400: 1.25}
RECOMPUTED_S = 2.62
SHARES = {50: 3.5, 60: 14.7, 70: 37.7, 80: 66.2, 90: 86.7, 100: 96.6, 120: 99.3, 200: 100, 300: 100}
FORMS = {
    ("off", 0): ("vLLM", 1.661, (16.1, 38.8, 62.8)),
    ("hash", 0): ("vLLM, prefix caching", 1.523, (15.1, 34.3, 56.0)),
    ("off", 512): ("vLLM, chunks of 512", 2.021, (9.4, 28.8, 55.4)),
    ("off", 2048): ("vLLM, chunks of 2,048", 2.021, (9.4, 28.8, 55.4)),
}
"""Values of the paper (FAST'25, figures 1, 5, 8, 13; the shares of 8P8D from the plot of its figure 9)."""

AS_PROFILED, INFERRED = 0.11, 3.8
"""Milliseconds that a sequence adds to a decode step: by its arithmetic, and as the paper's shares say."""


def run(trace: Path) -> None:
    """Play every file without a result. Raises CalledProcessError when one cannot be played."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for file in sorted(RUNS.glob("*.toml")):
        result = RESULTS / f"{file.stem}.json"
        if not result.exists():
            print(file.stem, flush=True)
            command = [sys.executable, "-m", "mooncake_lite", "simulate", "sweep", str(file)]
            part = result.with_suffix(".part")
            subprocess.run([*command, "--trace", str(trace), "--json", str(part)], check=True)
            part.rename(result)


def rows(name: str) -> list[Row]:
    """Return the first seed's result of each combination of a file."""
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return [(row["values"], row["results"][0]) for row in found["rows"]]


def one(name: str, **values: Any) -> dict[str, Any]:
    """Return the result of the combination that has these values."""
    wanted = {key.replace("_", "-"): value for key, value in values.items()}
    return next(result for found, result in rows(name) if wanted.items() <= found.items())


def table(heads: list[str], lines: list[list[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *lines]) + "\n"


def beside(ours: float, paper: float | None, form: str = ".2f") -> list[str]:
    """Return three cells: ours, the paper's, and how far ours is from it."""
    if paper is None:
        return [format(ours, form), "-", "-"]
    return [format(ours, form), format(paper, form), f"{ours / paper - 1:+.0%}"]


def policies() -> str:
    """Figure 5: mean TTFT by policy and split, and ratios of neighbours."""
    names = list(MEAN_TTFT_S)
    ttft = {(row["nodes"], row["policy"]): found["ttft_s"]["mean"] for row, found in rows("policies")}
    splits = list(dict.fromkeys(nodes for nodes, _ in ttft))
    lines = [
        [name, *(f"{ttft[nodes, name]:.2f}" for nodes in splits), f"{MEAN_TTFT_S[name]:.2f}"]
        for name in names
    ]
    for slow, fast in pairwise(names):
        paper = MEAN_TTFT_S[slow] / MEAN_TTFT_S[fast]
        ratios = [ttft[nodes, slow] / ttft[nodes, fast] for nodes in splits]
        lines.append([f"{slow} / {fast}", *(f"{ratio:.2f}" for ratio in ratios), f"{paper:.2f}"])
    return table(["mean TTFT, s", *splits, "paper"], lines)


def prefill() -> str:
    """Figure 8: seconds of prefill per request."""
    ours = one("per_sequence", decode_ms_per_sequence=AS_PROFILED)["prefill_s_per_request"]
    lines = [["Mooncake, 8P8D", *beside(ours, 1.062, ".3f")]]
    for (sharing, chunk), (name, paper, _) in FORMS.items():
        found = one("colocated", prefix_sharing=sharing, max_num_batched_tokens=chunk)
        lines.append([name, *beside(found["prefill_s_per_request"], paper, ".3f")])
    return table(["seconds per request", "ours", "paper", "deviation"], lines)


def bandwidth() -> str:
    """Figure 13: TTFT by bandwidth, and the time to the second token, by which the KV is at decode."""
    alone = one("recompute")
    lines = [
        [f"{row['link-gbps']:g} Gbps", *beside(found["ttft_s"]["mean"], BANDWIDTH[row["link-gbps"]]),
         f"{found['second_token_s']['mean']:.2f}"]
        for row, found in rows("bandwidth")
    ]  # fmt: skip
    lines.append(
        [
            "nothing reused",
            *beside(alone["ttft_s"]["mean"], RECOMPUTED_S),
            f"{alone['second_token_s']['mean']:.2f}",
        ]
    )
    return table(["link", "mean TTFT, s", "paper", "deviation", "until the second token, s"], lines)


def per_sequence() -> str:
    """Shares within limits on TBT by the cost of a sequence in a decode step."""
    lines = [
        [f"{row['decode-ms-per-sequence']:g} ms",
         *(f"{100 * found['shares_within_tbt_ms'][str(ms)]:.1f}" for ms in SHARES)]
        for row, found in rows("per_sequence")
    ]  # fmt: skip
    lines.append(["paper", *(f"{share:.1f}" for share in SHARES.values())])
    return table(["% of requests within", *(f"{ms} ms" for ms in SHARES)], lines)


def capacity() -> str:
    """Figure 1: shares within three limits, and Mooncake's gain over the best of vLLM's forms."""
    limits = (100, 200, 300)
    shares = {"Mooncake, 8P8D": _shares(one("per_sequence", decode_ms_per_sequence=INFERRED), limits)}
    paper = {"Mooncake, 8P8D": (96.6, 100.0, 100.0)}
    for (sharing, chunk), (name, _, published) in FORMS.items():
        found = one("colocated", prefix_sharing=sharing, max_num_batched_tokens=chunk)
        shares[name], paper[name] = _shares(found, limits), published
    lines = [[name, *(f"{a:.1f} ({b:.1f})" for a, b in zip(shares[name], paper[name]))] for name in shares]
    gains = []
    for found in (shares, paper):
        first, *others = found.values()
        gains.append([mine / max(column) - 1 for mine, column in zip(first, zip(*others))])
    lines.append(["gain over the best vLLM", *(f"{a:+.0%} ({b:+.0%})" for a, b in zip(*gains))])
    return table(["% of requests within, ours (paper's)", *(f"{ms} ms" for ms in limits)], lines)


def _shares(result: dict[str, Any], limits: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(100 * result["shares_within_tbt_ms"][str(ms)] for ms in limits)


def split() -> str:
    """The share within both limits, and both latencies, by how many nodes prefill."""
    lines = [
        [
            row["nodes"],
            f"{found['slo_share']:.1%}",
            f"{found['ttft_s']['mean']:.2f}",
            f"{1000 * found['tbt_s']['mean']:.0f}",
        ]
        for row, found in rows("split")
    ]
    return table(["nodes", "within 30 s and 100 ms", "mean TTFT, s", "mean TBT, ms"], lines)


def overload() -> str:
    """Refusals, wasted prefills and goodput by form of admission, at twice the speed of the trace."""
    lines = []
    for row, found in rows("overload"):
        refused, wasted = sum(found["rejected"].values()), found["wasted_prefills"] * found["requests"]
        latencies = f"{found['ttft_s']['mean']:.1f}", f"{1000 * found['tbt_s']['mean']:.0f}"
        goodput = f"{found['goodput_rps']:.2f}"
        swing = f"{found['decode_load_swing']:.2f}"
        lines.append([row["admission"], f"{refused:,}", f"{wasted:,.0f}", goodput, *latencies, swing])
    heads = [
        "admission",
        "refused",
        "after the prefill",
        "goodput, requests/s",
        "TTFT, s",
        "TBT, ms",
        "swing",
    ]
    return table(heads, lines)


def hits() -> str:
    """Figure 10: tokens reused by what a node has, with caches of their own and with one pool."""
    lines, sizes = [], list[str]()
    for name, file, option in (
        ("each node its own", "hits_local", "kv-cache-bytes"), ("one pool", "hits_global", "node-dram"),
    ):  # fmt: skip
        found = {row[option]: result["hit_rate"]["all"] for row, result in rows(file)}
        sizes = list(found)
        lines.append([name, *(f"{100 * rate:.1f}" for rate in found.values())])
    return table(["% of prompt tokens reused, by memory of a node", *sizes], lines)


def copies() -> str:
    """Figure 11: how many blocks have how many copies at the end of the run."""
    found = one("per_sequence", decode_ms_per_sequence=AS_PROFILED)["copies"]
    return table(["copies of a block", *found], [["blocks", *(f"{count:,}" for count in found.values())]])


LENGTHS = (8_192, 16_384, 32_768, 65_536, 131_072)
ALONE = {
    "prefill": (1.00, 2.05, 4.48, 10.58, 27.52),
    "prefill, 95 % cached": (0.134, 0.227, 0.406, 0.882, 2.33),
    "KV to decode": tuple(tokens * 327_680 / 46e9 for tokens in LENGTHS),
    "decode of 128 tokens": (3.39, None, None, None, 3.94),
}
"""Seconds of one request (FAST'25, figure 14). KV moves at 46 GB/s there; of decode, the plot's ends."""


def alone_runs() -> dict[str, list[float]]:
    """Play one request of each length, and again with 95 % of its prompt cached. Returns seconds."""
    profile, found = named_profile("LLaMA3-70B-8xA800"), {name: list[float]() for name in ALONE}
    for tokens in LENGTHS:
        blocks = tokens // 512
        again = [*range(round(0.95 * blocks)), *range(blocks, 2 * blocks)][:blocks]
        asked = [(0.0, list(range(blocks))), (200_000.0, again)]
        trace = Trace([TraceRequest(at_ms, tokens, 128, ids) for at_ms, ids in asked])
        cluster = Cluster(profile=profile, nodes={"prefill": 1, "decode": 1})
        first, second = play(cluster, TraceSource(trace), seed=1).records
        found["prefill"].append(first.ttft_s)
        found["prefill, 95 % cached"].append(second.ttft_s)
        first_s, second_s, *_, last_s = first.token_times_s
        step_s = (last_s - second_s) / (len(first.token_times_s) - 2)
        found["KV to decode"].append(second_s - first_s - step_s)
        found["decode of 128 tokens"].append(128 * step_s)
    return found


def alone() -> str:
    """Figure 14: one request, by the length of its prompt."""
    found = json.loads((RESULTS / "alone.json").read_text(encoding="utf-8"))
    lines = [
        [
            name,
            *(f"{ours:.2f} ({f'{paper:.2f}' if paper else '-'})" for ours, paper in zip(found[name], papers)),
        ]
        for name, papers in ALONE.items()
    ]
    return table(["seconds, ours (paper's)", *(f"{tokens // 1024}k tokens" for tokens in LENGTHS)], lines)


def figures() -> dict[str, bytes]:
    """Return the page's figures by file name."""
    links = [(row["link-gbps"], found) for row, found in rows("bandwidth")]
    shares = [(row["decode-ms-per-sequence"], found) for row, found in rows("per_sequence")]
    alone_s = one("recompute")
    return {"paper-bandwidth.svg": _bandwidth_figure(links, alone_s), "paper-tbt.svg": _tbt_figure(shares)}


def _bandwidth_figure(links: list[tuple[float, dict[str, Any]]], alone: dict[str, Any]) -> bytes:
    file, at = io.BytesIO(), [gbps for gbps, _ in links]
    with canvas(file, ".svg", "paper bandwidth", (7, 3.4)) as (axes,):
        for name, key, style in (("first token", "ttft_s", "-"), ("second token", "second_token_s", "--")):
            axes.plot(at, [found[key]["mean"] for _, found in links], "k" + style, label=f"ours, {name}")
            axes.axhline(alone[key]["mean"], linestyle=style, color="k", alpha=0.3)
        axes.plot(list(BANDWIDTH), list(BANDWIDTH.values()), "C0o-", label="paper, first token")
        axes.axhline(RECOMPUTED_S, color="C0", alpha=0.4)
        axes.set(xlabel="link of a node, Gbps", ylabel="mean seconds", yscale="log")
        axes.legend(title="level lines: nothing reused", fontsize="small")
    return file.getvalue()


def _tbt_figure(shares: list[tuple[float, dict[str, Any]]]) -> bytes:
    file = io.BytesIO()
    with canvas(file, ".svg", "paper tbt", (7, 3.4)) as (axes,):
        for number, (ms, found) in enumerate(shares):
            within = [100 * found["shares_within_tbt_ms"][str(limit)] for limit in SHARES]
            alpha = 0.25 + 0.7 * number / len(shares)
            axes.plot(list(SHARES), within, "k-", alpha=alpha, label=f"{ms:g} ms per sequence")
        axes.plot(list(SHARES), list(SHARES.values()), "C0o", label="paper")
        axes.set(xlabel="limit on TBT, ms", ylabel="% of requests within", ylim=(0, 102))
        axes.legend(fontsize="small")
    return file.getvalue()


PARTS = (policies, prefill, bandwidth, per_sequence, capacity, split, overload, hits, copies, alone)


def page() -> str:
    """Return the page, with the tables of the results that are there."""
    text = PAGE.read_text(encoding="utf-8")
    for part in PARTS:
        text = filled(text, part.__name__, part())
    return text


def main(folder: str) -> int:
    """Play, and write the page. Returns the exit code."""
    trace = Path(folder) / "conversation_trace.jsonl"
    if not folder or not trace.is_file():
        print(f"make: {trace} is not there; name its folder in MOONCAKE_LITE_TRACES", file=sys.stderr)
        return 2
    try:
        run(trace)
    except subprocess.CalledProcessError as error:
        return error.returncode
    RESULTS.joinpath("alone.json").write_text(json.dumps(alone_runs(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    for name, content in figures().items():
        (PAGE.parent / "figures" / name).write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2] or [""]))
