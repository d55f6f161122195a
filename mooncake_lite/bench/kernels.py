"""Kernels on the CPU beside torch in the same process: attention, movers, codecs, linear layers.

Run by `bench.command`; the parts are in `kernels_attention`, `kernels_movers` and `kernels_linear`. On a GPU
the same comparison is made by `python -m kernels_numba.gpu_report`, which needs torch and numba-cuda alone.
"""

from __future__ import annotations

from mooncake_lite.bench import kernels_attention, kernels_linear, kernels_movers
from mooncake_lite.bench.result import Row


def run(quick: bool) -> list[Row]:
    """Measure; within a minute when quick."""
    parts = (kernels_attention, kernels_movers, kernels_linear)
    return [row for part in parts for row in part.run(quick)]
