"""Fit against measurement as an SVG or PNG file. Needs matplotlib.

Called by `mooncake-lite profile --plot`. Explained in docs/explain/emulation.md.
"""

from __future__ import annotations

import io

from mooncake_lite.profiles.file import Profile
from mooncake_lite.simulator.figure import canvas

KINDS = ("prefill", "decode", "mixed", "prompt")


def points_of(profile: Profile) -> dict[str, list[tuple[float, float]]]:
    """Return (measured, fitted) seconds of passes by kind, and of whole prompts."""
    compute, prefill = profile.compute, profile.prefill
    points: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for one in compute.passes:
        points[one.kind].append((one.seconds, compute.fit.seconds(one.load)))
    if prefill is not None:
        for prompt in prefill.prompts:
            fitted = prefill.fit.seconds(prompt.num_tokens, prompt.cached)
            points["prompt"].append((prompt.seconds, fitted))
    return {kind: found for kind, found in points.items() if found}


def draw(profile: Profile, suffix: str) -> bytes:
    """Return the file's content: a panel per kind, a point per measurement. suffix: .svg or .png."""
    file = io.BytesIO()
    points = points_of(profile)
    measured = [1e3 * seconds for found in points.values() for seconds, _ in found]
    ends = min(measured), max(measured)
    with canvas(file, suffix, "profile", (2 * len(points), 2.7), 1, len(points)) as panels:
        for axes, (kind, found) in zip(panels, points.items(), strict=True):
            axes.plot(*zip(*((1e3 * seconds, 1e3 * fit) for seconds, fit in found)), "o", fillstyle="none")
            axes.plot(ends, ends, "k--", linewidth=1, label="fit = measured", zorder=0)
            axes.set(title=kind, xscale="log", yscale="log", xlabel="measured, ms", aspect="equal")
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("fit, ms")
        panels[0].legend(fontsize="small", handlelength=1.5)
    return file.getvalue()
