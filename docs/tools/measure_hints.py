"""Measures what hints are worth to agents that pause, and writes the tables of docs/explain/hints.md.

    python docs/tools/measure_hints.py live        on emulated ranks of this machine: 14 minutes
    python docs/tools/measure_hints.py simulated   on 16 simulated nodes: half an hour on two cores
    python docs/tools/measure_hints.py fitted      the same nodes, memory for what is used again: 10 minutes
    python docs/tools/measure_hints.py overloaded  the same nodes, more work than they can do: 10 minutes
    python docs/tools/measure_hints.py             writes the tables of what was measured into the page

The results are docs/reference/measured/hints.json. A test compares the page with them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
from fill_readme import filled, measured_on
from questions.frame import KV_BYTES, Found, emulated, grouped, simulated, table

from mooncake_lite.config.machine import machine, signed, usable_cores
from mooncake_lite.config.progress import counted
from mooncake_lite.gateway.bodies import TIMED
from mooncake_lite.simulator.hints import Hints
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.sweep import processes
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.tools.bench.cluster import Ask, send
from mooncake_lite.tools.bench.simulator_ranks import SLO_S, Ranks, record_of
from mooncake_lite.workloads.kinds import KINDS, made
from mooncake_lite.workloads.metrics import Record
from mooncake_lite.workloads.rescale import divided
from mooncake_lite.workloads.traces import BLOCK_TOKENS, Trace

PAGE = Path(__file__).parents[1] / "explain" / "hints.md"
RESULT = PAGE.parents[1] / "reference" / "measured" / "hints.json"
SEEDS = (0, 1, 2)
MANY = (0, 1, 2, 3, 4, 6, 7, 8, 9, 10)
"""Without 5: two of its requests come in one millisecond, and records would not tell them apart."""

AGENTS = replace(KINDS["agents"], pause_s=240.0)
REQUESTS, RATE = 900, 0.4
SIZES = (80, 130, 200)
RATES = (0.399, 0.4, 0.401)
"""Each seed is played at each of these: an arrival 1 s later can change the P90 of a run by a fifth."""

SETTINGS: tuple[tuple[int, dict[str, Any]], ...] = (
    *((10, {"hints": kind, "rate": rate}) for kind in ("none", "agents", "wrong") for rate in RATES),
    (3, {"hints": "random"}),
    *((3, {"hints": "agents", "hint_error": error}) for error in (0.25, 0.5)),
    *((1, {"hints": kind, "node_dram": f"{size}GB"}) for size in SIZES for kind in ("none", "agents")),
)  # fmt: skip
"""How many seeds, and with what. Settings of the hints themselves were chosen on seed 0."""

FITTED, OTHERS, FITTED_REQUESTS = 1.35, (1.2, 2.0), 600
"""The pool's space, in times of the blocks of `most_alive`, prompts included. Seeds 11 and 12 chose it."""

BLOCK_BYTES, POOL_NODES = BLOCK_TOKENS * 327_680, 8
"""Of LLaMA3-70B in the profile's layout; prefill nodes lend their DRAM."""

FITTED_SETTINGS: tuple[tuple[int, dict[str, Any]], ...] = (
    *(
        (10, {"hints": kind, "space": FITTED, "rate": rate})
        for kind in ("none", "agents", "wrong") for rate in RATES
    ),
    *((3, {"hints": kind, "space": space}) for space in OTHERS for kind in ("none", "agents")),
)  # fmt: skip

OVERLOADED_SETTINGS: tuple[tuple[int, dict[str, Any]], ...] = tuple(
    (8, {"hints": kind, "node_dram": "45GB", "pause_s": 60.0, "rate": rate})
    for kind in ("none", "wrong") for rate in RATES
)  # fmt: skip

FIGURES = ("p90", "mean")

LIVE = replace(KINDS["agents"], pause_s=120.0, median_turns=4, most_tokens=200_000)
LIVE_REQUESTS, LIVE_RATE, DIVIDE, SPACE, MORE_S = 180, 1.5, 32, 1.2, 2.0
"""The pool has so many times the blocks of `most_alive`. Prompts wait for less than they do on 16 nodes, so
clients have blocks retained for 2 s more, and not for 15. All was chosen with simulations of seeds 3 to 7."""


