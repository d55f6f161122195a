"""Question 16: what placement gains that knows which nodes share an uplink, by its oversubscription."""

from __future__ import annotations

from typing import Any

from mooncake_lite.workloads.kinds import Singles, made
from questions.frame import SEEDS, Found, Point, Rows, simulated, table

DOCUMENTS = Singles(
    about="questions about documents: 60 % about 60 hot ones, 40 % about documents of their own",
    documents=60, document_tokens=10_000, hot_share=0.6, own_tokens=10_000, question_tokens=500,
    answer_tokens=200,
)  # fmt: skip
NODES, RACKS, IN_RACK = "8P8D", "0,0,0,0,1,1,1,1,0,0,0,0,1,1,1,1", 8
RATE, LINK = 3.0, 100
OVER = (1, 4, 8, 12, 16, 24, 32)
"""Bandwidth of all links of a rack's nodes, as a multiple of that of its uplink."""
POLICIES = {"blind": "global-cache", "topology": "topology"}


def points(quick: bool) -> list[Point]:
    """Return both policies on uplinks that become narrower."""
    requests, seeds, over = (60, SEEDS[:1], OVER[:1] + OVER[-1:]) if quick else (400, SEEDS, OVER)
    return [
        {"policy": policy, "over": one, "seed": seed, "requests": requests}
        for one in over for policy in POLICIES for seed in seeds
    ]  # fmt: skip


def run(point: Point) -> Found:
    """Play questions about documents on two racks."""
    return simulated(
        made(DOCUMENTS, point["requests"], RATE, point["seed"]), point["seed"], nodes=NODES, racks=RACKS,
        policy=POLICIES[point["policy"]], link_gbps=LINK, site_gbps=IN_RACK * LINK / point["over"],
    )  # fmt: skip


def numbers(rows: Rows) -> dict[str, Any]:
    """Return times and bytes of both policies, and their ratios, by oversubscription."""
    found, lines, over = dict[str, Any](), [], rows.values("over")
    for one in over:
        first, second, sites, hits = (
            {name: rows.seeds(number, policy=name, over=one) for name in POLICIES}
            for number in ("ttft_s.mean", "second_token_s.mean", "bytes_moved.sites", "hit_rate.all")
        )
        found[f"first_{one}"] = first["topology"].over(first["blind"])
        found[f"second_{one}"] = second["topology"].over(second["blind"])
        found[f"bytes_{one}"] = sites["topology"].over(sites["blind"])
        for name in POLICIES:
            found |= {f"hits_{name}_{one}": hits[name], f"seconds_{name}_{one}": second[name]}
        cells = [(first, "{:.2f} s"), (second, "{:.2f} s"), (sites, "{:,.0f} GB")]
        lines.append(
            [f"{one}:1"]
            + [
                form.format(cell[name].middle / (1e9 if "GB" in form else 1))
                for cell, form in cells for name in POLICIES
            ]
        )  # fmt: skip
    gains = [one for one in over if max(found[f"second_{one}"]) < 0.95]
    heads = [f"{what}, {name}" for what in ("TTFT", "second token", "between racks") for name in POLICIES]
    marks = {
        "turns": min(gains, default=0), "before": max((one for one in over if one not in gains), default=0),
        "most": over[-1],
    }  # fmt: skip
    return found | marks | {f"{name}_to": f"{one}:1" for name, one in marks.items()} | {
        "table": table(["oversubscription", *heads], lines), "requests": rows[0][0]["requests"],
        "least": over[0], "gain": found[f"second_{over[-1]}"], "even": found["second_1"],
        "bytes_most": found[f"bytes_{over[-1]}"],
        **{f"sent_{name}": _gigabytes(rows, name, over[-1]) for name in POLICIES},
        "before_gain": found[f"second_{marks['before']}"],
        "turn_gain": found[f"second_{min(gains, default=over[-1])}"],
        "hits_blind": found[f"hits_blind_{over[-1]}"], "hits_topology": found[f"hits_topology_{over[-1]}"],
        "nodes": NODES, "rate": RATE, "link": LINK,
        "seeds": len(SEEDS), "in_rack": IN_RACK,
    }  # fmt: skip


def _gigabytes(rows: Rows, policy: str, over: int) -> float:
    return rows.seeds("bytes_moved.sites", policy=policy, over=over).middle / 1e9


def claims(of: dict[str, Any]) -> dict[str, bool]:
    """Return what the words of the page rest on."""
    return {
        "without oversubscription both are alike": 0.9 < of["even"].middle < 1.05,
        "the gain begins within the sweep": of["least"] < of["turns"] <= of["most"],
        "it grows with oversubscription": of["gain"].middle < of[f"second_{of['turns']}"].middle + 0.02,
        "topology is never slower by more than a hundredth": max(
            max(of[f"{which}_{one}"]) for one in OVER for which in ("first", "second")
        )
        < 1.01,
        "it reuses about as much": abs(of["hits_topology"].middle - of["hits_blind"].middle) < 0.04,
        "it is large at the end": max(of["gain"]) < 0.8,
        "hardly any bytes leave a rack then": max(of["bytes_most"]) < 0.15,
    }


def draw(axes: Any, rows: Rows) -> None:
    """Draw the time to the second token by oversubscription."""
    over = rows.values("over")
    for policy, style in zip(POLICIES, ("k--", "C0o-")):
        times = [rows.seeds("second_token_s.mean", policy=policy, over=one).middle for one in over]
        axes.plot(over, times, style, label=policy)
    axes.set(xlabel="oversubscription of the uplink", ylabel="mean time to the second token, s", xscale="log")
    axes.set_yscale("log")
    axes.set_xticks(over, [f"{one}:1" for one in over])
    axes.minorticks_off()
    axes.legend()
