"""Limits on latency, and how a candidate does by them: what all of the planner speaks of."""

from __future__ import annotations

from dataclasses import dataclass

Nodes = tuple[int, int]
"""(nodes that prefill, nodes that decode)"""


@dataclass(frozen=True, slots=True)
class Limit:
    """An SLO: `share` of all requests stay within `seconds`."""

    seconds: float
    share: float

    def __str__(self) -> str:
        """Return it as the command takes it."""
        return f"{self.seconds * 1e3:g}@{self.share:g}"


@dataclass(frozen=True, slots=True)
class Found:
    """How one candidate does.

    ttft, tbt       shares of all requests within the limits
    ttft_s, tbt_s   mean and 90th percentile of each
    fits            the KV of running sequences fits
    how             replayed, simulated, or stopped: a simulation that could not keep a limit any more, whose
                    shares are the most that they could have become
    """

    nodes: Nodes
    ttft: float
    tbt: float
    ttft_s: tuple[float, float]
    tbt_s: tuple[float, float]
    fits: bool = True
    how: str = "replayed"

    @property
    def shares(self) -> tuple[float, float]:
        """Return the share within each limit, that on nodes that prefill and that on nodes that decode."""
        return self.ttft, self.tbt

    def keeps(self, ttft: Limit, tbt: Limit) -> bool:
        """Tell whether this candidate keeps both limits."""
        return not self.lacks(ttft, tbt)

    def lacks(self, ttft: Limit, tbt: Limit) -> str:
        """Return what is in the way, in a few words; "" where nothing is."""
        most = "at most " if self.how == "stopped" else ""
        words = [] if self.fits else ["the KV of running sequences does not fit"]
        kinds = ("first tokens come", ttft), ("answers have gaps", tbt)
        for share, (what, limit) in zip(self.shares, kinds):
            if share < limit.share:
                words.append(f"{most}{share:.1%} of {what} within {limit.seconds * 1e3:g} ms")
        return "; ".join(words)
