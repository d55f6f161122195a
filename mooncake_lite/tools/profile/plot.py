"""Fit against measurement as an SVG or PNG file. Needs matplotlib.

Called by `mooncake-lite profile --plot`. Explained in docs/explain/emulation.md.
"""

from __future__ import annotations

import io

from mooncake_lite.profiles.file import Profile
from mooncake_lite.simulator.figure import canvas

COLOURS = {"prefill": "C0", "decode": "C1", "mixed": "C2", "prompt": "C3"}


def points_of(profile: Profile) -> dict[str, list[tuple[float, float]]]:
    """Return (measured, fitted) seconds of passes by kind, and of whole prompts."""
    compute, prefill = profile.compute, profile.prefill
    points: dict[str, list[tuple[float, float]]] = {kind: [] for kind in COLOURS}
    for one in compute.passes:
        points[one.kind].append((one.seconds, compute.fit.seconds(one.load)))
    if prefill is not None:
        for prompt in prefill.prompts:
            fitted = prefill.fit.seconds(prompt.num_tokens, prompt.cached)
            points["prompt"].append((prompt.seconds, fitted))
    return {kind: found for kind, found in points.items() if found}


def draw(profile: Profile, suffix: str) -> bytes:
    """Return the file's content: a point per measured pass or prompt. suffix: .svg or .png."""
    file = io.BytesIO()
    with canvas(file, suffix, "profile", (6, 5)) as (axes,):
        points = points_of(profile)
        for kind, found in points.items():
            measured, fitted = zip(*((1e3 * seconds, 1e3 * fit) for seconds, fit in found))
            axes.plot(measured, fitted, "o", color=COLOURS[kind], label=kind, markersize=5)
        ends = [
            1e3 * pick(seconds for found in points.values() for seconds, _ in found) for pick in (min, max)
        ]
        axes.plot(ends, ends, "-", color="grey", linewidth=1, label="fit = measured", zorder=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("measured, ms")
        axes.set_ylabel("fit, ms")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return file.getvalue()
