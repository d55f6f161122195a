"""Samples written by hand, for the tests of this folder."""

from __future__ import annotations

from mooncake_lite.tools.top.figures import Figures, figures_of
from mooncake_lite.tools.top.sample import PREFIX, Sample, read_samples

SERVER = """
server_info{model="tiny-model",version="0.1.0"} 1
ready 1
degraded 0
uptime_seconds 75
"""


def prefixed(lines: str) -> str:
    """Lines of Prometheus's text, with the prefix of our names."""
    return "\n".join(PREFIX + line for line in lines.split("\n") if line)


ONLY = prefixed(SERVER)
"""What /metrics says of a server alone."""


def sample(at_s: float, lines: str, server: str = SERVER) -> Sample:
    """A scrape at a time: lines of Prometheus's text, without the prefix of the names."""
    return Sample(at_s, read_samples(prefixed(server + lines)))


def figures(before: str, now: str, server: str = SERVER) -> Figures:
    """The figures of two scrapes, two seconds apart."""
    return figures_of(sample(100.0, before, server), sample(102.0, now, server))


def ranks(prefill: int, decode: int) -> str:
    """The lines of so many ranks; the last one of each role has the most to do."""
    lines = []
    for number in range(1, prefill + decode + 1):
        role = "prefill" if number <= prefill else "decode"
        of = f'{{rank="{number}",role="{role}"}}'
        lines += [f"kv_cache_pages{of} 1000", f"kv_cache_pages_used{of} {number}"]
        lines += [f"{role}_requests_waiting{of} 0", f"{role}_requests_running{of} {number}"]
    return "\n".join(lines)


def members(*down: int) -> str:
    """A prefill rank, two decode instances of three ranks, and a store: ranks 1, 2 to 4, 5 to 7, and 8."""
    roles = ["prefill", *["decode", "member", "member"] * 2, "store"]
    firsts = (1, 2, 2, 2, 5, 5, 5, 8)
    lines = []
    for rank, (role, first) in enumerate(zip(roles, firsts), 1):
        of = f'rank="{rank}",role="{role}"'
        lines.append(f'rank_up{{{of},first="{first}"}} {int(rank not in down)}')
        lines.append(f'moved_bytes_total{{{of},op="read",peer="store"}} {100 * rank}')
        if role in ("prefill", "decode") and rank not in down:
            lines.append(f"kv_cache_pages{{{of}}} 10")
    return "\n".join(lines)
