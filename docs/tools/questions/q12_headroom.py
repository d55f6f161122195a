"""Question 12: how near to the least possible TTFT a cluster comes, and what the rest is made of."""

from __future__ import annotations

from typing import Any

from mooncake_lite.planner.bounds import bounds_of
from mooncake_lite.planner.jobs import jobs_of
from mooncake_lite.profiles.costs import pass_seconds
from mooncake_lite.profiles.file import PAPER_MACHINES, OverheadsSection, Profile, named_profile
from mooncake_lite.workloads.kinds import KINDS, made
from mooncake_lite.workloads.rescale import at_times, divided, sped, spread
from mooncake_lite.workloads.traces import Trace
from questions.frame import SEEDS, Found, Point, Rows, emulated, public_trace, simulated, table

SYSTEMS = {
    "fcfs": ("kvcache-centric", "fcfs"), "srpt": ("kvcache-centric", "srpt"),
    "blind": ("least-loaded", "fcfs"),
}  # fmt: skip
"""Name -> policy, and order of the queue of each node."""

IDEAL = ("central", "shortest")
"""Of `planner.bounds`: one queue for all nodes with free reuse, by arrival and shortest first."""

NODES, WINDOW = 4, 3_500
LOADS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)
FAR, LIVE_LOAD, LIVE_NODES, DIVIDE = 1.5, 0.7, 2, 8


def points(quick: bool) -> list[Point]:
    """Return each system and the bounds at loads that rise; then two queues live."""
    requests, seeds, loads = (60, SEEDS[:1], LOADS[:2]) if quick else (600, SEEDS, LOADS)
    found = [
        {"system": system, "load": load, "seed": seed, "requests": requests}
        for load in loads for system in ("bounds", *SYSTEMS) for seed in seeds
    ]  # fmt: skip
    live = [{"live": queue, "requests": 200, "alone": True} for queue in ("fcfs", "srpt")]
    return found + ([] if quick else live)


def run(point: Point) -> Found:
    """Play a window of the conversation trace at a load, or bound its TTFT."""
    if "live" in point:
        return _live(point)
    machines, seed = named_profile(PAPER_MACHINES), point["seed"]
    trace = _window(point["requests"], seed)
    trace = sped(trace, point["load"] / _bounds(trace, machines, NODES)["load"])
    if point["system"] == "bounds":
        return _bounds(trace, machines, NODES)
    policy, queue = SYSTEMS[point["system"]]
    found = simulated(trace, seed, nodes=f"{NODES}P{NODES}D", policy=policy, queue=queue)
    return {name: found[name] for name in ("ttft_s", "hit_rate", "prefill_s_per_request")}


def _window(requests: int, seed: int) -> Trace:
    """Return requests of another part of the trace for each seed, spread within its ticks."""
    trace = spread(public_trace("conversation_trace.jsonl"), seed)
    chosen = trace.requests[(seed - 1) * WINDOW :][:requests]
    times = [one.timestamp - chosen[0].timestamp for one in chosen]
    return Trace(at_times(chosen, times), trace.block_tokens)


def _bounds(trace: Trace, machines: Profile, nodes: int) -> Found:
    over, pass_s = machines.overheads or OverheadsSection(), pass_seconds(machines)
    jobs = jobs_of(trace)
    found = bounds_of(jobs, nodes, lambda load: pass_s(load) + over.step_s, over.request_s)
    names = ("load", "own", "least", *IDEAL)
    return {name: getattr(found, name) for name in names} | {"reused": jobs.reused}


def _live(point: Point) -> Found:
    trace = divided(made(KINDS["rag"], point["requests"], 2.0, 1), DIVIDE)
    with emulated(DIVIDE, prefill=LIVE_NODES, decode=LIVE_NODES, store=1) as ranks:
        trace = sped(trace, LIVE_LOAD / _bounds(trace, ranks.profile, LIVE_NODES)["load"])
        with ranks.serve("--queue", point["live"]) as cluster:
            found = ranks.live(cluster.port, trace, 1, lambda: None)
        return found | {"bounds": _bounds(trace, ranks.profile, LIVE_NODES)}


