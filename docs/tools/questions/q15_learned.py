"""Question 15: a queue that trusts predicted lengths of answers, and what they may be worth."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import permutations
from math import inf, sqrt
from random import Random
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np

import scheduler as s
from mooncake_lite.gateway.exposition import PREFIX
from mooncake_lite.workloads.kinds import drawn
from mooncake_lite.workloads.traces import Trace, TraceRequest
from questions.frame import SEEDS, Found, Point, Rows, emulated, simulated, table
from scheduler.costs.lengths import Lengths
from scheduler.queues.predicted import Predicted

KNOWN = (1.0, 0.5, 0.25, 0.0, -0.25, -0.5, -1.0)
"""Correlation of the logarithms of predicted and real lengths: 1 is right, 0 noise, -1 the opposite."""

NODES, SLOTS, ANSWER, SPREAD = "2P2D", 8, 256, 1.0
RATES, RATE = (1.4, 1.8, 2.1, 2.4), 2.1
MOST_JOBS, CASES = 7, 1_112
NO_TERMS = s.Terms(0, 0, 0, 0, 0, 0, 0, 0, 0)


def points(quick: bool) -> list[Point]:
    """Return small cases; each correlation for each trust; then other loads, and a live run."""
    seeds, known, cases, rates = (SEEDS[:1], KNOWN[::6], 30, ()) if quick else (SEEDS, KNOWN, CASES, RATES)
    wanted = [(0.0, 1.0, RATE), *((trust, one, RATE) for trust in (0.5, 1.0) for one in known)]
    wanted += [
        (trust, one, rate) for rate in rates if rate != RATE for trust, one in ((0, 1), (0.5, 1), (0.5, -1))
    ]
    return [
        *({"slots": slots, "cases": cases, "seed": seed} for slots in (1, 2, 3) for seed in seeds),
        *(
            {"trust": trust, "known": one, "rate": rate, "seed": seed, "requests": 60 if quick else 600}
            for trust, one, rate in wanted for seed in seeds
        ),
        *([] if quick else [{"live": "predicted", "requests": 120, "alone": True}]),
    ]  # fmt: skip


def run(point: Point) -> Found:
    """Play one point."""
    if "slots" in point:
        return _small(point["slots"], point["cases"], point["seed"])
    dice = Random(f"lengths {point.get('seed', 1)}")
    lengths = [drawn(dice, ANSWER, SPREAD) for _ in range(point["requests"])]
    if "live" in point:
        return _live(_trace(dice, [max(1, one // 4) for one in lengths], 6.0, 64))
    told = dict(enumerate(predicted(Random(f"told {point['seed']}"), lengths, point["known"]), 1000))
    with patch.object(Lengths, "predicted", lambda self, one, tokens, most, so_far=0: told[tokens] - so_far):
        return simulated(
            _trace(dice, lengths, point["rate"], 1000), point["seed"], nodes=NODES, max_num_seqs=SLOTS,
            queue="predicted", node_dram="100GB", control={"trust": point["trust"]},
        )  # fmt: skip


def _trace(dice: Random, answers: Sequence[int], rate: float, least: int) -> Trace:
    """Return prompts of which no two share a block or have the same length."""
    at_s, ids, made = 0.0, iter(range(1 << 40)), list[TraceRequest]()
    for tokens, answer in enumerate(answers, least):
        at_s += dice.expovariate(rate)
        made.append(TraceRequest(at_s * 1000, tokens, answer, [next(ids) for _ in range(-(-tokens // 512))]))
    return Trace(made)


def predicted(dice: Random, lengths: Sequence[float], known: float) -> list[float]:
    """Return what is predicted of log-normal lengths, with this correlation of the logarithms."""
    logs = np.log(lengths)
    noise = SPREAD * sqrt(1 - known**2) * np.array([dice.gauss(0, 1) for _ in lengths])
    return [float(one) for one in np.exp(logs.mean() + known * (logs - logs.mean()) + noise)]


def _live(trace: Trace) -> Found:
    with (
        emulated(16, prefill=1, decode=2, store=1) as ranks,
        ranks.serve("--max-num-seqs", "2", "--queue", "predicted") as cluster,
    ):
        found = ranks.live(cluster.port, trace, 1, lambda: None)
        lines = httpx.get(f"{cluster.base_url}/metrics", timeout=10, trust_env=False).text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith(PREFIX + "queue_"))
    return found | {"queue": {name.removeprefix(PREFIX): float(value) for name, value in values.items()}}


def _small(slots: int, cases: int, seed: int) -> Found:
    """Judge a decode instance by all orders of up to seven answers. Every other case is there at once."""
    dice, q = Random(f"cases {slots} {seed}"), slots // 2
    found = {"late": 0, "above": 0, **dict.fromkeys(("right", "wrong", "none"), 1.0)}
    for number in range(cases):
        work = [dice.lognormvariate(0, SPREAD) for _ in range(dice.randint(2, MOST_JOBS))]
        arrived = [0.0 if number % 2 else dice.uniform(0, len(work)) for _ in work]
        known = dice.choice((1.0, *KNOWN[1::2]))
        told = predicted(dice, work, known)
        best, (ours, bound) = best_sum(slots, work, arrived), _played(slots, 0.5, work, arrived, told)
        error = (len(work) - 1) * sum(abs(one - other) for one, other in zip(work, told))
        found["late"] += int(bound.late > 0 or bound.waited_s > bound.most_s + 1e-6)
        found["above"] += int(q > 0 and number % 2 and ours > slots / q * best + error / q + 1e-6)
        others = {"right" if known == 1 else "wrong": ours, "none": _played(slots, 0, work, arrived, told)[0]}
        found |= {name: max(found[name], one / best) for name, one in others.items()}
    return found


def _played(slots: int, trust: float, work: Any, arrived: Any, told: Any) -> tuple[float, Any]:
    """Return the sum of times from arrival to end, and the bound that the queue has computed."""
    state, total = s.State(99, queue=Predicted(trust)), -sum(arrived)
    state.add_instance(1, 0, ["prefill"], len(work))
    state.add_instance(2, 0, ["decode"], slots)
    events = [(at, number, True) for number, at in enumerate(arrived)]
    events.sort()
    while events:
        now, number, comes = heappop(events)
        if comes:
            asked = s.Request(f"{number}", 64, (), 64, 16, arrived_s=now, predicted_tokens=told[number])
            state.wait_in_line(asked, now)
        else:
            state.forget(f"{number}", now)
            total += now
        if events and events[0][0] == now:
            continue
        while (head := state.held.head()) is not None and len(state.open_prefills()):
            state.place(head, s.Placement(head.request_id, 1, 2, False, 0, NO_TERMS), now)
            heappush(events, (now + work[int(head.request_id)], int(head.request_id), False))
    return total, state.held.bound(inf)


def best_sum(slots: int, work: Sequence[float], arrived: Sequence[float]) -> float:
    """Return the least sum of times from arrival to end, over all orders, each as early as it can be."""
    orders = np.array(list(permutations(range(len(work)))))
    free, total, every = np.zeros((len(orders), slots)), np.zeros(len(orders)), np.arange(len(orders))
    for column in orders.T:
        first = free.argmin(axis=1)
        ends = np.maximum(free[every, first], np.take(arrived, column)) + np.take(work, column)
        free[every, first] = ends
        total += ends
    return float(total.min() - sum(arrived))


def numbers(rows: Rows) -> dict[str, Any]:
    """Return the numbers of the page: times as ratios to those of first come, first served."""
    found, lines = dict[str, Any](), []
    base = {
        (path, rate): rows.seeds(path, trust=0.0, rate=rate)
        for path in ("ttft_s.mean", "ttft_s.p99") for rate in RATES
    }  # fmt: skip
    for known in KNOWN:
        line = [f"{known:g}"]
        for trust in (0.5, 1.0):
            for path in ("ttft_s.mean", "ttft_s.p99"):
                ratio = rows.seeds(path, trust=trust, known=known, rate=RATE).over(base[path, RATE])
                found[f"{path[7:]}_{trust * 100:.0f}_{known * 100:.0f}"] = ratio
                line.append(f"{ratio:.2f}")
        lines.append(line)
    for rate in RATES:
        for known in (1.0, -1.0):
            ours = rows.seeds("ttft_s.mean", trust=0.5, known=known, rate=rate)
            found[f"rate_{known:.0f}_{10 * rate:.0f}"] = ours.over(base["ttft_s.mean", rate])
    bounds = [one["queue_bound"] for point, one in rows if point.get("trust") == 0.5]
    small = [one for point, one in rows if "slots" in point]
    queue = next(one["queue"] for point, one in rows if "live" in point)
    pays = [known for known in KNOWN if found[f"mean_50_{known * 100:.0f}"].middle < 1]
    heads = ["correlation", "mean, half", "P99, half", "mean, all", "P99, all"]
    gains = [found[f"mean_{trust}_100"].middle for trust in (50, 100)]
    return found | {
        "share": (1 - gains[0]) / (1 - gains[1]),
        "table": table(heads, lines), "cases": sum(point["cases"] for point, _ in rows if "slots" in point),
        "most_jobs": MOST_JOBS, "above": sum(one["late"] + one["above"] for one in small),
        "turns": min(pays), "stops": max(known for known in KNOWN if known not in pays),
        **{name: max(one[name] for one in small[len(SEEDS) :]) for name in ("right", "wrong", "none")},
        "late": sum(bound["late"] for bound in bounds), "begun": sum(bound["requests"] for bound in bounds),
        "loose": rows.seeds(
            lambda one: one["queue_bound"]["most_s"] / one["queue_bound"]["waited_s"],
            trust=0.5, known=1.0, rate=RATE,
        ),
        "live_late": queue["queue_bound_exceeded_total"], "live_s": queue["queue_wait_seconds_total"],
        "live_most_s": queue["queue_wait_bound_seconds_total"], "nodes": NODES, "per_node": SLOTS,
        "rate": RATE, "requests": rows.of(trust=0.0)[0][0]["requests"], "seeds": len(SEEDS),
        "answer": ANSWER, "least_rate": RATES[0], "most_rate": RATES[-1],
    }  # fmt: skip


def claims(of: dict[str, Any]) -> dict[str, bool]:
    """Return what the words of the page rest on."""
    return {
        "no case is above its bound": of["above"] == of["late"] == of["live_late"] == 0,
        "right predictions pay": max(of["mean_50_100"]) < 0.8,
        "predictions pay as long as they know anything": -0.3 < of["stops"] <= 0.0 <= of["turns"] + 0.25,
        "noise leaves the mean as it is": max(of["mean_50_0"]) < 1.1,
        "the slowest wait longer, with half of the slots less so": 1.1
        < of["p99_50_100"].middle
        < of["p99_100_100"].middle,
        "with all slots wrong ones cost more than with half": of["mean_100_-100"].middle
        > 1.3 * of["mean_50_-100"].middle,
        "half of the slots keep the slowest answers": of["p99_50_-100"].middle
        < 0.5 * of["p99_100_-100"].middle,
        "two thirds of the gain come with half of the slots": (1 - of["mean_50_100"].middle)
        > 0.6 * (1 - of["mean_100_100"].middle),
        "the bound is loose": of["loose"].middle > 3,
    }


def draw(axes: Any, rows: Rows) -> None:
    """Draw TTFT by correlation."""
    base = rows.seeds("ttft_s.mean", trust=0.0, rate=RATE)
    for trust, style, name in ((0.5, "C0o-", "half of the slots"), (1.0, "C1s-", "all slots")):
        ratios = [
            rows.seeds("ttft_s.mean", trust=trust, known=one, rate=RATE).over(base).middle for one in KNOWN
        ]
        axes.plot(KNOWN, ratios, style, label=f"{name} by predicted length")
    axes.axhline(1, color="k", linestyle="--", label="first come, first served")
    axes.set(xlabel="correlation of predicted and real lengths", ylabel="mean TTFT, ratio", yscale="log")
    axes.invert_xaxis()
    axes.legend()
