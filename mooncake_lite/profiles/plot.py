"""Fit against measurement as an SVG or PNG file. Needs matplotlib.

Called by `mooncake-lite profile --plot`. Explained in docs/explain/emulation.md.
"""

from __future__ import annotations

import io

from mooncake_lite.profiles.file import ComputeSection

COLOURS = {"prefill": "C0", "decode": "C1", "mixed": "C2"}


def draw(section: ComputeSection, suffix: str) -> bytes:
    """Return the file's content: a point per measured pass. suffix: .svg or .png."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "profile", "svg.fonttype": "none"}):
        figure = Figure(figsize=(6, 5), layout="constrained")
        axes = figure.subplots()
        for kind, colour in COLOURS.items():
            passes = [one for one in section.passes if one.kind == kind]
            measured = [1e3 * one.seconds for one in passes]
            fitted = [1e3 * section.fit.seconds(one.load) for one in passes]
            axes.plot(measured, fitted, "o", color=colour, label=kind, markersize=5)
        ends = [1e3 * pick(one.seconds for one in section.passes) for pick in (min, max)]
        axes.plot(ends, ends, "-", color="grey", linewidth=1, label="fit = measured", zorder=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("measured, ms per pass")
        axes.set_ylabel("fit, ms per pass")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        file = io.BytesIO()
        metadata = {"Date": None} if suffix == ".svg" else {}
        figure.savefig(file, format=suffix[1:], metadata=metadata)
    return file.getvalue()
