"""Figures of experiments, as SVG or PNG. Needs matplotlib.

Called by `experiment_commands.py`. The same bytes for the same results, with one version of matplotlib.
"""

from __future__ import annotations

import io

from mooncake_lite.simulator.compare import Comparison
from mooncake_lite.simulator.figure import canvas

DRAWN_S = 120.0
"""Seconds of the first seed's run that the figure of loads shows."""

POOLS = ("decode", "prefill")
"""Columns of Loads."""


def draw_policies(result: Comparison, suffix: str) -> bytes:
    """Draw the mean time to first token of every seed, a line for each seed."""
    from matplotlib.ticker import LogLocator

    file = io.BytesIO()
    with canvas(file, suffix, "experiment", (7, 3.6)) as (axes,):
        names = [row.name for row in result.rows]
        for number in range(len(result.seeds)):
            ys = [row.numbers["ttft_s"][number] for row in result.rows]
            axes.plot(names, ys, "o-", linewidth=0.8, markersize=4)
        axes.set(yscale="log", ylabel=f"mean TTFT at {result.rate:.3g} requests/s, s")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.margins(x=0.1)
        axes.grid(alpha=0.3)
    return file.getvalue()


def draw_admission(result: Comparison, suffix: str) -> bytes:
    """Draw prefill load and decode load over time, a panel for each form of admission that refuses."""
    file = io.BytesIO()
    runs = {row.name: row.first.loads for row in result.rows if row.first is not None}
    curves = {form: loads.after(loads.times_s[0], loads.times_s[0] + DRAWN_S) for form, loads in runs.items()}
    forms = [form for form in curves if form != "none"] or list(curves)
    with canvas(file, suffix, "experiment", (7, 1.2 + 1.5 * len(forms)), len(forms)) as panels:
        tops = [1.05 * max(max(getattr(curves[form], name)) for form in forms) for name in POOLS]
        for axes, form in zip(panels, forms, strict=True):
            loads = curves[form]
            times = [at - loads.times_s[0] for at in loads.times_s]
            axes.plot(times, loads.decode, linewidth=1.1)
            axes.set_title(form, fontsize="medium", loc="left")
            axes.set_ylabel("decode load (solid)", color="C0")
            right = axes.twinx()
            right.plot(times, loads.prefill, linewidth=1.1, color="C1", linestyle="--")
            right.set_ylabel("prefill load (dashed)", color="C1")
            axes.set_ylim(0, tops[0])
            right.set_ylim(0, tops[1])
            axes.grid(alpha=0.3)
        panels[-1].set_xlabel("seconds")
    return file.getvalue()
