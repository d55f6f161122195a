"""Figures as SVG or PNG files, by matplotlib: miss-ratio curves, and the frame of all others.

Called by `simulator/cache.py` and by all that draws. Explained in docs/explain/eviction.md.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mooncake_lite.errors import ConfigError

MARKERS = "osv^D<>PX*dph"
"""Curves that lie on each other are told apart by these; the one named first lies on top."""


def check_plot(path: Path) -> None:
    """Raises ConfigError, with the fix, for a file of another kind, and when matplotlib is not installed."""
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--plot {path}: the name must end with .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'mooncake-lite[plots]'")


@contextmanager
def canvas(
    file: io.BytesIO, suffix: str, salt: str, size: tuple[float, float], rows: int = 1
) -> Iterator[list[Any]]:
    """Give the axes of a figure, one above the other, and write it afterwards.

    suffix   .svg or .png
    salt     of the names in an SVG
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure = Figure(figsize=size, layout="constrained")
        yield list(figure.subplots(rows, 1, squeeze=False, sharex=True)[:, 0])
        figure.savefig(file, format=suffix[1:], metadata={"Date": None} if suffix == ".svg" else {})


def draw(points: Iterable[tuple[str, int, float]], suffix: str) -> bytes:
    """The file's content. points: (policy, blocks, miss ratio); suffix: .svg or .png.

    The same bytes for the same points, with one version of matplotlib.
    """
    file, curves = io.BytesIO(), dict[str, list[tuple[int, float]]]()
    for name, blocks, ratio in points:
        curves.setdefault(name, []).append((blocks, ratio))
    with canvas(file, suffix, "eviction", (8, 4.5)) as (axes,):
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
    return file.getvalue()
