"""When loading KV beats computing it, and two kinds of nodes beat nodes that do both.

Pure. After the roofline of Williams, Waterman and Patterson (CACM 2009): two lines, and what lies under them.
Explained in docs/explain/planning.md.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np

from mooncake_lite.planner.colocation import Ways, ways_of
from mooncake_lite.planner.first import First
from mooncake_lite.planner.jobs import prompt_load
from mooncake_lite.profiles.costs import pass_seconds
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.figure import canvas

PAGE_BYTES = 4096
"""What disaggregated memory moves at once where it is paged: P. Gao et al., OSDI 2016; LegoOS, OSDI 2018."""

KIB = 1024


@dataclass(frozen=True, slots=True)
class Roofline:
    """Break-even points of a workload on one kind of node.

    tokens          of the median prompt
    least_bytes_per_s   bandwidth from which on loading its KV is faster than computing it
    transfer_share  of a prompt's time that moving its prefix takes, in the mean of all requests
    ways            two kinds of nodes, and nodes that do both
    """

    tokens: int
    least_bytes_per_s: float
    transfer_share: float
    ways: Ways


def roofline_of(first: First, nodes: int) -> Roofline:
    """Return the break-even points. nodes: of the cluster, of both kinds together."""
    jobs, cluster = first.jobs, first.cluster
    token_bytes, tokens = cluster.layout.nbytes / cluster.block_tokens, int(np.median(jobs.tokens))
    moved_s = jobs.cached * token_bytes / first.costs.transfer.far_bytes_per_s
    share = float((moved_s / (moved_s + first.compute_s)).mean())
    whole_s = pass_seconds(cluster.profile)(prompt_load(tokens, 0))
    return Roofline(tokens, token_bytes * tokens / whole_s, share, ways_of(first, nodes))


def draw(cluster: Cluster, line: Roofline) -> bytes:
    """Draw where loading a prompt's KV is as fast as computing it: bandwidth against latency, an SVG file.

    A curve for each size of what is moved at once: a page of 4 KiB, a block for one layer, a whole block.
    """
    file, nbytes = io.BytesIO(), cluster.layout.nbytes / cluster.block_tokens * line.tokens
    whole_s, layer = nbytes / line.least_bytes_per_s, cluster.layout.nbytes / cluster.layout.layers
    parts = {"page": PAGE_BYTES, "layer of a block": layer, "block": cluster.layout.nbytes}
    with canvas(file, ".svg", "roofline", (6, 4)) as (axes,):
        rates = line.least_bytes_per_s * np.geomspace(1.001, 1e3, 200)
        for name, part in parts.items():
            latencies = (whole_s - nbytes / rates) / np.ceil(nbytes / part)
            axes.plot(rates / 1e9, latencies * 1e6, label=f"{name}, {part / KIB:,.0f} KiB")
        costs = cluster.costs.transfer
        axes.plot([costs.far_bytes_per_s / 1e9], [costs.latency_s * 1e6], "k*", label="these links")
        axes.set(xscale="log", yscale="log", xlabel="GB/s", ylabel="latency of each, us")
        axes.legend(title="loading beats computing below the line of")
    return file.getvalue()
