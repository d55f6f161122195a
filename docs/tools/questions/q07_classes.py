"""Question 7: a batch job beside chat: shares of the cache, orders of the queue, and shedding."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

from mooncake_lite.tools.bench.cluster import Ask, at_their_times
from mooncake_lite.tools.bench.simulator_ranks import record_of
from mooncake_lite.workloads.arrivals import merged
from mooncake_lite.workloads.kinds import KINDS, Agents, Singles, made
from mooncake_lite.workloads.rescale import at_times, divided
from mooncake_lite.workloads.traces import Trace, TraceRequest
from questions.frame import SEEDS, Found, Point, Rows, emulated, grouped, simulated, table
from scheduler.classes import ServiceClass

CHAT = Agents(
    about="chat", instructions_tokens=1024, task_tokens=2048, result_tokens=1024, most_tokens=65_536,
    fork_share=0.0, median_turns=8, turns_spread=0.5, spread=0.6, answer_tokens=256, pause_s=40.0,
)  # fmt: skip
BATCH = replace(KINDS["unique"], own_tokens=16_384, answer_tokens=128)
LONG = Singles(
    about="long prompts, short answers", documents=300, document_tokens=24_000, hot_share=1.0, skew=0.0,
    own_tokens=24_000, question_tokens=256, answer_tokens=100, spread=0.3,
)  # fmt: skip
NODES, DRAM, MUCH, RATE, REQUESTS = "4P4D", "30GB", "200GB", 3.0, 300
SHARES, BATCH_RATES = (0.0, 0.25, 0.5, 0.75, 0.85, 0.95), (1.0, 1.5, 1.8)
QUEUES = {"fcfs": 0.1, "srpt": 0.1, "aged 0.03": 0.03, "aged 0.1": 0.1, "aged 0.5": 0.5, "fair": 0.1}
LIMITS_MS, LONG_RATE, GOOD_MS = (65, 50, 45, 40, 35), 4.0, 100
LIVE_SHARE, DIVIDE, LIVE_POOL, LIVE_REQUESTS, LIVE_RATE = 0.5, 16, 32 << 20, 160, 4.0


def points(quick: bool) -> list[Point]:
    """Return shares of the cache, orders of the queue at two rates of the job, admissions, and live runs."""
    seeds = SEEDS[:1] if quick else SEEDS
    found = [{"share": share, "dram": DRAM, "seed": seed} for share, seed in product(SHARES, seeds)]
    found += [{"share": 0.0, "dram": MUCH, "seed": seed} for seed in seeds]
    found += [
        {"queue": queue, "rate": rate, "seed": seed}
        for queue, rate, seed in product(QUEUES, BATCH_RATES, seeds)
    ]
    found += [
        {"admission": form, "limit_ms": limit, "seed": seed}
        for form, limit, seed in product(("predictive", "shed"), LIMITS_MS, seeds)
    ]
    return found[::6] if quick else [*found, *({"live": one, "alone": True} for one in (0.0, LIVE_SHARE))]


def mixed(requests: int, rate: float, batch_rate: float, seed: int) -> tuple[Trace, list[str]]:
    """Return chat and a batch job, and what each request is. No two come at one time."""
    traces = {
        "chat": made(CHAT, requests, rate, seed),
        "batch": made(BATCH, round(requests * batch_rate / rate), batch_rate, seed),
    }
    both, times = merged(list(traces.values())), list[float]()
    names = sorted(
        (one.timestamp, n, name) for n, (name, trace) in enumerate(traces.items()) for one in trace.requests
    )
    for one in both.requests:
        times.append(max(one.timestamp, times[-1] + 0.001 if times else 0.0))
    return replace(both, requests=at_times(both.requests, times)), [name for _, _, name in names]


def run(point: Point) -> Found:
    """Play chat and the job, or overload. Returns what the page needs."""
    if "live" in point:
        return _live(point["live"])
    seed = point["seed"]
    if "admission" in point:
        trace = made(LONG, REQUESTS, LONG_RATE, seed, "bursts")
        found = simulated(
            trace, seed, nodes="16P1D", admission=point["admission"], slo_tbt_ms=point["limit_ms"]
        )
        return {"good": found["shares_within_tbt_ms"][GOOD_MS], "refused": sum(found["rejected"].values())}
    trace, names = mixed(REQUESTS, RATE, point.get("rate", BATCH_RATES[0]), seed)
    classes = [
        ServiceClass(name="chat", weight=4.0, cache_share=point.get("share", 0.0)),
        ServiceClass(name="batch"),
    ]
    queue = point.get("queue", "fcfs")
    found = simulated(
        trace, seed, nodes=NODES, classes=[int(name == "batch") for name in names], groups=names,
        queue="aged-srpt" if "aged" in queue else queue, node_dram=point.get("dram", "1TB"),
        control={"classes": classes, "queue_ageing": QUEUES[queue]},
    )  # fmt: skip
    return {name: one["ttft_s"] for name, one in found["groups"].items()}


def _live(share: float) -> Found:
    trace, names = mixed(LIVE_REQUESTS, LIVE_RATE, LIVE_RATE / 3, 1)
    trace = divided(trace, DIVIDE)
    asks = [
        Ask(
            one.timestamp / 1000,
            _tokens(one, trace.block_tokens),
            one.output_length,
            {"x-service-class": name},
        )
        for one, name in zip(trace.requests, names)
    ]
    classes = json.dumps({"chat": {"weight": 4, "cache_share": share}, "batch": {}})
    flags = ("--classes", classes, "--prefix-sharing", "off")
    with emulated(DIVIDE, prefill=2, decode=2, store=1) as ranks:  # noqa: SIM117
        with replace(ranks, pool_bytes=LIVE_POOL).serve(*flags) as cluster:
            replies = asyncio.run(at_their_times(cluster.port, asks, lambda: None))
    found = grouped([record_of(one) for one in replies], names, (30.0, 0.1))
    return {name: one["ttft_s"] for name, one in found.items()}


def _tokens(request: TraceRequest, block_tokens: int) -> list[int]:
    ids, some = request.hash_ids, range(5000, 40_000)
    tokens = [token for one in ids for token in Random(f"{one}").choices(some, k=block_tokens)]
    return tokens[: request.input_length]


def numbers(rows: Rows) -> dict[str, Any]:
    """Return the numbers of the page."""
    found = dict[str, Any](
        dram=DRAM, much=MUCH, nodes=NODES, rate=RATE, requests=REQUESTS, batch_rate=BATCH_RATES[0],
        high_rate=BATCH_RATES[-1], seeds=len(SEEDS), divide=DIVIDE, good_ms=GOOD_MS, live_share=LIVE_SHARE,
    )  # fmt: skip
    floor = {name: rows.seeds(f"{name}.mean", share=0.0, dram=MUCH) for name in ("chat", "batch")}
    shares, queues = [], []
    for share in rows.values("share"):
        for name in ("chat", "batch"):
            mean = found[f"{name}_{share * 100:.0f}"] = rows.seeds(f"{name}.mean", share=share, dram=DRAM)
            found[f"{name}_over_{share * 100:.0f}"] = mean.over(floor[name])
        cells = (found[f"{name}_{share * 100:.0f}"] for name in ("chat", "batch"))
        shares.append([f"{share:.2f}", *(f"{one:.2f} s ({one.spread:.2f})" for one in cells)])
    shares.append([f"no eviction ({MUCH})", *(f"{one:.2f} s ({one.spread:.2f})" for one in floor.values())])
    best = min(rows.values("share"), key=lambda share: found[f"chat_{share * 100:.0f}"].middle)
    for queue, rate in product(QUEUES, BATCH_RATES):
        for name, which in (("chat", "mean"), ("batch", "p99")):
            key = f"{name}_{which}_{queue.replace(' ', '_').replace('.', '')}_{rate * 10:.0f}"
            found[key] = rows.seeds(f"{name}.{which}", queue=queue, rate=rate)
    for queue in QUEUES:
        name = queue.replace(" ", "_").replace(".", "")
        queues.append([queue, *(
            f"{found[f'{what}_{name}_{rate * 10:.0f}']:.1f} s"
            for rate in BATCH_RATES for what in ("chat_mean", "batch_p99")
        )])  # fmt: skip
    for form in ("predictive", "shed"):
        at = {limit: rows.seeds("good", admission=form, limit_ms=limit) for limit in LIMITS_MS}
        found[f"limit_{form}"] = max(at, key=lambda limit: at[limit].middle)
        found[f"good_{form}"] = at[found[f"limit_{form}"]]
        found[f"same_{form}"] = at[50]
    for share in rows.values("live"):
        for name in ("chat", "batch"):
            found[f"live_{name}_{share * 100:.0f}"] = 1000 * rows.seeds(f"{name}.mean", live=share).middle
    heads = [f"{what}, {rate:g}/s" for rate in BATCH_RATES for what in ("chat", "job's P99")]
    return found | {
        "harmed": sum(a > b for a, b in zip(found["chat_95"], found["chat_0"])),
        "best": best, "shares": table(["share", "chat", "batch"], shares),
        "queues": table(["queue", *heads], queues),
    }  # fmt: skip


def claims(of: dict[str, Any]) -> dict[str, bool]:
    """Return what the words of the page rest on."""
    best, late = f"{of['best'] * 100:.0f}", "batch_p99"
    return {
        "the best share is the one that the words name": of["best"] == 0.75,
        "the job evicts chat": min(of["chat_over_0"]) > 1.2,
        "a share gives it back": of[f"chat_over_{best}"].middle < 1.1 < of["chat_over_0"].middle,
        "the job pays nothing for it": of[f"batch_{best}"].middle < 1.02 * of["batch_0"].middle,
        "too large a share harms chat": of["chat_95"].middle > 1.5 * of["chat_0"].middle,
        "and the job": of["batch_95"].middle > 1.3 * of["batch_0"].middle,
        "in most seeds, and in one all shares gain": of["harmed"] == 2
        and any(
            all(of[f"chat_{share}"][seed] < of["chat_0"][seed] for share in (25, 50, 75, 85, 95))
            for seed in range(of["seeds"])
        ),
        "slow ageing keeps chat as fast as SRPT": all(
            min(of[f"chat_mean_aged_003_{rate}"].middle, of[f"chat_mean_aged_01_{rate}"].middle)
            < 1.02 * of[f"chat_mean_srpt_{rate}"].middle
            for rate in (15, 18)
        ),
        "at a low rate the order does not matter": of[f"{late}_srpt_10"].middle
        < 1.1 * of[f"{late}_fcfs_10"].middle,
        "SRPT starves under overload": min(of[f"{late}_srpt_18"]) > max(of[f"{late}_fcfs_18"]),
        "ageing bounds the wait": of[f"{late}_aged_05_18"].middle < 0.8 * of[f"{late}_srpt_18"].middle,
        "so do fair shares": of[f"{late}_fair_18"].middle < 0.8 * of[f"{late}_srpt_18"].middle,
        "fair shares keep chat fast": of["chat_mean_fair_18"].middle < 0.6 * of["chat_mean_fcfs_18"].middle,
        "tuned, shedding is not better than prediction": of["good_shed"].middle
        <= of["good_predictive"].middle,
        "with a loose limit it is": of["same_shed"].middle > of["same_predictive"].middle,
        "live, the share helps chat": of["live_chat_50"] < of["live_chat_0"],
    }


def draw(axes: Any, rows: Rows) -> None:
    """Draw what each order of the queue gives: mean TTFT of chat by the longest waits of the job."""
    for (queue, _), mark in zip(QUEUES.items(), "osv^<D"):
        x, y = (
            [rows.seeds(one, queue=queue, rate=BATCH_RATES[-1]).middle] for one in ("batch.p99", "chat.mean")
        )
        axes.plot(x, y, mark, label=queue)
    axes.set(xlabel="P99 of TTFT of the batch job, s", ylabel="mean TTFT of chat, s", ylim=(0, None))
    axes.legend()