def words(trace: Trace) -> list[str]:
    """Return "first" or "later" for each request: whether its session had a turn before."""
    seen, found, shared = set[int](), list[str](), AGENTS.instructions_tokens // BLOCK_TOKENS + 1
    for one in trace.requests:
        found.append("later" if one.hash_ids[shared] in seen else "first")
        seen.add(one.hash_ids[shared])
    return found


def most_alive(trace: Trace) -> int:
    """Return the most blocks that were used before and will be used again, at one time."""
    uses: dict[int, list[float]] = {}
    for one in trace.requests:
        for block in one.hash_ids:
            uses.setdefault(block, []).append(one.timestamp)
    steps = sorted(step for at in uses.values() if at[1:] for step in ((at[0], 1), (at[-1], -1)))
    return max(accumulate(step for _, step in steps))


async def played(port: int, trace: Trace, ranks: Ranks, hints: Hints | None) -> tuple[list[Record], Found]:
    """Play a trace on a live cluster, with hints after each answer. Returns what became of the hints, too.

    Raises ClusterError.
    """
    asks = [Ask(one.timestamp / 1000, ranks.tokens(one, 1), one.output_length) for one in trace.requests]
    told, began = Counter[str](), time.perf_counter()

    async def asked(client: httpx.AsyncClient, number: int, ask: Ask) -> Record:
        await asyncio.sleep(max(0.0, began + ask.at_s - time.perf_counter()))
        reply = await send(port, ask)
        said = hints.after(number, time.perf_counter() - began) if hints else ()
        for verb, blocks, seconds, alone in said:
            name, time_s = f"r{number}" if alone else None, seconds if verb in TIMED else None
            about = {"prompt": ask.prompt[: blocks * trace.block_tokens], "session": name, "seconds": time_s}
            answer = await client.post("/v1/kv/hints", json={"verb": verb, **about})
            told[f"{verb} {answer.raise_for_status().json()['outcome']}"] += 1
        return record_of(reply)

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
        records = await asyncio.gather(*(asked(client, *each) for each in enumerate(asks)))
    return records, dict(sorted(told.items()))


def live(seed: int, kind: str) -> Found:
    """Play agents on emulated ranks with LRU or with hints, and simulate the same ranks."""
    trace = divided(made(LIVE, LIVE_REQUESTS, LIVE_RATE, seed), DIVIDE)
    hints, groups, blocks = (
        Hints(trace, kind, 0.0, seed, MORE_S),
        words(trace),
        round(SPACE * most_alive(trace)),
    )
    with emulated(DIVIDE, prefill=2, decode=1, store=1) as ranks:
        ranks = replace(ranks, pool_bytes=blocks * trace.block_tokens * KV_BYTES)
        with ranks.serve("--prefix-sharing", "off") as cluster:
            given = hints if kind != "none" else None
            records, told = asyncio.run(played(cluster.port, trace, ranks, given))
        source = TraceSource(trace, given)
        other = play(replace(ranks.simulated(), sharing="off"), source, seed).records
    found = {"live": _ttft_s(records, groups), "simulated": _ttft_s(other, groups)}
    return {"hints": kind, "seed": seed, "blocks": blocks, **found, "answers": told}


def _ttft_s(records: Sequence[Record], groups: Sequence[str]) -> Found:
    """Return TTFT of all turns and of later ones."""
    both = {"all": ["all"] * len(groups), "later": groups}
    return {name: grouped(records, group, SLO_S)[name]["ttft_s"] for name, group in both.items()}


def on_16_nodes(seed: int, setting: dict[str, Any]) -> Found:
    """Simulate agents on the machines of the paper. space: agents as on live ranks, a pool that fits."""
    options = {"node_dram": "100GB", **setting}
    pause_s, space = options.pop("pause_s", AGENTS.pause_s), options.pop("space", None)
    rate = options.pop("rate", RATE)
    if space is None:
        trace = made(replace(AGENTS, pause_s=pause_s), REQUESTS, rate, seed)
        about = {"pause_s": pause_s, "rate": rate}
    else:
        trace, about = made(LIVE, FITTED_REQUESTS, rate, seed), {"space": space, "rate": rate}
        options["node_dram"] = str(round(space * most_alive(trace) * BLOCK_BYTES / POOL_NODES))
    found = simulated(trace, seed, groups=words(trace), nodes=f"{POOL_NODES}P8D", **options)
    both = {"all": found["ttft_s"], "later": found["groups"]["later"]["ttft_s"]}
    return {"seed": seed, **options, **about, "simulated": both}


