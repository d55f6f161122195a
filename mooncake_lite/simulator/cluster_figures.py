"""Figures of a simulated run, as SVG: distributions of latencies, and load over time. Needs matplotlib.

Called by `cluster_command.py`. The same bytes for the same results, with one version of matplotlib.
"""

from __future__ import annotations

import io

import numpy as np

from mooncake_lite.simulator.figure import canvas
from mooncake_lite.simulator.outcome import Outcome
from mooncake_lite.workloads.metrics import COMPLETED

MOST_POINTS = 1_000
"""Of a curve: enough for the eye, few enough for a small file."""


def draw_latencies(outcome: Outcome, ttft_s: float, tbt_s: float) -> bytes:
    """Draw the cumulative distributions of TTFT and TBT over all requests, and the limits on both."""
    file = io.BytesIO()
    done = [one for one in outcome.records if one.outcome == COMPLETED]
    columns = {
        "TTFT, s": (ttft_s, [one.ttft_s for one in done]),
        "mean of a request's slowest tenth of gaps, s": (tbt_s, [one.tbt_s for one in done]),
    }
    with canvas(file, ".svg", "latencies", (8, 3), 1, 2, shared=False) as panels:
        for axes, (name, (limit, values)) in zip(panels, columns.items(), strict=True):
            shares = np.arange(1, len(values) + 1) / len(outcome.records)
            kept = np.unique(np.linspace(0, len(values) - 1, min(len(values), MOST_POINTS)).astype(int))
            axes.plot(np.sort(values)[kept], shares[kept], linewidth=1.2)
            axes.axvline(limit, color="0.4", linestyle="--", linewidth=0.8)
            axes.set(xscale="log", xlabel=name, ylim=(0, 1.02))
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("share of all requests")
    return file.getvalue()


def draw_loads(outcome: Outcome) -> bytes:
    """Draw, over time: both loads as multiples of their limits, requests that wait, and sequences."""
    file, loads = io.BytesIO(), outcome.loads
    every = -(-len(loads.times_s) // MOST_POINTS) or 1
    columns = {name: values[::every] for name, values in loads.columns.items()}
    minutes = np.array(columns["times_s"]) / 60
    with canvas(file, ".svg", "load", (8, 4.5), 3) as panels:
        for axes, names in zip(panels, (("prefill", "decode"), ("waiting",), ("decoding",)), strict=True):
            for name in names:
                axes.plot(minutes, columns[name], linewidth=0.9, label=f"{name} load")
            axes.set_ylabel({"waiting": "requests wait", "decoding": "sequences"}.get(names[0], "load"))
            axes.grid(alpha=0.3)
        panels[0].legend(loc="upper left", fontsize="small")
        panels[-1].set_xlabel("minutes")
    return file.getvalue()
