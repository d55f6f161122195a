"""Lab 7 at work: two traces on simulated clusters, scheduled by the code of a tree.

Run by `mooncake-lite labs run 7`, once with the student's tree and once with the reference:

    python play.py MODEL DATA SIZES

Prints a list of `Played` (mooncake_lite/labs/playing.py) as JSON. The column of seconds has virtual time: the
mean TTFT. No model is loaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from mooncake_lite.profiles.file import named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.outcome import Outcome
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.workloads.rescale import sped
from mooncake_lite.workloads.traces import read_trace

PROFILE = named_profile("LLaMA3-70B-8xA800")
POLICIES = ("random", "least-loaded", "local-cache", "global-cache", "kvcache-centric")
LINKS = {"100 Gbps": 12.5e9, "368 Gbps": None}
"""Of a node, in bytes per second. None: those of the profile."""
SPEED = 3.0
"""Of the conversations: the nodes that have the popular documents then send all the time."""
FORMS = ("none", "early-rejection", "predictive")
TTFT_S = 20.0
TBT_S = 0.05
"""The limits that admission compares its predictions with."""
USERS_TBT_S = 0.15
"""The limit that goodput counts: on the mean of the slowest tenth of a request's gaps between tokens."""
STEADY_S = (30.0, 100.0)
"""The load swings while requests come at a steady rate: from when it has built up until the last ones."""


def policies(trace: Path) -> list[dict[str, Any]]:
    """Play the conversations with each placement policy, all on slow links and two on fast ones."""
    seen, ttft_s, source = [], {}, sped(read_trace(trace), SPEED)
    for name, link in LINKS.items():
        for policy in POLICIES if link else POLICIES[-2:]:
            nodes = {"prefill": 4, "decode": 4}
            cluster = Cluster(profile=PROFILE, nodes=nodes, policy=policy, link_bytes_per_s=link)
            outcome = play(cluster, TraceSource(source), 1)
            seen.append(shown(f"conversations, {name}, {policy}", outcome))
            ttft_s[name, policy] = outcome.mean_ttft_s
    times = [
        f"{ttft_s[name, 'global-cache'] / ttft_s[name, 'kvcache-centric']:.1f} times on links of {name}"
        for name in LINKS
    ]
    seen[0]["gain"] = f"mean TTFT of global-cache over that of kvcache-centric: {', '.join(times)}"
    return seen


def forms(trace: Path) -> list[dict[str, Any]]:
    """Play the long prompts with each form of admission: more than the one node that decodes can serve."""
    seen, told = [], []
    for form in FORMS:
        nodes = {"prefill": 20, "decode": 1}
        cluster = Cluster(profile=PROFILE, nodes=nodes, admission=form, ttft_s=TTFT_S, tbt_s=TBT_S)
        outcome = play(cluster, TraceSource(read_trace(trace)), 1)
        low_s, high_s = STEADY_S
        loads = [
            load for at_s, load in zip(outcome.loads.times_s, outcome.loads.decode) if low_s <= at_s < high_s
        ]
        rate = len(outcome.records) / max(one.arrived_s for one in outcome.records)
        goodput = rate * outcome.share_within(TTFT_S, USERS_TBT_S)
        name = f"{form}: " * bool(told)  # the line begins with the name of the first row
        told.append(
            f"{name}goodput {goodput:.2f} requests/s, decode load {mean(loads):.2f} +- {pstdev(loads):.2f}"
        )
        seen.append(shown(f"long prompts, {form}", outcome))
    seen[0]["said"] = "; ".join(told)
    return seen


def shown(what: str, outcome: Outcome) -> dict[str, Any]:
    """Tell when the tokens of each request came, in ms, and how many tokens were reused in all."""
    times = [round(1000 * at_s) for one in outcome.records for at_s in one.token_times_s[:1]]
    return {
        "what": what,
        "tokens": times,
        "reused": sum(outcome.reused.values()),
        "seconds": outcome.mean_ttft_s,
        "said": "",
        "kind": "times",
        "how": "simulated",
    }


def main() -> None:
    """Play everything."""
    data = Path(sys.argv[2])
    seen = policies(data / "conversations.jsonl") + forms(data / "long_prompts.jsonl")
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