def measured(part: str) -> list[Found]:
    """Return the rows of a part."""
    if part == "live":
        return [live(seed, kind) for seed in SEEDS for kind in ("none", "agents")]
    settings = {"simulated": SETTINGS, "fitted": FITTED_SETTINGS, "overloaded": OVERLOADED_SETTINGS}[part]
    runs = [(seed, one) for seeds, one in settings for seed in MANY[:seeds]]
    found = list[Found]()
    with processes(usable_cores(), mpi=False) as executor, counted("runs", len(runs)) as told:
        for row in executor.map(on_16_nodes, *zip(*runs)):
            found.append(row)
            told()
    return found


def ratios(rows: Sequence[Found], turns: str = "later") -> list[tuple[str, str, int, Found, Found]]:
    """Return run, hints, seed, TTFT without hints and with them, of each run with hints."""
    without, found = dict[Any, Found](), []
    for where, row in ((where, row) for row in rows for where in ("live", "simulated") if where in row):
        memory = f"{row['space']} times" if "space" in row else row.get("node_dram", "")
        run = f"{where} {memory}".strip()
        lru = without.setdefault((run, row["seed"], row.get("rate")), row[where][turns])
        if row["hints"] != "none":
            hints = f"{row['hints']} {row.get('hint_error', '')}".strip()
            found.append((run, hints, row["seed"], lru, row[where][turns]))
    return found


def of_each(rows: Sequence[Found]) -> str:
    """Return a table with a line for each run: TTFT without hints, and with hints as parts of it."""
    return table(
        ("run", "hints", "seed", "LRU, P90", "hints, P90", "LRU, mean", "hints, mean"),
        [
            [run, hints, str(seed), *(
                cell for one in FIGURES for cell in (f"{lru[one]:.3f} s", f"{found[one] / lru[one]:.2f}")
            )]
            for run, hints, seed, lru, found in ratios(rows)
        ],
    )  # fmt: skip


def of_all(rows: Sequence[Found]) -> str:
    """Return a table with a line for each setting: the mean ratio of its seeds, the least and the most.

    The ratio of a seed is that of the sums of its runs, which have different rates.
    """
    lines = list[list[str]]()
    both = [ratios(rows, turns) for turns in ("later", "all")]
    for run, hints in dict.fromkeys(one[:2] for one in both[0]):
        some = [[one[2:] for one in rows if one[:2] == (run, hints)] for rows in both]
        seeds, cells = dict.fromkeys(seed for seed, *_ in some[0]), list[str]()
        for of in some:
            for figure in FIGURES:
                each = list[float]()
                for seed in seeds:
                    pairs = [(lru[figure], found[figure]) for one, lru, found in of if one == seed]
                    each.append(sum(found for _, found in pairs) / sum(lru for lru, _ in pairs))
                around = f" ({min(each):.2f} to {max(each):.2f})" if each[1:] else ""
                cells.append(f"{sum(each) / len(each):.3f}{around}")
        lines.append([run.removeprefix("simulated "), hints, str(len(seeds)), *cells])
    heads = (
        "memory",
        "hints",
        "seeds",
        "later turns, P90",
        "later turns, mean",
        "all, P90",
        "all, mean",
    )
    return table(heads, lines)


def page() -> str:
    """Return the page with what was measured."""
    text = PAGE.read_text(encoding="utf-8")
    for name, found in json.loads(RESULT.read_text(encoding="utf-8")).items():
        where = f"`{found['command']}`, commit {found['commit']}, {measured_on(found)}"
        shown = of_each if name == "live" else of_all
        text = filled(text, name, f"{shown(found['rows'])}\n\n({where})")
    return text


def main(part: str | None) -> None:
    """Measure a part, or write the page."""
    if part is None:
        PAGE.write_text(page(), encoding="utf-8")
        return
    here, found = machine(), json.loads(RESULT.read_text()) if RESULT.exists() else {}
    about = {"command": f"python docs/tools/measure_hints.py {part}", "rows": measured(part)}
    RESULT.write_text(json.dumps({**found, part: signed(here, about)}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:2] or [None])