def numbers(rows: Rows) -> dict[str, Any]:
    """Return the numbers of the page: times as ratios to the bounds, by load in per cent."""
    found, lines, loads = dict[str, Any](), [], rows.values("load")
    for load in loads:
        at = f"{100 * load:.0f}"
        for figure in ("mean", "p99"):
            bound = rows.seeds(f"least.{figure}", system="bounds", load=load)
            for system in SYSTEMS:
                took = rows.seeds(f"ttft_s.{figure}", system=system, load=load)
                found[f"{figure}_{system}_{at}"] = took.over(bound)
            for system in IDEAL:
                took = rows.seeds(f"{system}.{figure}", system="bounds", load=load)
                found[f"{figure}_{system}_{at}"] = took.over(bound)
            found[f"tight_{figure}_{at}"] = bound.over(
                rows.seeds(f"own.{figure}", system="bounds", load=load)
            )
        systems = ("blind", "fcfs", "srpt", *IDEAL)
        lines.append([f"{at} %", *(f"{found[f'mean_{one}_{at}']:.2f}" for one in systems)])
        for system in SYSTEMS:
            work = rows.seeds("prefill_s_per_request", system=system, load=load)
            own = rows.seeds(lambda one: one["own"]["mean"], system="bounds", load=load)
            found[f"work_{system}_{at}"] = work.over(own)

    def first(name: str, most: float) -> float:
        over = [load for load in loads if found[f"{name}_{100 * load:.0f}"].middle > most]
        return 100 * min(over, default=9)

    for live in rows.values("live"):
        found[f"live_{live}"] = rows.seeds(
            lambda one: one["ttft_s"]["mean"] / one["bounds"]["least"]["mean"], live=live
        ).middle
    heads = ["busy", "least-loaded", "kvcache-centric", "with SRPT", "one queue", "one queue, shortest first"]
    return found | {
        "table": table(heads, lines), "requests": rows[0][0]["requests"], "nodes": NODES, "far": FAR,
        "seeds": len(SEEDS), "turns_fcfs": first("mean_fcfs", FAR), "turns_srpt": first("mean_srpt", FAR),
        "turns_blind": first("mean_blind", FAR), "turns_bound": first("tight_mean", 1.02),
        "live_load": 100 * LIVE_LOAD, "live_nodes": LIVE_NODES, "divide": DIVIDE,
    }  # fmt: skip


def claims(of: dict[str, Any]) -> dict[str, bool]:
    """Return what the words of the page rest on."""
    return {
        "with few requests little can be gained": max(of["mean_fcfs_30"]) < 1.2,
        "the distance grows within the sweep": 30 < of["turns_fcfs"] <= of["turns_srpt"] < 90,
        "hardly any work is done twice": max(of["work_fcfs_90"]) < 1.03,
        "a policy that is blind to prefixes does more work": min(of["work_blind_90"]) > 1.05,
        "the bound says more than the own work only without time to spare": of["turns_bound"] >= 100,
        "order helps": of["mean_srpt_90"].middle < 0.9 * of["mean_fcfs_90"].middle,
        "one queue helps as well": of["mean_shortest_90"].middle < 0.8 * of["mean_srpt_90"].middle,
        "late binding gives less than the order": of["mean_fcfs_90"].middle - of["mean_central_90"].middle
        < of["mean_fcfs_90"].middle - of["mean_srpt_90"].middle,
        "and helps in each order": of["mean_central_90"].middle < 0.9 * of["mean_fcfs_90"].middle,
        "the tail pays for it": of["p99_srpt_90"].middle > of["p99_fcfs_90"].middle,
        "live, the order helps too": 1 < of["live_srpt"] < of["live_fcfs"],
    }


def draw(axes: Any, rows: Rows) -> None:
    """Draw the ratios of means to the bound."""
    found, loads = numbers(rows), rows.values("load")
    styles = {"blind": "0.6", "fcfs": "C0o-", "srpt": "C1s-", "central": "k:", "shortest": "k--"}
    names = {"blind": "least-loaded", "fcfs": "kvcache-centric", "srpt": "kvcache-centric, SRPT",
             "central": "one queue", "shortest": "one queue, shortest first"}  # fmt: skip
    for system, style in styles.items():
        ratios = [found[f"mean_{system}_{100 * load:.0f}"].middle for load in loads]
        line = {"color": style} if style == "0.6" else {}
        axes.plot(loads, ratios, *([] if line else [style]), label=names[system], **line)
    axes.axhline(1, color="0.8", linewidth=1)
    axes.set(xlabel="own work of all prompts, of the time of all nodes", ylabel="mean TTFT, times the bound")
    axes.set(yscale="log", ylim=(0.9, 20))
    axes.legend(fontsize="small")
