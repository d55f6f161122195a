"""Question 14: what drafts save while the KV of the prompt is still on its way."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

from mooncake_lite.workloads.traces import Trace, TraceRequest
from questions.frame import SEEDS, Found, Point, Rows, Seeds, emulated, simulated, table

GBPS, ACCEPTANCES, ANSWERS = (400, 200, 100, 50, 25, 5), (0.0, 0.3, 0.6, 0.9), (5, 16, 64)
BATCHES, BATCHED = (1, 8, 32, 128), (0.0, 0.05, *ACCEPTANCES[1:])
PROMPT, REQUESTS, APART_MS, SHORT_PROMPT, BATCH_ANSWER = 8192, 60, 120_000, 512, 128
LIVE_PROMPT, LIVE_APART_MS, LIVE_REQUESTS = 2048, 1300, 12
WORTH = 0.1


def points(quick: bool) -> list[Point]:
    """Return links with answers of several lengths, then batches on a wide link, then live runs."""
    seeds = SEEDS[:1] if quick else SEEDS
    found = [
        {"gbps": gbps, "acceptance": acceptance, "answer": answer, "seed": seed}
        for gbps, acceptance, answer, seed in product(
            GBPS, ACCEPTANCES, ANSWERS[: 1 if quick else None], seeds
        )
    ]
    found += [
        {"batch": batch, "acceptance": acceptance, "seed": seed}
        for batch, acceptance, seed in product(BATCHES[: 1 if quick else None], BATCHED, seeds)
    ]
    return found if quick else [*found, *({"live": one, "alone": True} for one in (0.0, 0.6, 0.9))]


def _trace(count: int, together: int, prompt: int, answer: int, apart_ms: float, seed: int = 0) -> Trace:
    """Return prompts of up to so many tokens that share nothing; so many come together.

    Where an answer begins decides which of its drafts are right, so each seed has other lengths.
    """
    dice, blocks = Random(f"{seed}"), prompt // 512
    return Trace([
        TraceRequest(
            apart_ms * (n // together) + n % together, prompt - dice.randrange(512), answer,
            list(range(n * blocks, (n + 1) * blocks))
        )
        for n in range(count)
    ])  # fmt: skip


def run(point: Point) -> Found:
    """Return the mean time from the first token, which prefill draws, to the last, and to the second."""
    if "live" in point:
        flags = ("--speculate", str(point["live"])) if point["live"] else ()
        with emulated(1, prefill=1, decode=1, store=1) as ranks, ranks.serve(*flags) as cluster:
            trace = _trace(LIVE_REQUESTS, 1, LIVE_PROMPT, ANSWERS[0], LIVE_APART_MS)
            found = ranks.live(cluster.port, trace, 1, lambda: None)
        return {"later_ms": 1000 * (found["e2e_s"]["mean"] - found["ttft_s"]["mean"])}
    seed, acceptance = point["seed"], point["acceptance"]
    if "batch" in point:
        trace = _trace(128, point["batch"], SHORT_PROMPT, BATCH_ANSWER, APART_MS, seed)
        found = simulated(trace, seed, nodes="8P1D", link_gbps=GBPS[0], speculate=acceptance)
    else:
        trace = _trace(REQUESTS, 1, PROMPT, point["answer"], APART_MS, seed)
        found = simulated(trace, seed, nodes="1P1D", link_gbps=point["gbps"], speculate=acceptance)
    first = found["ttft_s"]["mean"]
    return {"later_s": found["e2e_s"]["mean"] - first, "second_s": found["second_token_s"]["mean"] - first}


def numbers(rows: Rows) -> dict[str, Any]:
    """Return the numbers of the page: the share of the time between two tokens that drafts save."""
    found = dict[str, Any](worth=WORTH, prompt=PROMPT, requests=REQUESTS, batch_answer=BATCH_ANSWER)
    lines = []
    for gbps in rows.values("gbps"):
        plain = rows.seeds("later_s", gbps=gbps, acceptance=0.0, answer=ANSWERS[0])
        for acceptance in ACCEPTANCES[1:]:
            drafted = rows.seeds("later_s", gbps=gbps, acceptance=acceptance, answer=ANSWERS[0])
            found[f"saved_ms_{_name(acceptance)}_{gbps}"] = Seeds(
                1000 * (a - b) for a, b in zip(plain, drafted)
            )
        for acceptance, answer in product(ACCEPTANCES[1:], ANSWERS):
            found[f"saved_{_name(acceptance)}_{answer}_{gbps}"] = saved(rows, gbps, acceptance, answer)
        found[f"load_{gbps}"] = rows.seeds("second_s", gbps=gbps, acceptance=0.0, answer=ANSWERS[0])
        cells = [f"{found[f'saved_{_name(one)}_{ANSWERS[0]}_{gbps}']:.0%}" for one in ACCEPTANCES[1:]]
        cells += [f"{found[f'saved_06_{answer}_{gbps}']:.0%}" for answer in ANSWERS[1:]]
        lines.append([f"{gbps}", f"{found[f'load_{gbps}']:.2f} s", *cells])
    for acceptance in ACCEPTANCES[1:]:
        wide = [gbps for gbps in GBPS if found[f"saved_{_name(acceptance)}_5_{gbps}"].middle >= WORTH]
        found[f"turns_{_name(acceptance)}"] = min(wide, default=0)
    slow = [one for one in ANSWERS if found[f"saved_06_{one}_{GBPS[-1]}"].middle >= WORTH]
    found |= {"long": min(slow, default=0), "slowest": GBPS[-1], "widest": GBPS[0]}
    for batch, acceptance in product(rows.values("batch"), BATCHED[1:]):
        plain = rows.seeds("later_s", batch=batch, acceptance=0.0)
        ratio = rows.seeds("later_s", batch=batch, acceptance=acceptance).over(plain)
        found[f"batch_{batch}_{_name(acceptance)}"] = ratio
    found |= {f"live_{_name(one)}": rows.seeds("later_ms", live=one) for one in rows.values("live")}
    heads = [
        *(f"{one:.0%} right, 5 tokens" for one in ACCEPTANCES[1:]),
        *(f"60% right, {one}" for one in ANSWERS[1:]),
    ]
    return found | {"table": table(["link, Gbit/s", "KV after", *heads], lines), "seeds": len(SEEDS)}


def _name(acceptance: float) -> str:
    return f"{acceptance:g}".replace(".", "")


def saved(rows: Rows, gbps: int, acceptance: float, answer: int) -> Seeds:
    """Return which part of the time from the first to the last token drafts save, by seed."""
    plain = rows.seeds("later_s", gbps=gbps, acceptance=0.0, answer=answer)
    drafted = rows.seeds("later_s", gbps=gbps, acceptance=acceptance, answer=answer)
    return Seeds(1 - one for one in drafted.over(plain))


def claims(of: dict[str, Any]) -> dict[str, bool]:
    """Return what the words of the page rest on."""
    same = [
        abs(of[f"saved_ms_{one}_400"].middle - of[f"saved_ms_{one}_5"].middle) < 3 for one in ("06", "09")
    ]
    return {
        "what drafts save does not depend on the link": all(same),
        "with many right drafts the answer turns later": 5 < of["turns_09"] < of["turns_06"] < 400,
        "a longer answer gains on the slowest link": 5 < of["long"] <= 64,
        "in large batches drafts that are seldom right cost time": of["batch_128_03"].middle > 1,
        "they cost little": max(of["batch_128_005"]) < 1.05,
        "right drafts pay in large batches": max(of["batch_128_09"]) < 0.8,
        "live, right drafts save time": of["live_09"].middle < 0.8 * of["live_0"].middle,
    }


def draw(axes: Any, rows: Rows) -> None:
    """Draw the saved share by link: colours by acceptance, the short answer solid."""
    for acceptance, colour in zip(ACCEPTANCES[1:], ("C0", "C1", "C2")):
        for answer, line in ((ANSWERS[0], "o-"), (ANSWERS[2], "s--")):
            part = [100 * saved(rows, gbps, acceptance, answer).middle for gbps in GBPS]
            axes.plot(GBPS, part, colour + line, label=f"{acceptance:.0%} right, {answer} tokens")
    axes.set(xscale="log", xlabel="link of a node, Gbit/s", ylabel="time saved after first token, %")
    axes.set_xticks(GBPS, [str(one) for one in GBPS])
    axes.minorticks_off()
    axes.legend(fontsize="small")
