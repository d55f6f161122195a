"""Question 10: when nodes that do both carry more than two kinds of nodes."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

from mooncake_lite.planner.colocation import ways_of
from mooncake_lite.planner.compare import (
    LAYERS,
    LEAST,
    SPLIT,
    STEP,
    TUNED,
    Contender,
    Question,
    contenders,
    tuned,
)
from mooncake_lite.planner.first import First
from mooncake_lite.planner.jobs import jobs_of
from mooncake_lite.planner.limits import Limit
from mooncake_lite.profiles.file import PAPER_MACHINES, named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.tools.bench.simulator_ranks import SLO_S
from mooncake_lite.workloads.kinds import KINDS, Kind, made
from mooncake_lite.workloads.rescale import divided
from questions.frame import SEEDS, Found, Point, Rows, Seeds, emulated, table

NODES, RATE, TTFT, TBT = 4, 5.0, Limit(2.0, 0.9), Limit(0.1, 0.9)
ANSWERS, SHORT, LINKS = (8, 16, 32, 128, 256), (8, 16, 32, 128), (20, 60)
"""SHORT: answers with which nodes that hand KV over by layers are compared, too."""

REUSE: dict[str, dict[str, Any]] = {
    "none": {"hot_share": 0.0, "template_share": 0.0}, "half": {}, "most": {"hot_share": 1.0, "documents": 40}
}  # fmt: skip
"""Name -> what makes the workload reuse so much of its prompts."""

USUAL = {"answer": 256, "reuse": "half", "gbps": 0}
"""gbps 0: the link of the profile."""

CHUNK = "chunks of 512, kvcache-centric"
"""Of nodes that do both, the best one by closed forms, and by the simulations of question 2."""
BASE, COSTLY = "26.1 ms", "97.7 ms"
"""Of a mixed pass. The larger one is left to closed forms: nodes that do both carry a fraction with it."""

DIVIDE, LIVE_RATE, LIVE_CHUNK = 8, 6.0, 64


def points(quick: bool) -> list[Point]:
    """Return one parameter changed at a time; then both ways live."""
    others: list[dict[str, Any]] = [{"reuse": name} for name in REUSE if name != "half"] + [
        {"gbps": gbps} for gbps in LINKS
    ]
    changes = [{"answer": answer} for answer in ANSWERS] + others
    requests, seeds, changes = (40, SEEDS[:1], changes[:1]) if quick else (160, SEEDS, changes)
    found = [USUAL | one | {"seed": seed, "requests": requests} for one in changes for seed in seeds]
    found += [
        USUAL | {"answer": answer, "layers": True, "seed": seed, "requests": requests}
        for answer in SHORT for seed in seeds
    ]  # fmt: skip
    live = [{"live": mode, "requests": 120, "alone": True} for mode in ("split", "colocated")]
    return found + ([] if quick else live)


def run(point: Point) -> Found:
    """Find the highest rate of each way, by closed forms and by simulations."""
    if "live" in point:
        return _live(point)
    kind: Kind = replace(KINDS["rag"], answer_tokens=point["answer"], **REUSE[point["reuse"]])
    trace = made(kind, point["requests"], RATE, point["seed"])
    cluster = Cluster(
        profile=named_profile(PAPER_MACHINES), nodes={"prefill": 1, "decode": 1}, mode="split",
        sharing="hash", link_bytes_per_s=point["gbps"] * 1e9 / 8 or None,
    )  # fmt: skip
    jobs, question = jobs_of(trace), Question(trace, TTFT, TBT)
    ways = ways_of(First(cluster, jobs, TTFT, TBT), NODES)
    closed = {SPLIT: ways.split_rps} | {base: rate for base, (rate, _) in ways.both.items()}
    systems = (LAYERS,) if "layers" in point else (SPLIT, TUNED)
    rates = {
        name: _highest(one, question, point["seed"], jobs.rate, closed[name])
        for chain in contenders(replace(cluster, mode="pooled"), NODES) for one in chain
        if one.system in systems for name in [one.mixed or SPLIT] if name in (SPLIT, BASE)
    }  # fmt: skip
    return {"closed": closed, "simulated": rates, "reused": jobs.reused}


def _highest(one: Contender, question: Question, seed: int, rate: float, closed: float) -> float:
    """Return the highest rate at which a way keeps both limits, begun where closed forms say; 0: none."""
    names = [name for name in one.clusters if one.system != TUNED or name == CHUNK]
    some = replace(one, clusters={name: one.clusters[name] for name in names})
    level = round(log(max(closed, rate / 20) / rate, STEP))
    _, best = tuned(some, question.keeps(True, seed), ("", level))
    return rate * STEP**best if best >= LEAST else 0.0


def _live(point: Point) -> Found:
    """Play both ways on emulated ranks, and simulate the same ranks."""
    split = point["live"] == "split"
    nodes = {"prefill": 3, "decode": 1} if split else {"compute": 4}
    trace = divided(made(KINDS["rag"], point["requests"], LIVE_RATE, 1), DIVIDE)
    chunk = 512 if split else LIVE_CHUNK
    with emulated(DIVIDE, **nodes) as ranks:
        with ranks.serve("--mode", point["live"], "--max-num-batched-tokens", str(chunk)) as cluster:
            live = ranks.live(cluster.port, trace, 1, lambda: None)
        pool = ranks.pool_bytes if split else 0
        usual = replace(ranks, nodes={"prefill": 1, "decode": 1}).simulated()
        alike = replace(usual, mode=point["live"], nodes=nodes, batched_tokens=chunk, node_bytes=pool)
        outcome = play(alike, TraceSource(trace), 1)
    return {"live": live, "simulated": outcome.to_dict(*SLO_S)}


def numbers(rows: Rows) -> dict[str, Any]:
    """Return the numbers of the page: rates of split nodes over those of nodes that do both."""
    found, lines, same = dict[str, Any](), [], 0
    played = Rows(row for row in rows if "seed" in row[0] and "layers" not in row[0])
    settings = list(dict.fromkeys(tuple(point[name] for name in USUAL) for point, _ in played))
    for values in settings:
        setting = dict(zip(USUAL, values))
        of, cells = _name(setting), []
        reused = played.seeds(lambda one: 100 * one["reused"], **setting)
        for way in ("closed", "simulated"):
            split, both = (_rates(played, way, name, setting) for name in (SPLIT, BASE))
            found[f"{way}_{of}"] = split.over(both)
            cells += [f"{both:.2f}", f"{split:.2f}"]
        layers, shown = rows.of(layers=True), "not played"
        if layers.of(**setting):
            rate = _rates(layers, "simulated", SPLIT, setting)
            found[f"layers_{of}"], shown = rate.over(both), f"{rate:.2f}"
        link = f"{setting['gbps']}" if setting["gbps"] else "usual"
        lines.append([f"{setting['answer']}", f"{reused:.0f} %", link, *cells, shown])
        same += (found[f"closed_{of}"].middle > 1) == (found[f"simulated_{of}"].middle > 1)
    for way, answers in (("closed", ANSWERS), ("simulated", ANSWERS), ("layers", SHORT)):
        better = [answer for answer in answers if found[f"{way}_answer_{answer}"].middle > 1]
        found[f"turns_{way}"], found[f"below_{way}"] = min(better), max(set(answers) - set(better))
    found["costly"] = played.seeds(
        lambda one: one["closed"][BASE] / one["closed"][COSTLY], **{**USUAL, "gbps": 0}
    )
    for live in rows.values("live"):
        for how in ("live", "simulated"):
            for figure in ("ttft_s", "tbt_s"):
                value = rows.seeds(f"{how}.{figure}.p90", live=live).middle
                found[f"{how}_{figure}_{live}"] = 1000 * value
    heads = ["answer, tokens", "reused", "link, Gbit/s", "both, closed form", "split, closed form",
             "both, simulated", "split, simulated", "split by layers, simulated"]  # fmt: skip
    return found | {
        "lost": sum(one < 1 for one in found[f"simulated_answer_{found['below_simulated']}"]),
        "table": table(heads, lines), "same": same, "settings": len(settings), "nodes": NODES,
        "requests": rows[0][0]["requests"], "seeds": len(SEEDS), "ttft": TTFT.seconds, "base": BASE,
        "tbt": 1000 * TBT.seconds, "share": 100 * TTFT.share, "divide": DIVIDE, "live_rate": LIVE_RATE,
        "live_chunk": LIVE_CHUNK, "costly_base": COSTLY,
    }  # fmt: skip


def _rates(rows: Rows, way: str, name: str, setting: dict[str, Any]) -> Seeds:
    return rows.seeds(lambda one: one[way][name], **setting)


def _name(setting: dict[str, Any]) -> str:
    name = next((name for name in USUAL if setting[name] != USUAL[name]), "answer")
    return f"{name}_{setting[name]}"


def claims(of: dict[str, Any]) -> dict[str, bool]:
    """Return what the words of the page rest on."""
    return {
        "simulations turn by the length of answers": of["below_simulated"] < of["turns_simulated"] < 256,
        "in most seeds": of["lost"] >= 2,
        "by layers they turn at shorter answers": of["turns_layers"] < of["turns_simulated"],
        "with the usual answers splitting is above": min(of["simulated_answer_256"]) > 1,
        "but not far": max(of["simulated_answer_256"]) < 1.3,
        "reuse does not turn it": min(min(of["simulated_reuse_none"]), min(of["simulated_reuse_most"])) > 1,
        "closed forms say that it does": max(of["closed_reuse_most"]) < 1,
        "slow links do": max(of["simulated_gbps_60"]) < 0.9 and max(of["simulated_gbps_20"]) < 0.2,
        "closed forms agree": max(of["closed_gbps_60"]) < 0.95 and max(of["closed_gbps_20"]) < 0.5,
        "with the larger base nodes that do both carry much less": min(of["costly"]) > 3,
        "live, first tokens are later on nodes that do both": of["live_ttft_s_colocated"]
        > 1.2 * of["live_ttft_s_split"],
    }


def draw(axes: Any, rows: Rows) -> None:
    """Draw the ratio by the length of answers."""
    found = numbers(rows)
    styles = {"closed": ("k--", ANSWERS), "simulated": ("C0o-", ANSWERS), "layers": ("C1s-", SHORT)}
    names = {"closed": "closed form", "simulated": "simulated", "layers": "simulated, by layers"}
    for way, (style, answers) in styles.items():
        ratios = [found[f"{way}_answer_{answer}"].middle for answer in answers]
        axes.plot(answers, ratios, style, label=names[way])
    axes.axhline(1, color="0.8", linewidth=1)
    axes.set(xlabel="tokens of an answer", ylabel="rate of split nodes, over both", xscale="log")
    axes.set_xticks(ANSWERS, [str(answer) for answer in ANSWERS])
    axes.legend()
