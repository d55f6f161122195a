"""What a run came to: each request, the load of the cluster over time, and what its ranks did.

Made by `play.py`, used by the modules that print and draw results. Explained in docs/explain/simulator.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import numpy as np

from mooncake_lite.control import Control
from mooncake_lite.ranks.computing.machine import ComputingRank
from mooncake_lite.simulator.hardware import Hardware
from mooncake_lite.workloads.metrics import (
    COMPLETED,
    REJECTED,
    Record,
    is_within,
    longest_gap_s,
    spread_of,
    summary,
)
from scheduler.plain_alone import Bound

TBT_LIMITS_MS = (50, 60, 70, 80, 90, 100, 120, 200, 300)
"""Limits on TBT for which shares are told; those of the paper are among them (FAST'25, figures 1 and 9)."""


@dataclass(slots=True)
class Loads:
    """Loads over time; the first two as multiples of their limits (arXiv 2407.00079, 7.1).

    prefill   mean of the instances: seconds until a new prompt could begin, over the limit on TTFT
    decode    mean of the instances: seconds of the present step, over the limit on TBT
    waiting   requests that wait at the conductor
    decoding  sequences in all running batches
    """

    times_s: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    decoding: list[int] = field(default_factory=list)

    @property
    def columns(self) -> dict[str, list[Any]]:
        """Return the columns by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    def after(self, begin_s: float, end_s: float) -> Loads:
        """Return the loads in a span of time, its ends included."""
        kept = [n for n, at in enumerate(self.times_s) if begin_s <= at <= end_s]
        return Loads(**{name: [column[n] for n in kept] for name, column in self.columns.items()})

    def correlation(self) -> float:
        """Return Pearson's coefficient of the first two; nan when one of them never changes."""
        if min(np.ptp(self.prefill), np.ptp(self.decode)) == 0:
            return nan
        return float(np.corrcoef(self.prefill, self.decode)[0, 1])


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run, without the requests of its first part, which warms the cluster up.

    records      of the requests that count, by arrival
    loads        while they arrived
    prompts      tokens of all prompts that were computed or reused, and of these by tier
    prefill_s    of computing, of all ranks together; prefills: prompts that were computed
    bytes_moved  by link, as the hardware counts them
    outside      share of the passes of a kind that the profile does not cover
    copies       copies of a block in DRAM -> blocks with so many, when the last request had come
    mechanisms   name -> how often it was tried, and how often it failed; pool: what the directory counted
    killed       role and time of each rank that died
    bound        of the waits for decode slots, where the queue gives one
    """

    records: list[Record]
    loads: Loads
    prompt_tokens: int
    reused: dict[str, int]
    prefill_s: float
    prefills: int
    bytes_moved: dict[str, int]
    outside: dict[str, float]
    copies: dict[int, int]
    mechanisms: dict[str, dict[str, int]]
    pool: dict[str, int]
    killed: Sequence[tuple[str, float]] = ()
    bound: Bound | None = None

    @classmethod
    def of(
        cls,
        records: Sequence[Record],
        loads: Loads,
        warm_up: float,
        ranks: Sequence[ComputingRank],
        hardware: Hardware,
        keys: Iterable[int | None],
        control: Control,
        killed: Sequence[tuple[str, float]] = (),
    ) -> Outcome:
        """Measure a run.

        warm_up   share of its requests that do not count
        keys      of all objects in the pool when the last request had come
        control   the control plane of the run
        killed    role and time of each rank that died
        """
        in_order = sorted(records, key=lambda one: one.arrived_s)
        counted = in_order[int(warm_up * len(in_order)) :]
        reused, counters = Counter[str](), Counter[str]()
        for rank in ranks:
            reused.update(rank.reused)
            counters.update(rank.counters)  # type: ignore[arg-type]
        return cls(
            counted,
            loads.after(counted[0].arrived_s, counted[-1].arrived_s),
            int(counters["prefill_computed_tokens_total"]) + sum(reused.values()),
            dict(sorted(reused.items())),
            float(counters["prefill_seconds_total"]),
            int(counters["prefills_total"]),
            hardware.bytes_moved(),
            hardware.outside(),
            dict(sorted(Counter(Counter(keys).values()).items())),
            dict(sorted(control.mechanisms.counts.items())),
            control.directory.counters,
            killed,
            control.state.held.bound(inf),
        )

    @property
    def mean_ttft_s(self) -> float:
        """Return the mean TTFT of the requests that were answered; nan when none was."""
        answered = [one.ttft_s for one in self.records if one.outcome == COMPLETED]
        return sum(answered) / len(answered) if answered else nan

    @property
    def refused(self) -> float:
        """Return the share of all requests that was refused."""
        return sum(one.outcome == REJECTED for one in self.records) / len(self.records)

    @property
    def wasted(self) -> float:
        """Return the share of all requests that was refused after its prefill."""
        refused = [one for one in self.records if one.outcome == REJECTED]
        return sum(len(one.token_times_s) > 0 for one in refused) / len(self.records)

    def gaps_s(self, after_s: float) -> list[float]:
        """Return the longest gap from a moment on, of each answer that had begun and not ended then."""
        open_then = [one for one in self.records if one.token_times_s]
        open_then = [one for one in open_then if one.token_times_s[0] <= after_s < one.token_times_s[-1]]
        return [longest_gap_s(one, after_s) for one in open_then]

    def share_within(self, ttft_s: float, tbt_s: float) -> float:
        """Return the share of all requests that met both limits; a refused one met none."""
        return sum(is_within(one, ttft_s, tbt_s) for one in self.records) / len(self.records)

    def to_dict(self, ttft_s: float, tbt_s: float) -> dict[str, Any]:
        """Return what the JSON file has: see `workloads.metrics.summary` for the latencies.

        second_token_s        from the arrival: by then the KV of the prompt is where the answer is decoded
        shares_within_tbt_ms  limit on TBT -> share of all requests that met it and the limit on TTFT
        """
        done = [one for one in self.records if one.outcome == COMPLETED]
        long = [one for one in done if len(one.token_times_s) > 1]
        in_time = np.array([one.tbt_s for one in done if one.ttft_s <= ttft_s])
        shares = {ms: float(np.sum(in_time <= ms / 1000)) / len(self.records) for ms in TBT_LIMITS_MS}
        tokens = max(1, self.prompt_tokens)
        rates = {tier: count / tokens for tier, count in self.reused.items()}
        return {
            **summary(self.records, ttft_s, tbt_s),
            "second_token_s": spread_of(one.token_times_s[1] - one.arrived_s for one in long),
            "shares_within_tbt_ms": shares,
            "hit_rate": {"all": sum(rates.values()), "dram": 0.0, "ssd": 0.0, **rates},
            "prefill_s_per_request": self.prefill_s / max(1, self.prefills),
            "wasted_prefills": self.wasted,
            "bytes_moved": self.bytes_moved,
            "outside_profile": self.outside,
            "copies": self.copies,
            "mechanisms": self.mechanisms,
            "pool": self.pool,
            **({} if self.bound is None else {"queue_bound": self.bound._asdict()}),
            "decode_load_swing": float(np.std(self.loads.decode)) if self.loads.decode else None,
            "loads": self.loads.columns,
        }
