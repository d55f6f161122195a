"""When loading KV beats computing it, and what colocating costs: bandwidth, latency and arithmetic alone.

Pure. After the roofline of Williams, Waterman and Patterson (CACM 2009): two lines, and what lies under them.
Explained in docs/explain/planning.md.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mooncake_lite.planner.jobs import Jobs, compute_s, prompt_load
from mooncake_lite.profiles.costs import pass_seconds
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.figure import canvas

PAGE_BYTES = 4096
"""What disaggregated memory moves at once where it is paged: P. Gao et al., OSDI 2016; LegoOS, OSDI 2018."""

KIB = 1024


@dataclass(frozen=True, slots=True)
class Roofline:
    """Break-even points of a workload on one kind of node, of its median prompt.

    tokens          of that prompt
    least_bytes_per_s   bandwidth from which on loading its KV is faster than computing it
    transfer_share  of a prompt's time that moving its prefix takes, in the mean of all requests
    chunk_tokens    of a prompt beside a batch, if a node does both and keeps the limit on gaps; 0: none does
    slowdown        how much longer a prompt takes in such chunks than in one pass
    """

    tokens: int
    least_bytes_per_s: float
    transfer_share: float
    chunk_tokens: int
    slowdown: float


def roofline_of(cluster: Cluster, jobs: Jobs, step_s: float, gap_s: float) -> Roofline:
    """Return the break-even points. step_s: of a decode step without a prompt; gap_s: the limit on gaps."""
    pass_s, costs = pass_seconds(cluster.machines or cluster.profile), cluster.costs
    token_bytes, tokens = cluster.layout.nbytes / cluster.block_tokens, int(np.median(jobs.tokens))
    moved_s = jobs.cached * token_bytes / costs.transfer.far_bytes_per_s
    share = float((moved_s / (moved_s + compute_s(jobs, pass_s))).mean())
    left_s = gap_s - (step_s - costs.decode.base_s)
    chunk = _largest(lambda size: pass_s(prompt_load(tokens, max(0, tokens - size))) <= left_s, tokens)
    whole_s, in_chunks_s = pass_s(prompt_load(tokens, 0)), 0.0
    for begin in range(0, tokens, chunk or tokens):
        in_chunks_s += pass_s(prompt_load(min(tokens, begin + (chunk or tokens)), begin))
    return Roofline(tokens, token_bytes * tokens / whole_s, share, chunk, in_chunks_s / whole_s - 1)


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest power of two up to `most` for which something holds; 0 for none."""
    sizes = [1 << power for power in range(4, most.bit_length())]
    return max((size for size in sizes if holds(size)), default=0)


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
