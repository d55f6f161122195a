"""Figures as SVG or PNG files, by matplotlib: miss-ratio curves, and the frame of all others.

Called by `simulator/cache.py` and by all that draws. Explained in docs/explain/eviction.md.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mooncake_lite.errors import ConfigError

COLUMNS = 5
"""Panels of miss-ratio curves in a row."""

REFERENCES = {"lru": "--", "belady": ":"}
"""Policies that every panel shows, and their dashes."""


def check_plot(path: Path | None) -> None:
    """Raises ConfigError, with the fix, for a file of another kind, and when matplotlib is not installed.

    path   None: nothing is to be drawn
    """
    if path is None:
        return
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--plot {path}: the name must end with .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'mooncake-lite[plots]'")


@contextmanager
def canvas(
    file: io.BytesIO,
    suffix: str,
    salt: str,
    size: tuple[float, float],
    rows: int = 1,
    columns: int = 1,
    *,
    shared: bool = True,
) -> Iterator[list[Any]]:
    """Give the axes of a figure, row by row, and write it afterwards. Columns share the vertical axis.

    shared   rows share the horizontal axis, too

    suffix   .svg or .png
    salt     of the names in an SVG
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure = Figure(figsize=size, layout="constrained")
        yield list(figure.subplots(rows, columns, squeeze=False, sharex=shared, sharey=columns > 1).flat)
        figure.savefig(file, format=suffix[1:], metadata={"Date": None} if suffix == ".svg" else {})


def draw(points: Iterable[tuple[str, int, float]], suffix: str) -> bytes:
    """Draw a panel for each policy, beside the REFERENCES.

    points   (policy, blocks, miss ratio)
    suffix   .svg or .png

    Returns the file's content: the same bytes for the same points, with one version of matplotlib.
    """
    file, curves = io.BytesIO(), dict[str, list[tuple[int, float]]]()
    for name, blocks, ratio in points:
        curves.setdefault(name, []).append((blocks, ratio))
    others = [name for name in curves if name not in REFERENCES]
    shared = [name for name in REFERENCES if name in curves]
    shown = [[*shared, name] for name in others] or [shared]
    columns = min(COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    with canvas(file, suffix, "eviction", (8, 1.2 + 1.7 * rows), rows, columns) as panels:
        for axes, names in zip(panels, shown):
            for name in names:
                xs, ys = zip(*sorted(curves[name]))
                style = REFERENCES.get(name, "ko-")
                label = name if name in REFERENCES else "the panel's policy"
                axes.plot(xs, ys, style, label=label, fillstyle="none", markersize=5, linewidth=1.2)
            axes.set_title(names[-1] if others else "", fontsize="medium")
            axes.set_xscale("log")
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        for axes in panels[len(shown) - columns :]:
            axes.tick_params(labelbottom=True)
        for axes in panels[len(shown) :]:
            axes.remove()
        figure = panels[0].figure
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
        figure.supxlabel("blocks of the pool, 512 tokens each", fontsize="medium")
        figure.supylabel("miss ratio", fontsize="medium")
    return file.getvalue()
