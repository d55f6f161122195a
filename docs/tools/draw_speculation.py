"""Draws docs/explain/figures/speculation.svg: drafts while KV comes from far. Needs matplotlib.

python docs/tools/draw_speculation.py

Prompts of 8,192 tokens on a simulated cluster of the paper's machines, one at a time, over links of several
rates. It prints what it draws.
"""

from __future__ import annotations

import io
import statistics
from pathlib import Path

from mooncake_lite.profiles.file import PAPER_MACHINES, named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.figure import canvas
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.simulator.world import World
from mooncake_lite.workloads.traces import Trace, TraceRequest

PICTURE = Path(__file__).parents[1] / "explain" / "figures" / "speculation.svg"
GBPS = (5, 10, 25, 50, 100, 200, 400)
ACCEPTANCES = {0.0: "without drafts", 0.6: "60 % accepted", 0.9: "90 % accepted"}
TOKENS, LATER, REQUESTS, APART_MS = 8192, 4, 40, 60_000
"""Of a prompt; tokens after the first one until the time counts; requests, and the time between two."""


def seconds(gbps: float, acceptance: float) -> float:
    """Return the median time from the first token, which prefill draws, to the fifth."""
    blocks = TOKENS // 512
    ids = [list(range(number * blocks, (number + 1) * blocks)) for number in range(REQUESTS)]
    asked = [TraceRequest(APART_MS * number, TOKENS, 32, some) for number, some in enumerate(ids)]
    cluster = Cluster(
        profile=named_profile(PAPER_MACHINES), nodes={"prefill": 1, "decode": 1}, acceptance=acceptance,
        link_bytes_per_s=gbps * 1e9 / 8,
    )  # fmt: skip
    world = World(cluster.setting(TraceSource(Trace(asked)), 0))
    world.run()
    times = [record.token_times_s for record in world.records]
    return statistics.median(each[LATER] - each[0] for each in times)


def draw(found: dict[float, list[float]]) -> bytes:
    """Draw a line for each acceptance."""
    file = io.BytesIO()
    with canvas(file, ".svg", "speculation", (6, 3.4)) as panels:
        for acceptance, times in found.items():
            panels[0].plot(GBPS, times, "o-", label=ACCEPTANCES[acceptance])
        panels[0].set(xscale="log", yscale="log", xlabel="link, Gbit/s", ylabel="first to fifth token, s")
        panels[0].set_xticks(GBPS, [str(one) for one in GBPS])
        panels[0].minorticks_off()
        panels[0].grid(alpha=0.3)
        panels[0].legend()
    return file.getvalue()


if __name__ == "__main__":
    figures = {acceptance: [seconds(gbps, acceptance) for gbps in GBPS] for acceptance in ACCEPTANCES}
    for acceptance, times in figures.items():
        print(ACCEPTANCES[acceptance], [round(each, 4) for each in times])
    PICTURE.write_bytes(draw(figures))
