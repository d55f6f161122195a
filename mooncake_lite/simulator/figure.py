"""Miss-ratio curves as an SVG or PNG file. The one place that needs matplotlib.

Called by `simulator/cache.py`. Explained in docs/explain/eviction.md.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable

from mooncake_lite.errors import ConfigError

MARKERS = "osv^D<>PX*dph"
"""Curves that lie on each other are told apart by these; the one named first lies on top."""


def require_matplotlib() -> None:
    """Raises ConfigError, with the fix, when matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'mooncake-lite[plots]'")


def draw(points: Iterable[tuple[str, int, float]], suffix: str) -> bytes:
    """The file's content. points: (policy, blocks, miss ratio); suffix: .svg or .png.

    The same bytes for the same points, with one version of matplotlib.
    """
    import matplotlib
    from matplotlib.figure import Figure

    curves: dict[str, list[tuple[int, float]]] = {}
    for name, blocks, ratio in points:
        curves.setdefault(name, []).append((blocks, ratio))
    with matplotlib.rc_context({"svg.hashsalt": "eviction", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        for number, (name, curve) in enumerate(curves.items()):
            xs, ys = zip(*sorted(curve))
            axes.plot(
                xs, ys, label=name, color=f"C{number % 10}", marker=MARKERS[number % len(MARKERS)],
                markersize=5, linewidth=1.3, zorder=50 - number, linestyle="--" if name == "belady" else "-",
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_xlabel("blocks of the pool, 512 tokens each")
        axes.set_ylabel("miss ratio")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", ncols=2)
        file = io.BytesIO()
        metadata = {"Date": None} if suffix == ".svg" else {}
        figure.savefig(file, format=suffix[1:], metadata=metadata)
    return file.getvalue()
