"""What makes an answer less sure than it looks, by name. Explained in docs/explain/planning.md."""

from __future__ import annotations

import numpy as np

from mooncake_lite.planner.first import First
from mooncake_lite.planner.limits import Nodes
from mooncake_lite.planner.search import Search

MOST_LOAD, MOST_LINK_LOAD = 0.8, 0.3
"""Beyond these, replays were not found to be within a tenth of simulations."""

CLIFF, NEIGHBOURS = 0.1, 0.01
"""A quantile lies on a cliff if those a hundredth of the requests beside it differ by more than a tenth."""

RESIDENCES = 14
"""So many answers one after the other make a run long enough for decode to be as full as it gets."""

GROWS = 0.05


def warnings_of(search: Search, first: First, nodes: Nodes) -> list[str]:
    """Return the reasons to doubt an answer, each in a sentence."""
    search.at(nodes)
    played, jobs = search.played[nodes], first.jobs
    span_s = float(jobs.arrived_s[-1] - jobs.arrived_s[0])
    found = []
    busy = float(first.compute_s.sum()) / span_s / nodes[0]
    if busy > MOST_LOAD:
        found.append(
            f"load: nodes that prefill compute for {busy:.0%} of the time; above 80 % waits vary much"
        )
    far = played.far_bytes / span_s / min(nodes) / first.costs.transfer.far_bytes_per_s
    if far > MOST_LINK_LOAD:
        found.append(f"links: busy for {far:.0%} of the time; above 30 % transfers wait for each other")
    for what, values, limit in zip(("TTFT", "gaps"), (played.ttft_s, played.tbt_s), search.limits):
        shares = np.clip((limit.share - NEIGHBOURS, limit.share + NEIGHBOURS), 0, 1)
        low, high = np.quantile(values, shares).tolist()
        if high > (1 + 2 * CLIFF) * low:
            rise = f"from {low:.3g} to {high:.3g} s within two hundredths of the requests"
            found.append(f"cliff: {what} rises {rise}; a few of them decide")
    stay_s = float((played.tpot_s * jobs.answer).mean())
    if span_s < RESIDENCES * stay_s:
        long = f"{span_s:.0f} s are {span_s / max(stay_s, 1e-9):.1f} answers long"
        found.append(f"short: {long}; decode may fill up later")
    halves = slice(len(jobs) // 2), slice(len(jobs) // 2, None)
    early, late = (jobs.cached[part].sum() / jobs.tokens[part].sum() for part in halves)
    if late > early + GROWS:
        shares_of = f"{early:.0%} of the tokens of the first half are reused, {late:.0%} of the second"
        found.append(f"reuse grows: {shares_of}; a longer trace may need fewer nodes")
    return found
